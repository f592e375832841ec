from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from elastic.errors import EtcdUnreachable, from_json
from elastic.rendezvous import (
    Delete,
    Etcd,
    EtcdServer,
    Keys,
    LeaseGone,
    Put,
    TxnUnknown,
    absent,
    created,
    load_etcd3,
    modified,
    value_is,
)
from elastic.rendezvous.server import free_ports


def test_put_get_range_delete(etcd: Etcd, keys: Keys) -> None:
    assert etcd.get(keys.spec) is None
    first = etcd.put(keys.spec, b"\x00one")
    second = etcd.put(keys.spec, b"two")
    kv = etcd.get(keys.spec)
    assert kv is not None
    assert (kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease) == (keys.spec, b"two", first, second, 0)
    etcd.put(keys.member("b"), b"")
    last = etcd.put(keys.member("a"), b"")
    kvs, revision = etcd.range(keys.members)
    assert [kv.key for kv in kvs] == [keys.member("a"), keys.member("b")]
    assert revision >= last
    assert etcd.delete(keys.spec)
    assert not etcd.delete(keys.spec)
    assert etcd.delete_prefix(keys.root) == 2
    assert etcd.range(keys.root)[0] == []


def test_each_comparison_decides_a_transaction(etcd: Etcd, keys: Keys) -> None:
    key, out = keys.spec, keys.result
    revision = etcd.put(key, b"v")
    holds = [created(key, revision), modified(key, revision), value_is(key, b"v"), absent(out), modified(out, 0)]
    fails = [created(key, revision + 1), modified(key, 1), value_is(key, b"w"), absent(key), value_is(out, b"")]
    for compare in fails:
        assert not etcd.txn([compare], [Put(out, b"")]).succeeded, compare
        assert not etcd.txn([*holds, compare], [Put(out, b"")]).succeeded, compare
    result = etcd.txn(holds, [Put(out, b"done"), Delete(key)])
    written = etcd.get(out)
    assert result.succeeded
    assert written is not None
    assert written.create_revision == result.revision
    assert etcd.get(key) is None


def test_create_only_creates(etcd: Etcd, keys: Keys) -> None:
    assert etcd.create(keys.leader, b"a")
    assert not etcd.create(keys.leader, b"b")
    kv = etcd.get(keys.leader)
    assert kv is not None
    assert kv.value == b"a"


def test_a_lease_takes_its_keys_along(etcd: Etcd, keys: Keys, eventually: Callable[..., None]) -> None:
    lease = etcd.lease_grant(1)
    etcd.put(keys.member("a"), b"", lease)
    assert etcd.lease_keepalive(lease) == 1
    eventually(lambda: etcd.get(keys.member("a")) is None, within_s=5)
    assert etcd.lease_keepalive(lease) == 0
    etcd.lease_revoke(lease)
    with pytest.raises(LeaseGone):
        etcd.put(keys.member("a"), b"", lease)
    with pytest.raises(LeaseGone):
        etcd.create(keys.member("a"), b"", lease)
    # Whether the lease is there matters only to what would be written.
    assert not etcd.txn([created(keys.spec, 1)], [Put(keys.member("a"), b"", lease)]).succeeded


def test_a_refusal_is_not_repeated_and_says_why(etcd: Etcd, keys: Keys) -> None:
    with pytest.raises(EtcdUnreachable, match="too large") as caught:
        etcd.put(keys.spec, bytes(2_000_000))
    assert not isinstance(caught.value, TxnUnknown)
    assert caught.value.hint


def test_a_dead_endpoint_is_passed_over(server: EtcdServer, keys: Keys) -> None:
    dead = f"127.0.0.1:{free_ports('127.0.0.1')[0]}"
    with Etcd([dead, server.endpoint]) as etcd:
        assert etcd.create(keys.spec, b"x"), "a transaction, although it is sent once, finds the live one"
        assert etcd.get(keys.spec) is not None


