"""The shell around the state machine, where it reads etcd: what other tests meet only when processes race."""

from __future__ import annotations

import json

import pytest

from elastic.control.controller import Controller, record_of
from elastic.control.messages import Base, Progressed, Publish
from elastic.planning import Node, make_plan
from elastic.rendezvous import KV, Etcd, Keys, watch_prefix
from elastic.rendezvous.server import EtcdServer
from elastic.runner import _live_status
from tests.control.machine import member, settings


@pytest.fixture
def etcd(tmp_path):
    with (
        EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log", throwaway=True) as server,
        Etcd([server.endpoint]) as client,
    ):
        yield server, client


def publish(step):
    nodes = [member(i) for i in range(2)]
    plan = make_plan(
        settings().profile, [Node(one.node) for one in nodes], microbatches=8, fault_tolerance=0, device_bytes=None
    )
    members = {one.node: one for one in nodes}
    return Publish(3, plan, members, None, (1, step, 0), 1, Base(1, step, "m"), {}, None, 1.0, "from a checkpoint")


def test_progress_without_a_step_says_nothing(etcd):
    """An agent forgets the steps of an epoch that is undone, and may be about to write them."""
    server, _ = etcd
    controller = Controller([server.endpoint], "job", None, "controller-1")
    key = Keys("job").progress

    def heard(steps):
        return list(controller._events_of(KV(key, json.dumps({"epoch": 1, "steps": steps}).encode(), 1, 1, 0)))

    assert heard([]) == []
    assert heard([{"step": 4}, {"step": 5}]) == [Progressed(5)]
    controller._prober.close()
    controller._etcd.close()


def test_status_between_a_plan_and_its_first_step_is_where_the_plan_starts(etcd):
    _, client = etcd
    keys = Keys("job")
    client.put(keys.plan(3), json.dumps(record_of(publish(50), fence=1)).encode())
    client.put(keys.member("node-0"), json.dumps(member(0).__dict__).encode())
    status = _live_status(client, keys, "job")
    assert (status["state"], status["epoch"], status["step"]) == ("running", 3, 50)
    assert [(node["id"], node["state"]) for node in status["nodes"]] == [("node-0", "active")]
    client.put(keys.progress, json.dumps({"epoch": 3, "steps": [{"step": 51}]}).encode())
    assert _live_status(client, keys, "job")["step"] == 51


def test_what_cannot_be_understood_ends_the_controller_instead_of_its_hearing(etcd):
    server, client = etcd
    keys = Keys("job")
    controller = Controller([server.endpoint], "job", None, "controller-1")
    _, watch = watch_prefix(client, keys.root)
    client.put(keys.progress, b"{not json")
    controller._follow(watch)
    assert isinstance(controller._inbox.get_nowait(), ValueError)
    watch.close()
    controller._prober.close()
    controller._etcd.close()
