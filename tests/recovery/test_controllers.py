"""The controller dies, or is stopped and goes on as a zombie: training goes on meanwhile, its successor handles the
next failure, and what the zombie decides is never written. And etcd is away for a while, or comes back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from elastic.config import Config
from elastic.rendezvous.server import find_etcd
from tests.engine.plain import plain_train
from tests.engine.processes import load, small_config
from tests.recovery.cluster import Cluster
from tests.recovery.test_scenarios import calm

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(400)]
KINDS = ["Freeze", "Publish", "Current", "Commit"]


def config_with(every=20):
    config = small_config({"slow": 0.004}, steps=10**6).to_dict()
    config["checkpoint"]["every"] = every
    config["detection"]["quarantine"] = False
    return Config.from_dict(config)


def finish(cluster):
    cluster.request("stop")
    result = cluster.result()
    assert result["state"] == "stopped", result
    assert (result["lost"], result["repeated"], result["samples"]) == (0, 0, 16 * result["step"])
    assert all(event["lost_steps"] == 0 for event in cluster.of_kind("recovered"))
    assert cluster.of_kind("rollback") == []
    same = small_config(steps=result["step"])
    assert result["params_digest"] == plain_train(load(same), same.train)[0]
    sequence = [event["seq"] for event in cluster.events()]
    assert sequence == list(range(len(sequence)))
    return result


def test_scenario_10_the_controller_is_killed_in_every_phase(tmp_path, seed):
    chance = random.Random(seed)
    phases = [f"controller-{when}-{kind}" for kind in KINDS for when in ("before", "after")]
    chance.shuffle(phases)
    deaths = 0
    with Cluster(config_with(), 3, tmp_path / "run", controllers=1) as cluster:
        for phase in phases:
            calm(cluster, 3, deaths)
            cluster.kill_at(phase)
            if not phase.endswith("Commit"):
                os.kill(cluster.members()[f"node-{chance.randrange(3)}"]["worker_pid"], signal.SIGKILL)
                deaths += 1
            cluster.wait_for(lambda: not cluster.armed())
            before = cluster.step()
            if phase.endswith("Commit"):  # nobody leads for a while: training does not care
                cluster.wait_for(lambda: cluster.leader() is None or cluster.step() > before + 5)  # noqa: B023
            print(phase)
        calm(cluster, 3, deaths)
        saved = len(cluster.of_kind("checkpoint_saved"))
        cluster.wait_for(lambda: len(cluster.of_kind("checkpoint_saved")) > saved)
        finish(cluster)
        print(f"{len(cluster.controllers.named)} controllers")
        assert len(cluster.controllers.named) > len(phases)


def test_scenario_10_a_stopped_controller_is_replaced_and_writes_nothing_when_it_goes_on(tmp_path):
    with Cluster(config_with(), 3, tmp_path / "run", controllers=2) as cluster:
        calm(cluster, 3)
        first = cluster.leader()
        zombie = cluster.controllers.named[first]
        os.kill(zombie.pid, signal.SIGSTOP)
        os.kill(cluster.members()["node-1"]["worker_pid"], signal.SIGKILL)
        cluster.wait_for(lambda: cluster.leader() not in (None, first))
        calm(cluster, 3, deaths=1)
        epochs = [event["epoch"] for event in cluster.of_kind("plan")]
        os.kill(zombie.pid, signal.SIGCONT)  # it, too, sees a worker that is lost, and would open an epoch
        assert zombie.wait(30) in (3, 4)
        calm(cluster, 3)
        assert [event["epoch"] for event in cluster.of_kind("plan")] == epochs
        finish(cluster)


@pytest.mark.parametrize("how", ["stopped for 10 s", "restarted", "compacted", "leases revoked"])
def test_scenario_13_etcd_is_away_and_training_does_not_notice(tmp_path, how):
    with Cluster(config_with(), 3, tmp_path / "run", controllers=1) as cluster:
        calm(cluster, 3)
        server, epochs = cluster._server, len(cluster.of_kind("plan"))
        progress = json.loads(cluster.etcd.get(cluster.keys.progress).value)["steps"][-1]["step"]
        if how == "stopped for 10 s":
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(10)
            os.kill(server.pid, signal.SIGCONT)
        elif how == "restarted":
            server.stop()
            time.sleep(1)
            server.start()
        elif how == "compacted":
            kv = cluster.etcd.get(cluster.keys.progress)
            command = [Path(find_etcd()).with_name("etcdctl"), "--endpoints", server.endpoint, "compact"]
            environment = {**os.environ, "ETCDCTL_API": "3"}
            subprocess.run([*command, str(kv.mod_revision)], check=True, env=environment, capture_output=True)
        else:
            for kv in cluster.etcd.range(cluster.keys.members)[0]:
                cluster.etcd.lease_revoke(kv.lease)
        calm(cluster, 3)
        if how == "stopped for 10 s":  # it went on meanwhile: about 25 steps a second
            told = json.loads(cluster.etcd.get(cluster.keys.progress).value)["steps"][-1]["step"]
            assert told > progress + 50
        assert cluster.of_kind("recovered") == []
        assert len(cluster.of_kind("plan")) == epochs  # nobody was taken for dead
        cluster.wait_for(lambda: len(cluster.members()) == 3)  # their keys are back
        os.kill(cluster.members()["node-2"]["worker_pid"], signal.SIGKILL)
        calm(cluster, 3, deaths=1)
        finish(cluster)
