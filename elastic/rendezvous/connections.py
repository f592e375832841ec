"""One live etcd3 client at a time, replaced after an error by a fresh one for the next endpoint.

etcd3 knows a single endpoint, never logs in again, and gives its calls no deadline unless asked. Here every call has
one, errors come out as `EtcdUnreachable`, and a client that failed is not used again, because its channel may sit in a
connection attempt or hold a stream to a member that is silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import tenacity

from elastic.errors import EtcdUnreachable
from elastic.rendezvous.shim import load_etcd3
from elastic.rendezvous.values import LeaseGone, TxnUnknown

T = TypeVar("T")

# With these etcd answered, so the client is good, nothing was done, and the same request would be refused again.
_ANSWERS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

_GRPC_OPTIONS = (
    # Channels to one address share sockets and back-off by default; a fresh client must try afresh.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A proxy for the web does not reach a cluster's etcd.
    ("grpc.enable_http_proxy", 0),
    # A listing of many large values passes grpc's default of 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
)


@dataclass(eq=False)
class Connection:
    """A client of etcd3 and who uses it; closed when it is retired and the last user has left."""

    client: Any
    endpoint: str
    users: int = 0
    retired: bool = False
    proven: bool = False  # an answer has come over it


class Connections:
    """Thread-safe. A client does not survive a fork: make a new one in the child.

    Args:
        endpoints: `host:port` of each etcd member, tried in turn.
        timeout_s: the default deadline of a call, over all its tries (and one login, where there is a password).
        user, password: both or neither.
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float, user: str | None, password: str | None) -> None:
        if not endpoints or any(not e.rpartition(":")[0] or not e.rpartition(":")[2].isdecimal() for e in endpoints):
            raise ValueError(f"etcd endpoints must be host:port, got {list(endpoints)}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.timeout_s = timeout_s
        self._endpoints = tuple(endpoints)
        self._credentials = {"user": user, "password": password}
        self._etcd3 = load_etcd3()
        self._lock = threading.Lock()
        self._current: Connection | None = None
        self._next = 0
        self._closed = False

    def call(
        self,
        operation: str,
        rpc: Callable[..., T],
        *,
        timeout_s: float | None = None,
        idempotent: bool = True,
    ) -> T:
        """Runs `rpc(client, timeout=..., metadata=...)`; tries again only if `idempotent` or surely not done.

        Raises:
            TxnUnknown: not idempotent, sent, and no answer.
            LeaseGone: etcd says the lease does not exist.
            EtcdUnreachable: anything else.
        """
        budget_s = self.timeout_s if timeout_s is None else max(timeout_s, 0.001)
        deadline = time.monotonic() + budget_s
        current = self._current
        if not idempotent and (current is None or not current.proven):
            # A read first, which may be repeated, so that a dead endpoint is found before anything is at stake.
            self.call(operation, probe, timeout_s=budget_s)
        # One silent member must leave time for the others.
        try_s = budget_s / len(self._endpoints) if idempotent else budget_s
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda e: _may_retry(e, idempotent)),
            stop=tenacity.stop_before_delay(max(deadline - time.monotonic(), 0.001)),
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.25),
            reraise=True,
        )
        try:
            answer: T = retrying(self._try, rpc, deadline, try_s)
            return answer
        except grpc.RpcError as e:
            raise self.map_error(operation, e, idempotent) from e

    def _try(self, rpc: Callable[..., T], deadline: float, try_s: float) -> T:
        with self.borrow() as connection:
            timeout_s = max(0.001, min(try_s, deadline - time.monotonic()))
            try:
                answer = rpc(connection.client, timeout=timeout_s, metadata=connection.client.metadata)
            except grpc.RpcError as e:
                if e.code() not in _ANSWERS:
                    self.retire(connection)
                raise
            except ValueError:
                self._live()  # grpc raises this on a channel that was closed meanwhile; ours is the better error
                raise
            connection.proven = True
            return answer

    @contextmanager
    def borrow(self) -> Iterator[Connection]:
        """The current connection, not closed before the block ends (except by `close`)."""
        with self._lock:
            connection = self._live()
            if connection is not None:
                connection.users += 1
        if connection is None:
            fresh = self._connect()  # logs in, so outside the lock
            with self._lock:
                connection = self._live()
                if connection is None:
                    connection = self._current = fresh
                connection.users += 1
            if connection is not fresh:
                fresh.client.close()
        try:
            yield connection
        finally:
            with self._lock:
                connection.users -= 1
                idle = connection.retired and connection.users == 0
            if idle:
                connection.client.close()

    def _live(self) -> Connection | None:
        if self._closed:
            raise EtcdUnreachable("this etcd client is closed", "make a new one")
        return self._current

    def _connect(self) -> Connection:
        with self._lock:
            endpoint = self._endpoints[self._next % len(self._endpoints)]
        host, _, port = endpoint.rpartition(":")
        try:
            client = self._etcd3.client(
                host=host,
                port=int(port),
                timeout=self.timeout_s / len(self._endpoints),
                grpc_options=_GRPC_OPTIONS,
                **self._credentials,
            )
        except grpc.RpcError as e:
            if e.code() not in _ANSWERS:
                with self._lock:
                    self._next += 1
            raise
        return Connection(client, endpoint)

    def retire(self, connection: Connection) -> None:
        """The next call gets a fresh client for the next endpoint."""
        with self._lock:
            connection.retired = True
            if self._current is connection:
                self._current = None
                self._next += 1
            idle = connection.users == 0
        if idle:
            connection.client.close()

    def close(self) -> None:
        """Ends calls and streams that are under way, with an error."""
        with self._lock:
            self._closed = True
            connection, self._current = self._current, None
        if connection is not None:
            connection.client.close()

    def map_error(self, operation: str, error: grpc.RpcError, idempotent: bool = True) -> EtcdUnreachable:
        """The error of this project for an error of grpc."""
        code, detail = error.code(), (error.details() or "").strip()
        where = f"etcd at {', '.join(self._endpoints)}"
        what = f"{operation}: {code.name.lower()}: {detail}"
        if code is grpc.StatusCode.NOT_FOUND and "lease" in detail:
            return LeaseGone(f"{where}: {what}", "the owner was silent for longer than the lease's time to live")
        if code in _ANSWERS or code is grpc.StatusCode.UNAUTHENTICATED:
            return EtcdUnreachable(f"{where} refused {what}", "check the etcd user, its rights and etcd's limits")
        if not idempotent:
            return TxnUnknown(f"{where} did not answer {what}", "read back whether it was applied")
        return EtcdUnreachable(
            f"{where} did not answer {what}", "check that etcd runs and that this machine reaches it"
        )


def _may_retry(error: BaseException, idempotent: bool) -> bool:
    if not isinstance(error, grpc.RpcError) or error.code() in _ANSWERS:
        return False
    # An expired token is refused before the request is looked at; the fresh client logs in again.
    return idempotent or error.code() is grpc.StatusCode.UNAUTHENTICATED


def probe(client: Any, **call: Any) -> None:
    """The cheapest read that needs a majority."""
    client.kvstub.Range(load_etcd3().etcdrpc.RangeRequest(key=b"\0", count_only=True), **call)
