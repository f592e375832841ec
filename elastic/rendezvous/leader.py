"""Who may write a job's state: one leader, fenced by the revision at which it took the leader key."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from elastic.errors import ElasticError
from elastic.rendezvous.client import Etcd
from elastic.rendezvous.lease import Lease
from elastic.rendezvous.once import txn_once
from elastic.rendezvous.values import Compare, Delete, LeaseGone, Op, TxnResult, TxnUnknown, created
from elastic.rendezvous.watch import watch_prefix


class Fenced(ElasticError):
    """Another took over, or nobody leads: what was to be written was not, and this leader must stop leading."""

    code = "fenced"
    advice = "nothing is to be done: another controller leads"


class Leadership:
    """One candidate for the leader key.

    The lease only decides when another may follow; it does not keep a stopped leader from writing when it wakes. The
    fence does: every write of a leader is one transaction that also compares the create revision of the leader key.

    Args:
        key: the leader key; transaction markers go beside it, to `attempts/<fence>`.
        lease: a live lease, renewed by the caller after a loss.
        identity: of this process incarnation, never used by another.
    """

    def __init__(
        self, etcd: Etcd, key: str, lease: Lease, identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._etcd = etcd
        self._key = key
        self._lease = lease
        self._identity = identity.encode()
        self._clock = clock
        self._fence = 0
        self._one_writer = threading.Lock()  # the marker of the transactions has one writer at a time

    @property
    def fence(self) -> int:
        """The create revision of the leader key as this candidate made it; 0 if it never led."""
        return self._fence

    def try_acquire(self) -> bool:
        """Takes the key if nobody has it; whether this candidate leads now.

        Raises:
            LeaseGone: the lease is dead; renew it first.
            EtcdUnreachable: etcd does not answer.
        """
        with contextlib.suppress(TxnUnknown):  # the key itself says whose it is
            self._etcd.create(self._key, self._identity, self._lease.id)
        holder = self._etcd.get(self._key)
        ours = holder is not None and (holder.value, holder.lease) == (self._identity, self._lease.id)
        self._fence = holder.create_revision if ours and holder is not None else 0
        return ours

    def campaign(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds to become leader; false when the time is over.

        Raises:
            LeaseGone: the lease was lost meanwhile.
            EtcdUnreachable: etcd did not answer when the key became free.
        """
        deadline = self._clock() + timeout_s
        _, watch = watch_prefix(self._etcd, self._key)
        with watch:
            while not self.try_acquire():
                while not any(event.kv.key == self._key for event in watch.get(self._patience_s(deadline))):
                    if self._lease.lost:
                        raise LeaseGone(f"the lease was lost while waiting for {self._key}", "renew it")
                    if self._clock() >= deadline:
                        return False
        return True

    def fenced(self, then: Sequence[Op], compare: Sequence[Compare] = (), deadline_s: float = 10.0) -> TxnResult:
        """One transaction as the leader; `succeeded` is false only if one of `compare` fails.

        Raises:
            Fenced: this candidate does not lead; nothing was written.
            TxnUnknown: no answer for `deadline_s` seconds; it may or may not have been written.
        """
        fence = self._fence
        if not fence:
            raise Fenced(f"{self._identity.decode()} does not hold {self._key}")
        marker = f"{self._key.rpartition('/')[0]}/attempts/{fence:020d}"
        try:
            with self._one_writer:
                result = txn_once(
                    self._etcd,
                    [created(self._key, fence), *compare],
                    then,
                    marker,
                    lease=self._lease.id,
                    deadline_s=deadline_s,
                )
        except LeaseGone:
            self._check(fence)
            raise  # another lease, of one of the writes
        if not result.succeeded:
            self._check(fence)
        return result

    def resign(self) -> None:
        """Gives the key up, if it is still ours; a successor need not wait for the lease.

        Raises:
            EtcdUnreachable: no answer; the end of the lease will do it.
        """
        fence, self._fence = self._fence, 0
        if fence:
            self._etcd.txn([created(self._key, fence)], [Delete(self._key)])

    def _patience_s(self, deadline: float) -> float:
        # Wakes to look at the local lease, not at etcd.
        return max(0.0, min(deadline - self._clock(), self._lease.ttl_s / 3))

    def _check(self, fence: int) -> None:
        holder = self._etcd.get(self._key)
        if holder is None or holder.create_revision != fence:
            leader = "nobody leads" if holder is None else f"{holder.value.decode()} leads"
            raise Fenced(f"{self._identity.decode()} (fence {fence}) was replaced at {self._key}: {leader}")
