"""Failures that people reported against systems of this kind, on real processes; numbered as in their list."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil
import pytest

from elastic.rendezvous import server as etcd_server
from elastic.rendezvous.server import EtcdServer
from tests.engine.plain import plain_train
from tests.engine.processes import load, small_config
from tests.recovery.cluster import Cluster

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]
ENOUGH = 10**6


@pytest.fixture
def training(tmp_path):
    """A function that starts a cluster and returns it once all its nodes train."""
    with contextlib.ExitStack() as stack:

        def start(nodes):
            config = small_config({"slow": 0.004}, steps=ENOUGH)
            cluster = stack.enter_context(Cluster(config, nodes, tmp_path / "run"))
            calm(cluster, nodes)
            return cluster

        yield start


def calm(cluster, nodes, deaths=0):
    """Returns when that many deaths have been noticed and that many nodes have trained two more steps together."""
    cluster.wait_for(lambda: len(cluster.of_kind("node_left")) >= deaths)
    cluster.wait_for(lambda: len(cluster.computing()) == nodes)
    after = cluster.step() + 2
    cluster.wait_for(lambda: cluster.step() >= after)


def finish(cluster):
    """Stops the job and checks that nothing of it was lost, whatever happened: steps, samples, bits."""
    cluster.request("stop")
    result = cluster.result()
    assert result["state"] == "stopped", result
    assert (result["lost"], result["repeated"], result["samples"]) == (0, 0, 16 * result["step"])
    assert all(event["lost_steps"] == 0 for event in cluster.of_kind("recovered"))
    same = small_config(steps=result["step"])  # without the pauses
    assert result["params_digest"] == plain_train(load(same), same.train)[0]
    return result


def kill_node(member):
    os.killpg(member["agent_pid"], signal.SIGKILL)


def losses(cluster):
    return [(loss["node"], loss["cause"]) for event in cluster.of_kind("recovered") for loss in event["losses"]]


def test_scenario_01_a_node_vanishes_and_nobody_waits_for_a_collective_to_time_out(training):
    cluster = training(3)
    kill_node(cluster.members()["node-1"])
    (event,) = cluster.wait_for(lambda: cluster.of_kind("recovered"), 20)
    print(f"recovered in {event['total_s']:.2f} s")
    assert losses(cluster) == [("node-1", "node")]
    calm(cluster, 3)
    finish(cluster)


def test_scenario_02_a_node_back_at_once_under_its_old_name_is_a_new_incarnation(training):
    cluster = training(3)
    old = cluster.members()["node-2"]
    worker = psutil.Process(old["worker_pid"])
    os.kill(old["agent_pid"], signal.SIGKILL)  # the agent alone: its worker must not outlive it
    cluster.wait_for(lambda: cluster.members().get("node-2", old)["incarnation"] != old["incarnation"])
    assert not worker.is_running()
    calm(cluster, 3)
    plan = cluster.of_kind("plan")[-1]
    assert sorted(node for pipeline in plan["pipelines"] for node in pipeline) == ["node-0", "node-1", "node-2"]
    # A report in the name of the dead incarnation changes nothing.
    epochs = len(cluster.of_kind("plan"))
    exit_ = b'{"ev": "exit", "code": 1, "log": "x", "at": 0, "incarnation": "%s"}' % old["incarnation"].encode()
    cluster.etcd.put(cluster.keys.exit("node-2"), exit_)
    calm(cluster, 3)
    assert len(cluster.of_kind("plan")) == epochs
    finish(cluster)


def test_scenario_03_an_agent_that_gets_sigterm_drains_and_the_rest_train_on(training):
    cluster = training(3)
    leaving = cluster.fleet.agents["node-1"]
    os.kill(cluster.members()["node-1"]["agent_pid"], signal.SIGTERM)
    cluster.wait_for(lambda: cluster.of_kind("node_released"))
    assert leaving.wait(20) == 0
    calm(cluster, 2)
    assert cluster.of_kind("recovered") == []  # it was no failure
    assert len(cluster.of_kind("reconfigured")) == 1
    finish(cluster)


@pytest.mark.parametrize("second", ["before-forming", "before-transfer", "in-vote"])
def test_scenario_04_a_second_failure_within_a_recovery(training, second):
    cluster = training(3)
    cluster.kill_at(second)
    cluster.kill_at("forward.node")
    cluster.wait_for(lambda: not cluster.armed())
    calm(cluster, 3, deaths=2)
    assert len(losses(cluster)) >= 2
    finish(cluster)


def test_scenario_05_a_users_error_kills_nobody_and_stops_the_job_at_the_third_try(tmp_path):
    config = small_config({"raise_at": 4}, steps=ENOUGH)
    with Cluster(config, 2, tmp_path / "run") as cluster:
        cluster.wait_for(lambda: len(cluster.computing()) == 2)
        before = {node: member["worker_pid"] for node, member in cluster.members().items()}
        result = cluster.result()
        assert result["state"] == "failed"
        assert result["error"]["code"] == "user_code"
        assert "ValueError" in result["error"]["message"]
        assert "small_job.py" in result["error"]["detail"]
        assert len(cluster.of_kind("user_error")) == 2  # the third ends the job
        assert cluster.of_kind("node_left") == []
        assert result["step"] == 4
    assert len(before) == 2


def test_a_layer_whose_update_was_cut_counts_as_not_held(tmp_path):
    once = {"layer": "block.1", "step": 5, "token": str(tmp_path / "raised")}
    config = small_config({"optimizer_raises": once}, steps=30, clip_norm=0.5)
    with Cluster(config, 3, tmp_path / "run") as cluster:
        result = cluster.result()
        assert result["state"] == "done", result
        assert (result["lost"], result["repeated"]) == (0, 0)
        (error,) = cluster.of_kind("user_error")
        assert (error["step"], cluster.of_kind("node_left")) == (4, [])
        (plan,) = [plan for plan in cluster.of_kind("plan") if "raised" in plan["reason"]]
        assert f"to {error['node']}" in plan["reason"]  # it fetches what it tore
        same = small_config(steps=30, clip_norm=0.5)
        assert result["params_digest"] == plain_train(load(same), same.train)[0]


def test_scenario_06_the_port_that_was_free_is_taken_when_it_is_bound(tmp_path, monkeypatch):
    with EtcdServer(tmp_path / "first", tmp_path / "first.log") as first:
        taken = int(first.endpoint.rpartition(":")[2])
        real, asked = etcd_server.free_ports, []

        def free_ports(host):
            asked.append(host)
            return (taken, taken + 1) if len(asked) == 1 else real(host)

        monkeypatch.setattr(etcd_server, "free_ports", free_ports)
        with EtcdServer(tmp_path / "second", tmp_path / "second.log") as second:
            assert second.endpoint != first.endpoint
        assert len(asked) == 2


def test_scenario_07_a_joiner_that_dies_halfway_is_not_counted(training):
    cluster = training(2)
    cluster.kill_at("before-transfer.node")
    cluster.fleet.resize(3)
    cluster.wait_for(lambda: not cluster.armed())
    calm(cluster, 3, deaths=1)  # its next incarnation came through
    finish(cluster)


def test_scenario_08_most_nodes_vanish_in_the_same_second_and_few_plans_follow(training):
    cluster = training(6)
    plans = len(cluster.of_kind("plan"))
    for node in ("node-1", "node-2", "node-3", "node-4"):
        kill_node(cluster.members()[node])
    calm(cluster, 6, deaths=4)
    assert len(cluster.of_kind("plan")) - plans <= 6
    assert {node for node, _ in losses(cluster)} == {"node-1", "node-2", "node-3", "node-4"}
    finish(cluster)


def test_scenario_09_the_global_batch_does_not_shrink_with_the_cluster(training):
    cluster = training(3)
    cluster.request("nodes", b"1")
    calm(cluster, 1)
    cluster.request("nodes", b"2")
    calm(cluster, 2)
    finish(cluster)  # 16 samples in each step, whoever was there


def test_scenario_12_the_node_of_rank_0_dies(training):
    cluster = training(3)
    first = cluster.computing()[0]
    kill_node(cluster.members()[first])
    cluster.wait_for(lambda: cluster.of_kind("recovered"), 20)
    assert losses(cluster) == [(first, "node")]
    before = cluster.step()
    cluster.wait_for(lambda: cluster.step() >= before + 3)  # another one announces the steps now
    calm(cluster, 3)
    finish(cluster)