def test_a_silent_endpoint_leaves_time_for_the_next(server: EtcdServer, own_server: EtcdServer, keys: Keys) -> None:
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        with Etcd([own_server.endpoint, server.endpoint]) as etcd:
            started = time.monotonic()
            assert etcd.create(keys.spec, b"x")
            assert time.monotonic() - started < etcd.timeout_s
    finally:
        os.kill(own_server.pid, signal.SIGCONT)


def test_nobody_there_is_one_clear_error() -> None:
    dead = [f"127.0.0.1:{port}" for port in free_ports("127.0.0.1")]
    with Etcd(dead, timeout_s=0.3) as etcd:
        started = time.monotonic()
        with pytest.raises(EtcdUnreachable) as caught:
            etcd.get("/x")
        assert time.monotonic() - started < 1.0
    assert "get /x" in caught.value.message
    assert all(endpoint in caught.value.message for endpoint in dead)
    assert caught.value.hint
    with pytest.raises(ValueError, match="host:port"):
        Etcd(["localhost"])


def test_errors_keep_their_kind_as_json() -> None:
    for kind in (TxnUnknown, LeaseGone, EtcdUnreachable):
        assert type(from_json(kind("m", "h").as_json())) is kind


def test_a_closed_client_says_so(server: EtcdServer) -> None:
    etcd = Etcd([server.endpoint])
    etcd.get("/x")
    etcd.close()
    with pytest.raises(EtcdUnreachable, match="closed"):
        etcd.get("/x")


def test_a_stopped_etcd_costs_no_more_than_the_deadline(own_server: EtcdServer, own_etcd: Etcd) -> None:
    own_etcd.put("/k", b"before")
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        for call in (
            lambda: own_etcd.get("/k"),
            lambda: own_etcd.put("/k", b"late"),
            lambda: own_etcd.lease_grant(5),
            lambda: own_etcd.lease_keepalive(1),
            own_etcd.status,
        ):
            started = time.monotonic()
            with pytest.raises(EtcdUnreachable):
                call()
            assert time.monotonic() - started < 1.0
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    with Etcd([own_server.endpoint], timeout_s=5.0) as patient:
        assert patient.get("/k") is not None


def test_threads_share_a_client_while_etcd_restarts(own_server: EtcdServer) -> None:
    failed: list[BaseException] = []
    stop = threading.Event()

    def work(name: str) -> None:
        count = 0
        try:
            while not stop.is_set():
                count += 1
                etcd.put(f"/count/{name}", b"%d" % count)
                kv = etcd.get(f"/count/{name}")
                assert kv is not None
                assert kv.value == b"%d" % count
        except BaseException as e:  # noqa: BLE001 - the test looks at it
            failed.append(e)

    with Etcd([own_server.endpoint], timeout_s=10.0) as etcd:
        threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
        for thread in threads:
            thread.start()
        identity = etcd.cluster_id()
        own_server.stop()
        own_server.start()
        assert etcd.cluster_id() == identity
        stop.set()
        for thread in threads:
            thread.join(15)
    assert not failed


def test_logs_in_and_logs_in_again(own_server: EtcdServer) -> None:
    with Etcd([own_server.endpoint]) as open_etcd:
        open_etcd.get("/x")
        etcd3 = load_etcd3()
        host, _, port = own_server.endpoint.rpartition(":")
        raw, rpc = etcd3.client(host, int(port)), etcd3.etcdrpc
        auth = rpc.AuthStub(raw.channel)
        auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="secret"), timeout=5)
        auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"), timeout=5)
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=5)
        auth.AuthEnable(rpc.AuthEnableRequest(), timeout=5)
        raw.close()
        with pytest.raises(EtcdUnreachable, match="refused"):
            open_etcd.get("/x")
    with Etcd([own_server.endpoint], user="root", password="wrong") as etcd, pytest.raises(EtcdUnreachable) as caught:
        etcd.get("/x")
    assert "refused" in caught.value.message
    assert "secret" not in str(caught.value.as_json())
    with Etcd([own_server.endpoint], user="root", password="secret", timeout_s=5.0) as etcd:
        assert etcd.create("/x", b"1")
        own_server.stop()
        own_server.start()  # tokens live in etcd's memory: this one is refused now
        etcd.put("/x", b"2")
