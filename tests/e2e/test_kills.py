"""SIGKILL of workers and nodes of a running job, through the whole product: nothing is lost, the same digest."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.e2e.harness import CONFIGS, plain_digest, until

WHOLE = CONFIGS / "gpt-bytes.yaml"
PIPELINE = CONFIGS / "gpt-bytes-pipeline.yaml"


def nodes_of(elastic):
    return {n["id"]: n for n in elastic("status", "--run-dir", elastic.run_dir, "--json").document["nodes"]}


def of_kind(elastic, kind):
    return [event for event in elastic.lines("events.jsonl") if event["kind"] == kind]


def together(elastic, command, nodes, steps, plans=0):
    """Waits until a plan after the first ``plans`` ones has that many nodes, and so many steps more are committed."""

    def formed():
        assert command.process.poll() is None, command.wait()
        plan = of_kind(elastic, "plan")[plans:][-1:]
        epochs = [event["epoch"] for event in of_kind(elastic, "formed")]
        return plan and plan[0]["epoch"] in epochs and sum(map(len, plan[0]["pipelines"])) == nodes

    until(formed, f"{nodes} nodes train together")
    elastic.until_step(len(elastic.lines("steps.jsonl")) + steps, command)


def check(elastic, command, config, steps, victims):
    """The document of a run in which ``victims`` died, ``{node: cause}``; without ``steps`` it was stopped."""
    ended = command.wait(400)
    assert ended.code == 0, ended
    document = ended.document
    assert document["state"] == ("done" if steps else "stopped")
    steps = steps or document["step"]
    assert document["step"] == steps
    assert (document["samples"], document["samples_lost"], document["samples_repeated"]) == (steps * 32, 0, 0)
    assert {one["node"]: one["cause"] for one in document["recoveries"]} == victims
    assert all(one["lost_steps"] == 0 for one in document["recoveries"])
    incarnations = [event["incarnation"] for event in of_kind(elastic, "node_joined")]
    assert len(set(incarnations)) == len(incarnations)
    for one in document["recoveries"]:  # each came back as another incarnation
        assert len([e for e in of_kind(elastic, "node_joined") if e["node"] == one["node"]]) >= 2
        assert one["incarnation"] in incarnations
    digest, _ = plain_digest(config, f"train.steps={steps}")
    assert document["params_digest"] == digest
    print(json.dumps([{k: one[k] for k in ("node", "cause", "total_s")} for one in document["recoveries"]]))
    return document


@pytest.mark.timeout(600)
def test_pipelines_lose_each_node_in_turn_and_are_resized(elastic):
    command = elastic.train(PIPELINE, train__steps=100_000)
    together(elastic, command, nodes=5, steps=2)
    for count in range(5):
        os.killpg(nodes_of(elastic)[f"node-{count}"]["agent_pid"], signal.SIGKILL)
        until(lambda n=count: len(of_kind(elastic, "recovered")) > n, "recovered")
        together(elastic, command, nodes=5, steps=1, plans=1 + 2 * count)
    for size in (4, 2, 7):
        plans = len(of_kind(elastic, "plan"))
        assert elastic("nodes", "set", str(size), "--run-dir", elastic.run_dir).code == 0
        together(elastic, command, nodes=size, steps=1, plans=plans)
    assert elastic("stop", "--run-dir", elastic.run_dir).code == 0
    document = check(elastic, command, PIPELINE, None, {f"node-{i}": "node" for i in range(5)})
    assert len(document["reconfigurations"]) >= 3


@pytest.mark.timeout(600)
def test_a_worker_then_a_node_then_two_nodes_at_once(elastic):
    steps = 100
    command = elastic.train(WHOLE, train__steps=steps)
    together(elastic, command, nodes=4, steps=3)
    os.kill(nodes_of(elastic)["node-1"]["workers"][0]["pid"], signal.SIGKILL)
    until(lambda: of_kind(elastic, "recovered"), "recovered")
    together(elastic, command, nodes=4, steps=3, plans=2)
    os.killpg(nodes_of(elastic)["node-3"]["agent_pid"], signal.SIGKILL)
    until(lambda: len(of_kind(elastic, "recovered")) == 2, "recovered")
    together(elastic, command, nodes=4, steps=3, plans=4)
    alive = nodes_of(elastic)
    for node in ("node-0", "node-2"):
        os.killpg(alive[node]["agent_pid"], signal.SIGKILL)
    until(lambda: len({loss["node"] for e in of_kind(elastic, "recovered") for loss in e["losses"]}) == 4, "recovered")
    together(elastic, command, nodes=4, steps=1, plans=6)
    check(elastic, command, WHOLE, steps, {"node-0": "node", "node-1": "worker", "node-2": "node", "node-3": "node"})
