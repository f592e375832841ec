"""A worker dies, the others freeze and report, and the next plan goes on with what they hold: the same bits as if
nothing had happened. Real worker processes; the test does what agents and controller do."""

from __future__ import annotations

import random
import time

import pytest

from elastic.config import config_from
from elastic.control.outcome import Report, decide
from elastic.engine.cursor import Cursor
from elastic.engine.inspection import inspect_job
from elastic.planning import Node, make_plan
from tests.engine.faulty_job import SAMPLES
from tests.engine.plain import plain_train
from tests.engine.processes import HERE, Cluster, load, memory_for, small_config
from tests.engine.test_failures import careful_train

STEPS = 40


@pytest.fixture(scope="module")
def expected():
    """``(digest, losses)`` of an undisturbed run of `small_job`."""
    config = small_config(steps=STEPS)
    return plain_train(load(config), config.train)


@pytest.fixture
def start(tmp_path):
    """Starts workers on a plan: ``(cluster, names of the nodes)``."""
    made = []

    def starter(config, nodes, stages=None, fresh=0):
        inspection = inspect_job(load(config), config.train)
        device_bytes = None if stages is None else memory_for(inspection.profile, stages)
        names = [f"node-{i}" for i in range(nodes)]
        plan = make_plan(
            inspection.profile,
            [Node(name) for name in names],
            microbatches=config.train.microbatches,
            fault_tolerance=0,
            device_bytes=device_bytes,
        )
        cluster = Cluster(config, inspection, tmp_path, device_bytes)
        made.append(cluster)
        later = [f"node-{nodes + i}" for i in range(fresh)]
        for name in names + later:
            cluster.launch(name)
        for name in names:
            assert cluster.await_ready(name) is None
        cluster.publish(plan)
        for name in later:
            assert cluster.await_ready(name) is None
        cluster.formed()
        return cluster, names

    yield starter
    for cluster in made:
        cluster.close()


def await_step(cluster, step):
    """Waits until ``step`` has been announced."""
    first = min(cluster.record["ranks"], key=cluster.record["ranks"].get)
    while cluster.await_event(first, "step")["step"] < step:
        pass


def announced(cluster):
    """The loss of each announced step. A step may be told again by the next epoch, but not differently."""
    losses = {}
    for messages in cluster.heard.values():
        for message in messages:
            if message["ev"] == "step":
                step = message["step"]
                assert losses.setdefault(step, message["loss"]) == message["loss"], step
                assert (message["samples"], message["lost"], message["repeated"]) == (16 * step, 0, 0)
    return losses


def finish(cluster, expected):
    ends = cluster.ends()
    assert {(end["kind"], end["step"]) for end in ends} == {("done", STEPS)}
    assert {(end["ledger"]["samples"], end["ledger"]["lost"], end["ledger"]["repeated"]) for end in ends} == {
        (16 * STEPS, 0, 0)
    }
    assert cluster.digest(ends) == expected[0]
    losses = announced(cluster)
    assert losses == dict(enumerate(expected[1][: max(losses)], 1))


@pytest.mark.scenario
@pytest.mark.parametrize("attempt", range(4))
def test_scenario_1_a_replica_is_killed_and_the_others_go_on(attempt, seed, start, expected):
    draw = random.Random(seed + attempt)
    cluster, names = start(small_config(steps=STEPS), 3)
    await_step(cluster, draw.randrange(1, STEPS - 10))
    time.sleep(draw.uniform(0.0, 0.05))
    cluster.kill(draw.choice(names))
    killed = time.monotonic()
    reports = cluster.freeze()
    print(f"frozen after {time.monotonic() - killed:.3f} s: {[(r.step, r.prepared) for r in reports.values()]}")
    assert time.monotonic() - killed < 5.0
    assert len(reports) == 2
    outcome, found = cluster.recover(reports)
    print(f"outcome of step {outcome.step}: {outcome.verdict and outcome.verdict['kind']}")
    assert found.transfers == ()  # both hold every layer
    finish(cluster, expected)


