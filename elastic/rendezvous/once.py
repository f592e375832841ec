"""A transaction whose outcome is known in the end, although an answer may be lost on the way."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from elastic.errors import EtcdUnreachable
from elastic.rendezvous.client import Etcd
from elastic.rendezvous.values import Compare, LeaseGone, Op, Put, TxnResult, TxnUnknown, modified

_PAUSE_S = 0.05


def txn_once(
    etcd: Etcd,
    compare: Sequence[Compare],
    then: Sequence[Op],
    marker_key: str,
    *,
    lease: int = 0,
    deadline_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> TxnResult:
    """Applies `then` at most once if `compare` holds, and says which, also when answers get lost.

    The transaction also writes a unique attempt id to `marker_key` and demands that the marker was not written since
    it was first read here. So a repeat cannot apply it twice: whichever try arrives first moves the marker, and the
    id in it says that it was ours. If the comparison fails while an earlier try may still be on its way (in the
    socket of a stopped etcd, say), the marker is moved without the operations, so that the late one is refused.

    Args:
        marker_key: one per writer, never used by two at a time; its value means nothing afterwards.
        lease: the lease of the marker, 0 to keep it.
        deadline_s: how long to try, in seconds; each try has the client's own deadline.

    Raises:
        TxnUnknown: still unknown at the deadline, or another writer moved the marker.
        LeaseGone: a put names a lease that does not exist; nothing was written.
    """
    attempt = uuid.uuid4().hex.encode()
    refusal = b"refused " + attempt
    deadline = clock() + deadline_s
    before = etcd.get(marker_key)
    guard = modified(marker_key, before.mod_revision if before else 0)
    answer_lost = False
    while True:
        try:
            result, marker = etcd.txn_or_get([*compare, guard], [*then, Put(marker_key, attempt, lease)], marker_key)
            if result.succeeded:
                return result
            seen, seen_revision = (marker.value, marker.mod_revision) if marker else (b"", 0)
            if seen_revision == guard.expected and answer_lost:
                # Whether this lands, or a late try before it, or its answer is lost: the next round sees the marker.
                etcd.txn([guard], [Put(marker_key, refusal, lease)])
                continue
        except LeaseGone:
            raise  # only a transaction whose comparisons hold is refused for this, so no earlier try was applied
        except EtcdUnreachable as e:
            answer_lost = answer_lost or isinstance(e, TxnUnknown)
            if not answer_lost:
                raise
            if clock() >= deadline:
                raise TxnUnknown(e.message, f"{marker_key} holds {attempt.decode()} if it was applied") from e
            sleep(_PAUSE_S)
            continue
        if seen == attempt:
            return TxnResult(True, seen_revision)
        if seen == refusal or seen_revision == guard.expected:
            return TxnResult(False, result.revision)
        raise TxnUnknown(f"{marker_key} was written by another", "use one marker key per writer")
