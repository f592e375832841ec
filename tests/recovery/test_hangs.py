"""A worker that lives and does not advance is found by what it was doing, and replaced; nobody who waits is blamed."""

from __future__ import annotations

import os
import signal

import pytest

from elastic.config import Config
from tests.engine.plain import plain_train
from tests.engine.processes import load, small_config
from tests.recovery.cluster import Cluster
from tests.recovery.test_scenarios import calm

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]
ENOUGH = 10**6


def config_with(params, progress):
    config = small_config(params, steps=ENOUGH).to_dict()
    config["detection"]["progress"] = progress
    return Config.from_dict(config)


def check(cluster, node, nodes):
    """Exactly this node was blamed, its worker replaced, and nothing lost."""
    (event,) = cluster.wait_for(lambda: cluster.of_kind("recovered"), 60)
    (hung,) = cluster.of_kind("hung")
    assert node in (None, hung["node"])
    assert [(loss["node"], loss["cause"]) for loss in event["losses"]] == [(hung["node"], "hang")]
    assert event["lost_steps"] == 0
    calm(cluster, nodes, deaths=1)
    assert len(cluster.of_kind("node_left")) == 1
    cluster.request("stop")
    result = cluster.result()
    assert (result["lost"], result["repeated"], result["samples"]) == (0, 0, 16 * result["step"])
    same = small_config(steps=result["step"])
    assert result["params_digest"] == plain_train(load(same), same.train)[0]
    return hung


@pytest.mark.parametrize("progress", [2.0, "auto"])
def test_scenario_14_a_stopped_worker_is_replaced_and_does_nothing_when_it_goes_on(tmp_path, progress):
    with Cluster(config_with({"slow": 0.004}, progress), 3, tmp_path / "run") as cluster:
        calm(cluster, 3)
        os.kill(cluster.members()["node-1"]["worker_pid"], signal.SIGSTOP)
        hung = check(cluster, "node-1", 3)
    assert not hung["runs"]


@pytest.mark.parametrize("locked", [False, True])
def test_scenario_15_a_data_loader_that_is_stuck_is_named(tmp_path, locked):
    stuck = {"token": str(tmp_path / "stuck"), "reads": 60, "locked": locked}
    with Cluster(config_with({"stuck": stuck}, 2.0), 3, tmp_path / "run") as cluster:
        hung = check(cluster, None, 3)
    assert hung["runs"] != locked
    assert "reading the samples" in hung["what"]


def test_a_step_that_is_slow_everywhere_is_nobodys_fault(tmp_path):
    with Cluster(config_with({"slow": 0.3}, 2.0), 2, tmp_path / "run") as cluster:  # a step takes 2.4 s
        cluster.wait_for(lambda: cluster.step() >= 4)
        assert cluster.of_kind("hung") == cluster.of_kind("standstill") == []
        assert len(cluster.of_kind("plan")) == 1
        cluster.request("stop")
        assert cluster.result()["state"] == "stopped"
