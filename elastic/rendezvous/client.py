"""The etcd client of this project: plain values in and out, a deadline on every call, one kind of error."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from elastic.rendezvous.connections import Connections
from elastic.rendezvous.shim import load_etcd3
from elastic.rendezvous.stream import WatchStream
from elastic.rendezvous.values import (
    KV,
    Compare,
    LeaseGone,
    Op,
    Put,
    Status,
    TxnResult,
    absent,
    kv_from,
    prefix_end,
    txn_request,
)


class Etcd:
    """A thread-safe client over one or more endpoints. Does not survive a fork.

    Every method raises `elastic.errors.EtcdUnreachable` (or a subclass named there) within its deadline. Reads,
    puts, deletes and lease calls are repeated inside the deadline, on the next endpoint if there is one;
    transactions are sent once.

    Args:
        endpoints: `host:port` of each member.
        timeout_s: deadline of a whole call in seconds, repeats included.
        user, password: both, or neither for an etcd without authentication.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_s: float = 2.0,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self._connections = Connections(endpoints, timeout_s, user, password)
        self._rpc: Any = load_etcd3().etcdrpc

    @property
    def timeout_s(self) -> float:
        """The deadline of a call, in seconds."""
        return self._connections.timeout_s

    def get(self, key: str) -> KV | None:
        """The key as the majority knows it now, or None."""
        request = self._rpc.RangeRequest(key=key.encode())
        answer = self._connections.call(f"get {key}", lambda c, **call: c.kvstub.Range(request, **call))
        return kv_from(answer.kvs[0]) if answer.kvs else None

    def range(self, prefix: str) -> tuple[list[KV], int]:
        """All keys with this prefix, sorted, and the store's revision at which they were read."""
        request = self._rpc.RangeRequest(key=prefix.encode(), range_end=prefix_end(prefix))
        answer = self._connections.call(f"list {prefix}", lambda c, **call: c.kvstub.Range(request, **call))
        return [kv_from(kv) for kv in answer.kvs], answer.header.revision

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Writes unconditionally; returns the store's revision of (the last repeat of) the write.

        Raises:
            LeaseGone: the lease does not exist; nothing was written.
        """
        request = self._rpc.PutRequest(key=key.encode(), value=value, lease=lease)
        answer = self._connections.call(f"put {key}", lambda c, **call: c.kvstub.Put(request, **call))
        return int(answer.header.revision)

    def delete(self, key: str) -> bool:
        """Whether the key was there. (False also if an earlier try deleted it and its answer was lost.)"""
        return self._delete(key, self._rpc.DeleteRangeRequest(key=key.encode())) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Deletes all keys with this prefix; returns how many the last try found."""
        return self._delete(prefix, self._rpc.DeleteRangeRequest(key=prefix.encode(), range_end=prefix_end(prefix)))

    def _delete(self, name: str, request: Any) -> int:
        answer = self._connections.call(f"delete {name}", lambda c, **call: c.kvstub.DeleteRange(request, **call))
        return int(answer.deleted)

    def create(self, key: str, value: bytes, lease: int = 0) -> bool:
        """Writes only if the key is absent; whether it did.

        Raises:
            TxnUnknown: no answer; read the key back, with a value that tells whose it is.
        """
        return self.txn([absent(key)], [Put(key, value, lease)]).succeeded

    def txn(self, compare: Sequence[Compare], then: Sequence[Op]) -> TxnResult:
        """All operations if all comparisons hold, else none. Sent once.

        Raises:
            TxnUnknown: no answer; it may have been applied, or be applied later. See `txn_once`.
            LeaseGone: a put names a lease that does not exist; nothing was written.
        """
        return self.txn_or_get(compare, then, "")[0]

    def txn_or_get(self, compare: Sequence[Compare], then: Sequence[Op], key: str) -> tuple[TxnResult, KV | None]:
        """Like `txn`; if a comparison fails, also `key` as it was at that moment."""
        request = txn_request(self._rpc, compare, then, otherwise_get=key)
        name = f"transaction on {', '.join(sorted({op.key for op in then}))}"
        answer = self._connections.call(name, lambda c, **call: c.kvstub.Txn(request, **call), idempotent=False)
        result = TxnResult(answer.succeeded, answer.header.revision)
        if result.succeeded or not key:
            return result, None
        found = answer.responses[0].response_range.kvs
        return result, kv_from(found[0]) if found else None

    def lease_grant(self, ttl_s: int) -> int:
        """A new lease's id. etcd raises `ttl_s` to its floor, 1.5 election timeouts rounded up to a second."""
        request = self._rpc.LeaseGrantRequest(TTL=ttl_s)
        # A repeat whose first answer was lost leaves a second lease behind; nobody keeps it, so it ends by itself.
        answer = self._connections.call(
            f"grant a lease of {ttl_s} s", lambda c, **call: c.leasestub.LeaseGrant(request, **call)
        )
        return int(answer.ID)

    def lease_keepalive(self, lease: int, timeout_s: float | None = None) -> int:
        """Renews in full; the seconds it will live from now, 0 for a lease that is dead."""
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)

        def once(client: Any, **call: Any) -> int:
            stream = client.leasestub.LeaseKeepAlive(iter([request]), **call)
            try:
                return int(next(stream).TTL)
            finally:
                stream.cancel()

        return self._connections.call(f"keep lease {lease:x}", once, timeout_s=timeout_s)

    def lease_revoke(self, lease: int) -> None:
        """Ends the lease and deletes its keys; a lease that is gone already is no error."""
        request = self._rpc.LeaseRevokeRequest(ID=lease)
        try:
            self._connections.call(
                f"revoke lease {lease:x}", lambda c, **call: c.leasestub.LeaseRevoke(request, **call)
            )
        except LeaseGone:
            return

    def status(self) -> Status:
        """What the current endpoint says of itself; it need not know of the last writes elsewhere."""
        request = self._rpc.StatusRequest()
        answer = self._connections.call("status", lambda c, **call: c.maintenancestub.Status(request, **call))
        header = answer.header
        return Status(header.cluster_id, header.revision, answer.leader != 0, answer.version, answer.dbSize)

    def cluster_id(self) -> int:
        """Changes only when etcd was set up anew."""
        return self.status().cluster_id

    def watch_stream(self, prefix: str, start_revision: int) -> WatchStream:
        """One raw stream of changes, for `Watch`."""
        create = self._rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=prefix_end(prefix), start_revision=start_revision
        )
        return WatchStream(self._connections, prefix, self._rpc.WatchRequest(create_request=create))

    def close(self) -> None:
        """Ends what is under way with `EtcdUnreachable`; every later call raises it."""
        self._connections.close()

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
