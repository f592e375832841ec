from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from elastic.errors import EtcdUnreachable
from elastic.rendezvous import Compare, Etcd, EtcdServer, Keys, Put, TxnUnknown, absent, txn_once


class Lossy:
    """An `Etcd` whose transactions meet a script: `ok`, `applied` (the answer is lost), `lost`, or `late`.

    A late one reaches etcd just after the next transaction that is not lost.
    """

    def __init__(self, etcd: Etcd, *script: str) -> None:
        self.etcd, self.script = etcd, list(script)
        self.late: list[Callable[[], Any]] = []

    def get(self, key: str) -> Any:
        return self.etcd.get(key)

    def txn(self, compare: Sequence[Compare], then: Sequence[Any]) -> Any:
        return self._send(lambda: self.etcd.txn(compare, then))

    def txn_or_get(self, compare: Sequence[Compare], then: Sequence[Any], key: str) -> Any:
        return self._send(lambda: self.etcd.txn_or_get(compare, then, key))

    def _send(self, send: Callable[[], Any]) -> Any:
        fate = self.script.pop(0) if self.script else "ok"
        if fate == "late":
            self.late.append(send)
        if fate == "applied":
            send()
        if fate != "ok":
            raise TxnUnknown("no answer")
        answer = send()
        while self.late:
            self.late.pop()()
        return answer


@pytest.mark.parametrize("script", [[], ["applied"], ["lost"], ["late"], ["late", "applied"], ["lost", "late", "late"]])
def test_is_applied_once_whatever_gets_lost(etcd: Etcd, keys: Keys, script: list[str]) -> None:
    lossy: Any = Lossy(etcd, *script)
    result = txn_once(lossy, [], [Put(keys.result, b"x")], keys.attempt(1), sleep=lambda s: None)
    kv = etcd.get(keys.result)
    assert result.succeeded
    assert kv is not None
    assert kv.create_revision == kv.mod_revision == result.revision, "one write, at the revision that is told"


@pytest.mark.parametrize("script", [[], ["applied"], ["late"], ["lost", "ok", "applied"], ["late", "ok", "lost"]])
def test_a_false_comparison_stays_false_for_a_late_try(etcd: Etcd, keys: Keys, script: list[str]) -> None:
    etcd.put(keys.leader, b"somebody")
    lossy: Any = Lossy(etcd, *script)
    result = txn_once(lossy, [absent(keys.leader)], [Put(keys.result, b"x")], keys.attempt(1), sleep=lambda s: None)
    assert not result.succeeded
    etcd.delete(keys.leader)  # now the comparison would hold
    while lossy.late:
        lossy.late.pop()()
    assert etcd.get(keys.result) is None


def test_a_deadline_and_a_shared_marker_are_unknown(etcd: Etcd, keys: Keys) -> None:
    lossy: Any = Lossy(etcd, *["lost"] * 5)
    now = iter(range(100))
    with pytest.raises(TxnUnknown, match="no answer"):
        txn_once(
            lossy,
            [],
            [Put(keys.result, b"x")],
            keys.attempt(1),
            deadline_s=3,
            clock=lambda: next(now),
            sleep=lambda s: None,
        )

    def meddle(pause_s: float) -> None:
        etcd.put(keys.attempt(1), b"theirs")

    lossy = Lossy(etcd, "lost")
    with pytest.raises(TxnUnknown, match="another"):
        txn_once(
            lossy,
            [],
            [Put(keys.result, b"x")],
            keys.attempt(1),
            sleep=meddle,
        )


def test_a_stopped_etcd_that_wakes(own_server: EtcdServer, own_etcd: Etcd, eventually: Callable[..., None]) -> None:
    own_etcd.get("/warm")
    os.kill(own_server.pid, signal.SIGSTOP)
    lost, results = [], []
    real = own_etcd.txn_or_get

    def counted(*args: Any) -> Any:
        try:
            return real(*args)
        except EtcdUnreachable as e:
            lost.append(e)
            raise

    own_etcd.txn_or_get = counted  # type: ignore[method-assign,assignment]
    # Stopped after the marker was read; so the read is answered from here.
    own_etcd.get = lambda key: None  # type: ignore[method-assign]
    worker = threading.Thread(
        target=lambda: results.append(txn_once(own_etcd, [], [Put("/once", b"x")], "/marker", deadline_s=20))
    )
    worker.start()
    try:
        eventually(lambda: lost)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    worker.join(20)
    assert isinstance(lost[0], TxnUnknown)
    with Etcd([own_server.endpoint]) as etcd:
        kv = etcd.get("/once")
    assert kv is not None
    assert kv.create_revision == kv.mod_revision == results[0].revision
    assert results[0].succeeded


def test_etcd_down_from_the_start_is_known(own_server: EtcdServer, own_etcd: Etcd) -> None:
    own_server.stop()
    with pytest.raises(EtcdUnreachable) as caught:
        txn_once(own_etcd, [], [Put("/once", b"x")], "/marker", deadline_s=1)
    assert not isinstance(caught.value, TxnUnknown)
