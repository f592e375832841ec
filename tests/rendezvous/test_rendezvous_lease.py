from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from elastic.rendezvous import Etcd, EtcdServer, Keys, Lease


def test_is_kept_alive_and_ends_with_close(etcd: Etcd, keys: Keys, eventually: Callable[..., None]) -> None:
    lease = Lease(etcd, 1)
    etcd.put(keys.member("a"), b"", lease.id)
    until = time.monotonic() + 2.5
    eventually(lambda: time.monotonic() > until or etcd.get(keys.member("a")) is None)
    assert etcd.get(keys.member("a")) is not None
    assert not lease.lost
    started = time.monotonic()
    lease.close()
    assert time.monotonic() - started < 1.0
    assert etcd.get(keys.member("a")) is None
    assert not any(t.name == "elastic-lease" and t.is_alive() for t in threading.enumerate())


def test_a_revoked_lease_is_lost_once_and_renewed(etcd: Etcd, keys: Keys, eventually: Callable[..., None]) -> None:
    losses: list[int] = []
    with Lease(etcd, 1, on_lost=lambda: losses.append(1)) as lease:
        first = lease.id
        etcd.lease_revoke(first)
        eventually(lambda: lease.lost and losses, within_s=3)
        assert lease.renew() == lease.id != first
        assert not lease.lost
        etcd.put(keys.member("a"), b"", lease.id)
        until = time.monotonic() + 2.0
        eventually(lambda: time.monotonic() > until)
        assert etcd.get(keys.member("a")) is not None
        assert not lease.lost
        assert losses == [1]
        etcd.lease_revoke(lease.id)
        eventually(lambda: losses == [1, 1], within_s=3)


def test_on_lost_may_renew(etcd: Etcd, eventually: Callable[..., None]) -> None:
    leases: list[Lease] = []

    def renew() -> None:
        leases[0].renew()

    with Lease(etcd, 1, on_lost=renew) as lease:
        leases.append(lease)
        first = lease.id
        etcd.lease_revoke(first)
        eventually(lambda: lease.id != first and not lease.lost, within_s=3)


def test_silence_is_a_loss_only_at_the_local_deadline(
    own_server: EtcdServer, own_etcd: Etcd, eventually: Callable[..., None]
) -> None:
    lost_at: list[float] = []
    with Lease(own_etcd, 2, on_lost=lambda: lost_at.append(time.monotonic())) as lease:
        os.kill(own_server.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            until = stopped + 1.0  # the last keepalive was sent at most 0.67 s before
            eventually(lambda: time.monotonic() > until)
            assert not lease.lost
            eventually(lambda: lease.lost, within_s=1.5)
            assert time.monotonic() - stopped <= 2.2
            eventually(lambda: lost_at, within_s=1.5)
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        assert lease.lost, "for good, although etcd may have kept it"


def test_a_short_outage_is_no_loss(own_server: EtcdServer, own_etcd: Etcd, eventually: Callable[..., None]) -> None:
    losses: list[int] = []
    with Lease(own_etcd, 5, on_lost=lambda: losses.append(1)) as lease:
        own_server.stop()
        own_server.start()
        own_etcd.put("/k", b"", lease.id)
        until = time.monotonic() + 5.5
        eventually(lambda: time.monotonic() > until)
        assert not lease.lost
        assert not losses
        assert own_etcd.get("/k") is not None


def test_the_deadline_counts_from_the_sending() -> None:
    now = [100.0]

    class Slow:
        """Answers a grant after 3 s and no keepalive in time."""

        timeout_s = 2.0

        def lease_grant(self, ttl_s: int) -> int:
            now[0] += 3.0
            return 1

        def lease_keepalive(self, lease: int, timeout_s: float) -> int:
            return 1

        def lease_revoke(self, lease: int) -> None: ...

    with Lease(Slow(), 60, clock=lambda: now[0]) as lease:  # type: ignore[arg-type]
        assert not lease.lost
        now[0] = 160.0
        assert lease.lost
