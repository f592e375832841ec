"""Plain values that cross the client's border: what is stored, compared and written, and what can go wrong.

Keys are `str`, values `bytes`; nothing here holds a connection or a message of etcd3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elastic.errors import EtcdUnreachable


class TxnUnknown(EtcdUnreachable):
    """The answer to a transaction was lost: it may have been applied, may never be, or may be applied yet."""

    code = "txn_unknown"


class LeaseGone(EtcdUnreachable):
    """etcd answered that the lease does not exist (any more); nothing was written, and a retry cannot help."""

    code = "lease_gone"


@dataclass(frozen=True)
class KV:
    """A stored key.

    `create_revision` changes when the key is deleted and made anew, `mod_revision` with every write; `lease` is 0 for
    a key that stays. In a delete event the value is empty and only `key` and `mod_revision` mean anything.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@dataclass(frozen=True)
class Status:
    """The answering member's view. Another `cluster_id` or a lower `revision` than before means data was lost."""

    cluster_id: int
    revision: int
    has_leader: bool
    version: str
    db_bytes: int


@dataclass(frozen=True)
class Compare:
    """One condition of a transaction; build it with `created`, `absent`, `modified` or `value_is`."""

    key: str
    target: Literal["create", "mod", "value"]
    expected: int | bytes


def created(key: str, revision: int) -> Compare:
    """The key exists and was created at `revision`: the fence of whoever created it."""
    return Compare(key, "create", revision)


def absent(key: str) -> Compare:
    """The key does not exist."""
    return Compare(key, "create", 0)


def modified(key: str, revision: int) -> Compare:
    """The key's last write was at `revision`; 0 stands for a key that does not exist."""
    return Compare(key, "mod", revision)


def value_is(key: str, value: bytes) -> Compare:
    """The key exists with exactly this value."""
    return Compare(key, "value", value)


@dataclass(frozen=True)
class Put:
    """Writes a key; `lease` 0 makes it stay until deleted."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Deletes a key; deleting an absent one is no failure."""

    key: str


Op = Put | Delete


@dataclass(frozen=True)
class TxnResult:
    """`succeeded`: all comparisons held and all operations were applied, at store revision `revision`."""

    succeeded: bool
    revision: int


def prefix_end(prefix: str) -> bytes:
    """The first key after all keys with this prefix. UTF-8 has no byte 0xff, so the last byte can be raised."""
    raw = prefix.encode()
    if not raw:
        raise ValueError("an empty prefix would cover the whole store")
    return raw[:-1] + bytes([raw[-1] + 1])


def kv_from(message: Any) -> KV:
    """From etcd's `mvccpb.KeyValue`."""
    return KV(message.key.decode(), message.value, message.create_revision, message.mod_revision, message.lease)


def txn_request(rpc: Any, compare: Sequence[Compare], then: Sequence[Op], otherwise_get: str = "") -> Any:
    """An etcd `TxnRequest`; `rpc` is `etcd3.etcdrpc`. A failed transaction answers with `otherwise_get`, if named."""
    request = rpc.TxnRequest()
    for condition in compare:
        message = request.compare.add(key=condition.key.encode(), result=rpc.Compare.EQUAL)
        match condition.target:
            case "create":
                message.target, message.create_revision = rpc.Compare.CREATE, condition.expected
            case "mod":
                message.target, message.mod_revision = rpc.Compare.MOD, condition.expected
            case "value":
                message.target, message.value = rpc.Compare.VALUE, condition.expected
    for op in then:
        match op:
            case Put(key, value, lease):
                request.success.add(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease))
            case Delete(key):
                request.success.add(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))
    if otherwise_get:
        request.failure.add(request_range=rpc.RangeRequest(key=otherwise_get.encode()))
    return request
