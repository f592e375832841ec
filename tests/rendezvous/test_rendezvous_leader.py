from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from elastic.rendezvous import (
    Etcd,
    EtcdServer,
    Fenced,
    Keys,
    Leadership,
    Lease,
    LeaseGone,
    Put,
    absent,
)

_LEADS = """
import sys
from elastic.rendezvous import *
etcd, keys = Etcd([sys.argv[1]]), Keys(sys.argv[2])
leader = Leadership(etcd, keys.leader, Lease(etcd, 1), "first")
assert leader.campaign(5)
print(leader.fenced([Put(keys.epoch, b"1")]).succeeded, flush=True)
sys.stdin.readline()
try:
    leader.fenced([Put(keys.epoch, b"zombie")])
    print("written", flush=True)
except Fenced as e:
    print(e.message, flush=True)
"""


def test_a_zombie_leader_is_fenced(server: EtcdServer, etcd: Etcd, keys: Keys) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LEADS, server.endpoint, keys.job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as zombie:
        try:
            assert zombie.stdin is not None
            assert zombie.stdout is not None
            assert zombie.stdout.readline() == "True\n"
            zombie.send_signal(signal.SIGSTOP)
            with Lease(etcd, 2) as lease:
                second = Leadership(etcd, keys.leader, lease, "second")
                assert not second.try_acquire()
                assert second.fence == 0
                assert second.campaign(10)
                assert second.fenced([Put(keys.epoch, b"2")]).succeeded
                zombie.send_signal(signal.SIGCONT)
                zombie.stdin.write("\n")
                zombie.stdin.flush()
                answer = zombie.stdout.readline()
                assert "first (fence " in answer
                assert "second leads" in answer
                kv = etcd.get(keys.epoch)
                assert kv is not None
                assert kv.value == b"2"
        finally:
            zombie.kill()


def test_resigning_lets_a_waiting_one_in_at_once(etcd: Etcd, keys: Keys) -> None:
    with Lease(etcd, 30) as one, Lease(etcd, 30) as two:
        first = Leadership(etcd, keys.leader, one, "first")
        second = Leadership(etcd, keys.leader, two, "second")
        assert first.campaign(1)
        assert first.try_acquire(), "who leads, goes on leading"
        won: list[float] = []

        def campaign() -> None:
            if second.campaign(20):
                won.append(time.monotonic())

        waiting = threading.Thread(target=campaign)
        waiting.start()
        fence = first.fence
        first.resign()
        resigned = time.monotonic()
        waiting.join(20)
        assert won
        assert won[0] - resigned < 1.0
        assert second.fence > fence
        assert first.fence == 0
        with pytest.raises(Fenced):
            first.fenced([Put(keys.epoch, b"x")])


def test_waiting_ends_at_the_deadline_or_with_the_lease(etcd: Etcd, keys: Keys) -> None:
    etcd.put(keys.leader, b"somebody")
    with Lease(etcd, 1) as lease:
        candidate = Leadership(etcd, keys.leader, lease, "me")
        started = time.monotonic()
        assert not candidate.campaign(0.3)
        assert time.monotonic() - started < 1.0
        etcd.lease_revoke(lease.id)
        with pytest.raises(LeaseGone):
            candidate.campaign(10)


def test_a_false_comparison_is_no_fence(etcd: Etcd, keys: Keys, eventually: Callable[..., None]) -> None:
    with Lease(etcd, 5) as lease:
        leader = Leadership(etcd, keys.leader, lease, "me")
        assert leader.campaign(1)
        assert leader.fenced([Put(keys.plan(1), b"")], [absent(keys.plan(1))]).succeeded
        assert not leader.fenced([Put(keys.plan(1), b"")], [absent(keys.plan(1))]).succeeded
        assert [keys.parse(kv.key).kind for kv in etcd.range(keys.attempts)[0]] == ["attempt"]
        # A dead lease of a write is told apart from a lost leadership.
        gone = etcd.lease_grant(5)
        etcd.lease_revoke(gone)
        with pytest.raises(LeaseGone):
            leader.fenced([Put(keys.member("a"), b"", gone)])
        etcd.lease_revoke(lease.id)
        with pytest.raises(Fenced, match="nobody leads"):
            leader.fenced([Put(keys.epoch, b"x")])
    assert etcd.range(keys.attempts)[0] == [], "the marker went with the lease"