@pytest.mark.scenario
@pytest.mark.parametrize("attempt", range(4))
def test_scenario_1_a_stage_is_killed_and_a_fresh_worker_fetches_its_layers(attempt, seed, start, expected):
    draw = random.Random(seed + attempt)
    cluster, names = start(small_config(steps=STEPS), 4, stages=2, fresh=1)
    await_step(cluster, draw.randrange(1, STEPS - 10))
    time.sleep(draw.uniform(0.0, 0.05))
    cluster.kill(draw.choice(names))
    killed = time.monotonic()
    reports = cluster.freeze()
    print(f"frozen after {time.monotonic() - killed:.3f} s: {[(r.step, r.prepared) for r in reports.values()]}")
    assert time.monotonic() - killed < 5.0
    assert (reports["node-4"].voter, reports["node-4"].holds) == (False, {})
    outcome, found = cluster.recover(reports)
    print(f"outcome of step {outcome.step}: {outcome.verdict and outcome.verdict['kind']}")
    assert {transfer.node for transfer in found.transfers} == {"node-4"}
    assert "node-4" in cluster.record["ranks"]
    finish(cluster, expected)


@pytest.mark.scenario
@pytest.mark.parametrize("attempt", range(2))
def test_scenario_1_a_second_kill_while_the_others_recover(attempt, seed, start, expected):
    draw = random.Random(seed + attempt)
    cluster, names = start(small_config(steps=STEPS), 4, fresh=1)
    await_step(cluster, draw.randrange(1, STEPS - 10))
    first, second = draw.sample(names, 2)
    cluster.kill(first)
    reports = cluster.freeze()
    cluster.recover(reports)
    time.sleep(draw.uniform(0.0, 0.3))
    cluster.kill(second)
    # The plan may have formed or not. Its own outcome counts while nobody has voted in it.
    again = cluster.freeze()
    cluster.recover(again, dead=[reports[second]])
    finish(cluster, expected)


@pytest.mark.scenario
def test_scenario_1_three_kills_one_after_the_other_with_fetched_layers_handed_on(start, expected):
    # In the end every layer has been fetched by somebody who had it from somebody who had fetched it.
    cluster, _ = start(small_config(steps=STEPS), 2, stages=None, fresh=3)
    for i in range(3):
        await_step(cluster, 4 + 8 * i)
        cluster.kill(f"node-{i}")
        _, found = cluster.recover(cluster.freeze())
        if i == 0:
            assert {transfer.node for transfer in found.transfers} == {"node-2", "node-3", "node-4"}
        cluster.formed()
    finish(cluster, expected)


def test_a_scale_that_was_changed_in_the_first_step_reaches_a_fresh_worker(start, tmp_path):
    train = {"steps": 3, "global_batch": 16, "microbatch": 2, "seed": 3}
    sample = Cursor(SAMPLES, 16, 2, 3).samples(0, 5)[1]
    params = {"fault": "grow", "sample": sample, "hold": {"folder": str(tmp_path), "nth": 2}}
    config = config_from({"name": "faulty", "job": "faulty_job:job", "params": params, "train": train}, folder=HERE)
    (tmp_path / "go").touch()
    digest, came_to = careful_train(config, steps=3)
    assert came_to[0] == "redo 1"
    (tmp_path / "go").unlink()

    cluster, names = start(config, 2, fresh=1)
    pids = {str(cluster.workers[node].pid): node for node in names}
    deadline = time.monotonic() + 60
    while not (waiting := list(tmp_path.glob("here.*"))):  # reads the sample for the second time: the step is redone
        assert time.monotonic() < deadline
        time.sleep(0.01)
    cluster.kill(pids[waiting[0].suffix[1:]])
    reports = cluster.freeze()
    (tmp_path / "go").touch()
    (survivor,) = [report for report in reports.values() if report.voter]
    assert (survivor.step, survivor.vote[0], survivor.vote[2]["kind"]) == (0, 0, "redo")
    _, found = cluster.recover(reports)
    assert {transfer.node for transfer in found.transfers} == {"node-2"}
    assert cluster.digest(cluster.ends(timeout_s=30)) == digest


def test_a_step_that_was_redone_and_then_committed_is_committed():
    redo, commit = {"kind": "redo"}, {"kind": "commit"}
    beyond = Report(True, 3, None, (2, 1, commit))
    behind = Report(True, 2, 2, (2, 1, redo))  # has prepared the second try, and has not seen its vote
    for reports in ([behind, beyond], [beyond, behind]):
        assert decide(reports, None).verdict == commit
