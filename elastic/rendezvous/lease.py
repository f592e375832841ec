"""A lease kept alive in the background, which knows by itself when it must be taken for lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

from elastic.errors import EtcdUnreachable
from elastic.rendezvous.client import Etcd


class Lease:
    """Grants a lease and keeps it alive every third of its time to live, from a daemon thread.

    It counts as lost when etcd says so, or `ttl_s` after the last successful keepalive was *sent*: etcd cannot have
    begun to count earlier than that, so the lease is never believed in for longer than it lives. The other way round
    is possible: etcd renews every lease in full when its leader changes, so keys may outlive a lost lease. Errors
    before that moment are only retried.

    Args:
        ttl_s: time to live in seconds; etcd may raise it, this class still counts with what was asked.
        clock: monotonic seconds.
        on_lost: called once per loss, from the thread; it may call `renew`.

    Raises:
        EtcdUnreachable: no lease could be granted.
    """

    def __init__(
        self,
        etcd: Etcd,
        ttl_s: int,
        clock: Callable[[], float] = time.monotonic,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        if ttl_s < 1:
            raise ValueError(f"a lease lives for whole seconds, at least 1, got {ttl_s}")
        self.ttl_s = ttl_s
        self._etcd = etcd
        self._clock = clock
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._closed = False
        self._id, self._deadline = self._grant()
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="elastic-lease", daemon=True)
        self._thread.start()

    @property
    def id(self) -> int:
        """The lease to attach keys to; another one after `renew`."""
        return self._id

    @property
    def lost(self) -> bool:
        """Whether keys of this lease may be gone. Also true the moment the deadline passes in a stuck thread."""
        with self._changed:
            return self._dead or self._clock() >= self._deadline

    def renew(self) -> int:
        """After a loss: a new lease. The old one's keys are not carried over.

        Raises:
            EtcdUnreachable: no lease could be granted; the loss stands.
        """
        granted, deadline = self._grant()
        with self._changed:
            self._id, self._deadline, self._dead = granted, deadline, False
            self._changed.notify_all()
        return granted

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and revokes the lease, which deletes its keys, within about `timeout_s` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(EtcdUnreachable):  # nobody keeps it alive any more, so it ends by itself
            self._etcd.lease_revoke(self._id)
        self._thread.join(timeout_s)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _grant(self) -> tuple[int, float]:
        sent = self._clock()
        return self._etcd.lease_grant(self.ttl_s), sent + self.ttl_s

    def _run(self) -> None:
        pause_s = self.ttl_s / 3
        while True:
            with self._changed:
                if self._dead:
                    self._changed.wait_for(lambda: self._closed or not self._dead)  # for `renew`
                self._changed.wait_for(lambda: self._closed, pause_s)
                if self._closed:
                    return
                lease, left_s = self._id, self._deadline - self._clock()
            kept = self._keepalive(lease, left_s)
            with self._changed:
                dead = self._dead
            if dead and self._on_lost is not None:
                self._on_lost()
            pause_s = self.ttl_s / (3 if kept else 30)

    def _keepalive(self, lease: int, left_s: float) -> bool:
        """One keepalive, and what it says about the lease; whether it got through."""
        sent = self._clock()
        try:
            alive: bool | None = self._etcd.lease_keepalive(lease, min(left_s, self.ttl_s / 3)) > 0
        except EtcdUnreachable:
            alive = None
        with self._changed:
            if self._id == lease:
                # An answer after the deadline comes too late: `lost` has been read as true.
                self._dead = alive is False or self._clock() >= self._deadline
                if alive and not self._dead:
                    self._deadline = sent + self.ttl_s
        return alive is not None
