"""SIGKILL in every phase of a step and of a recovery, again and again; the digest at the end is the undisturbed one."""

from __future__ import annotations

import random

import pytest

from elastic.config import Config
from elastic.engine.inspection import inspect_job
from tests.engine.plain import plain_train
from tests.engine.processes import load, memory_for, small_config
from tests.recovery.cluster import Cluster

STEP = ["forward", "backward", "before-reduction", "in-reduction", "before-vote", "in-vote", "after-vote"]
STEP += ["before-optimizer", "in-optimizer", "after-optimizer"]
RECOVERY = ["before-freezing", "after-freezing", "before-settling", "after-settling", "before-forming", "in-forming"]
RECOVERY += ["after-forming"]
JOIN = ["before-transfer", "in-transfer", "after-transfer", "giving-a-layer"]
ENOUGH = 10**6  # steps; the test stops the run by its own count


def storm(cluster, phases, nodes):
    """Kills in one phase after the other, each time after all nodes have trained together; how many died."""
    kills, plans = 0, 0
    for first, second in phases:
        cluster.wait_for(lambda: len(cluster.computing(plans)) == nodes, 60)  # noqa: B023
        calm = cluster.step() + 2
        cluster.wait_for(lambda: cluster.step() >= calm, 60)  # noqa: B023
        # Until a death is noticed, the newest plan is still the one from before it.
        plans = len(cluster.of_kind("plan"))
        for phase in filter(None, (second, first)):
            cluster.kill_at(phase)
            kills += 1
        cluster.wait_for(lambda: not cluster.armed(), 60)
    cluster.wait_for(lambda: len(cluster.computing(plans)) == nodes, 60)
    return kills


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nodes", "stages"), [(3, 1), (5, 2)])
def test_a_kill_in_every_phase_leaves_the_digest(tmp_path, seed, nodes, stages):
    """Without pipelines there are more copies than kills at once; with two, both copies of a layer may go, and the job
    goes back to a checkpoint."""
    chance = random.Random(seed)
    phases = [(phase + chance.choice(["", ".node"]), None) for phase in STEP]
    # A recovery needs a first failure; a second one then hits the recovery itself, a join hits the transfer.
    phases += [(chance.choice(STEP), phase + chance.choice(["", ".node"])) for phase in RECOVERY + JOIN]
    chance.shuffle(phases)
    config = small_config({"slow": 0.004}, steps=ENOUGH).to_dict()
    profile = inspect_job(load(small_config()), small_config().train).profile
    config["cluster"]["device_memory"] = None if stages == 1 else memory_for(profile, stages)
    config["checkpoint"]["every"] = 10
    config["detection"]["quarantine"] = False
    with Cluster(Config.from_dict(config), nodes, tmp_path / "run") as cluster:
        kills = storm(cluster, phases, nodes)
        cluster.request("stop")
        result = cluster.result()
        assert result["state"] == "stopped", result
        recovered = cluster.of_kind("recovered")
        undone = sum(event["lost_steps"] for event in cluster.of_kind("rollback"))
    assert (result["lost"], result["repeated"], result["samples"]) == (0, 0, 16 * result["step"])
    assert sum(event["lost_steps"] for event in recovered) == undone
    assert not undone or stages > 1
    print(f"{kills} kills in {len(phases)} phases, {len(recovered)} recoveries")
    print(f"{result['step']} steps, {undone} more undone by rollbacks")
    same = small_config(steps=result["step"])  # without the pauses
    expected, _ = plain_train(load(same), same.train)
    assert result["params_digest"] == expected
