from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable

import pytest

from elastic.rendezvous import Etcd, EtcdServer, Event, Keys, Watch, load_etcd3, watch_prefix


def collect(watch: Watch, count: int, within_s: float = 10.0) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + within_s
    while len(events) < count and time.monotonic() < deadline:
        events += watch.get(deadline - time.monotonic())
    return events


def told(events: list[Event]) -> list[tuple[str, str, bytes]]:
    return [(e.kind, e.kv.key.rpartition("/")[2], e.kv.value) for e in events]


def compact(server: EtcdServer, revision: int) -> None:
    etcd3 = load_etcd3()
    host, _, port = server.endpoint.rpartition(":")
    raw = etcd3.client(host, int(port))
    raw.kvstub.Compact(etcd3.etcdrpc.CompactionRequest(revision=revision, physical=True), timeout=5)
    raw.close()


def test_list_then_watch_misses_and_repeats_nothing(etcd: Etcd, keys: Keys) -> None:
    etcd.put(keys.member("a"), b"1")
    kvs, watch = watch_prefix(etcd, keys.members)
    with watch:
        assert [kv.value for kv in kvs] == [b"1"]
        etcd.put(keys.member("b"), b"2")
        etcd.put(keys.spec, b"not watched")
        etcd.put(keys.member("b"), b"3")
        etcd.delete(keys.member("a"))
        assert told(collect(watch, 3)) == [("put", "b", b"2"), ("put", "b", b"3"), ("delete", "a", b"")]
        assert watch.get(0.05) == []
        assert watch.healthy


def test_an_earlier_revision_is_caught_up(etcd: Etcd, keys: Keys) -> None:
    first = etcd.put(keys.member("a"), b"1")
    etcd.put(keys.member("a"), b"2")
    with Watch(etcd, keys.members, first) as watch:
        assert told(collect(watch, 2)) == [("put", "a", b"1"), ("put", "a", b"2")]


def test_delivery_takes_milliseconds(etcd: Etcd, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    took_ms = []
    _, watch = watch_prefix(etcd, keys.members)
    with watch:
        etcd.put(keys.member("a"), b"warm")
        collect(watch, 1)
        for i in range(200):
            started = time.perf_counter()
            etcd.put(keys.member("a"), b"%d" % i)
            assert [e.kv.value for e in watch.get(5)] == [b"%d" % i]
            took_ms.append(1000 * (time.perf_counter() - started))
    with capsys.disabled():
        print(f" [put to get: median {statistics.median(took_ms):.2f} ms, worst {max(took_ms):.2f} ms]", end="")
    assert statistics.median(took_ms) < 20


def test_closing_wakes_and_ends(etcd: Etcd, keys: Keys) -> None:
    _, watch = watch_prefix(etcd, keys.members)
    started = time.monotonic()
    watch.close()
    assert watch.get(5) == []
    assert time.monotonic() - started < 1.0
    assert not any(t.is_alive() for t in watch._threads)
    assert not watch.healthy
    etcd.get("/x")  # the client is still good


def test_survives_a_restart(own_server: EtcdServer, own_etcd: Etcd, eventually: Callable[..., None]) -> None:
    _, watch = watch_prefix(own_etcd, "/w/")
    with watch, Etcd([own_server.endpoint], timeout_s=5) as patient:
        for round_ in range(2):
            own_etcd.put("/w/a", b"before %d" % round_)
            own_server.stop()
            eventually(lambda: not watch.healthy)
            own_server.start()
            patient.put("/w/b", b"after %d" % round_)
            expected = [("put", "a", b"before %d" % round_), ("put", "b", b"after %d" % round_)]
            assert told(collect(watch, 2)) == expected
            eventually(lambda: watch.healthy)
        assert watch.get(0.1) == []


def test_compaction_while_away_leaves_the_difference(own_server: EtcdServer, own_etcd: Etcd) -> None:
    for name in "abc":
        own_etcd.put(f"/w/{name}", b"old")
    _, revision = own_etcd.range("/w/")
    own_etcd.put("/w/a", b"new")
    own_etcd.delete("/w/b")
    own_etcd.put("/w/d", b"passing")
    own_etcd.delete("/w/d")
    last = own_etcd.put("/w/e", b"new")
    compact(own_server, last)
    known = {f"/w/{name}": revision - 2 + i for i, name in enumerate("abc")}
    with Watch(own_etcd, "/w/", revision + 1, known) as watch:
        assert told(collect(watch, 3)) == [("delete", "b", b""), ("put", "a", b"new"), ("put", "e", b"new")]
        own_etcd.put("/w/c", b"newer")
        assert told(collect(watch, 1)) == [("put", "c", b"newer")]
        assert watch.get(0.05) == []


def test_a_store_that_lost_its_data_is_listed_again(own_server: EtcdServer, own_etcd: Etcd) -> None:
    own_etcd.put("/w/a", b"now")
    with Watch(own_etcd, "/w/", 1000, {"/w/a": 900, "/w/b": 901}) as watch:
        assert told(collect(watch, 2)) == [("delete", "b", b""), ("put", "a", b"now")]
        own_etcd.put("/w/c", b"1")
        assert told(collect(watch, 1)) == [("put", "c", b"1")]


def test_silence_is_noticed_and_ends(own_server: EtcdServer, own_etcd: Etcd, eventually: Callable[..., None]) -> None:
    _, watch = watch_prefix(own_etcd, "/w/")
    with watch:
        eventually(lambda: watch.healthy)
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            eventually(lambda: not watch.healthy, within_s=4)
            assert watch.get(0.05) == []
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        with Etcd([own_server.endpoint], timeout_s=5) as patient:
            patient.put("/w/a", b"1")
        assert told(collect(watch, 1)) == [("put", "a", b"1")]
        eventually(lambda: watch.healthy)


def test_what_nobody_fetches_is_bounded(etcd: Etcd, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.rendezvous.watch.MAX_PENDING", 10)
    _, watch = watch_prefix(etcd, keys.members)
    with watch:
        for i in range(50):
            etcd.put(keys.member(str(i % 3)), b"%d" % i)
        latest: dict[str, bytes] = {}
        while latest.get(keys.member("1")) != b"49":
            events = watch.get(5)
            assert events
            revisions = [e.kv.mod_revision for e in events]
            assert revisions == sorted(revisions)
            latest.update({e.kv.key: e.kv.value for e in events})
        assert sorted(latest.values()) == [b"47", b"48", b"49"]
