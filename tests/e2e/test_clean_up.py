"""However a run ends, nothing of it is left: no process, port, shared memory, temporary folder or run.json."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest

from tests.e2e.harness import CONFIGS, DOCUMENT_KEYS, until

TINY = CONFIGS / "gpt-tiny.yaml"
FOREVER = 100_000  # steps
TAKEN_DOWN_S = 30  # after the command was killed


@pytest.fixture
def training(elastic):
    """A command whose run has committed two steps."""
    command = elastic.train(TINY, train__steps=FOREVER, cluster__nodes=2)
    elastic.until_step(2, command)
    return command


def test_finished(elastic):
    started = time.monotonic()
    command = elastic.train(TINY, train__steps=20, cluster__nodes=4)
    phases = ("inspecting", "starting etcd", "starting Ray", "waiting for nodes", "node-", "formed", "step 1/")
    for phase in phases:
        until(lambda words=phase: words in command.err, phase)
        print(f"{phase:18} {time.monotonic() - started:5.1f} s")
    elastic.note()
    assert len(elastic.processes()) > 10
    assert len(elastic.traces.sockets) >= 5  # etcd, Ray, and a store per worker
    ended = command.wait()
    print(f"{'the end':18} {time.monotonic() - started:5.1f} s")
    assert ended.code == 0, ended
    assert "Traceback" not in ended.err
    assert not elastic.left()
    status = elastic("status", "--run-dir", elastic.run_dir, "--json").document
    assert status == {"job": "gpt-tiny", "state": "done", "epoch": 1, "step": 20, "nodes": []}


def test_ctrl_c_stops_at_a_voted_step(elastic, training):
    training.process.send_signal(signal.SIGINT)
    ended = training.wait()
    assert ended.code == 130, ended
    document = ended.document
    assert document.keys() == DOCUMENT_KEYS | {"error"}
    assert document["state"] == "interrupted"
    assert document["error"]["code"] == "interrupted"
    assert document["step"] == document["steps_trained"] == len(elastic.lines("steps.jsonl")) >= 2
    assert document["samples"] == 16 * document["step"]
    assert document["params_digest"]  # the workers voted to stop, and told their state
    assert json.loads((elastic.run_dir / "result.json").read_text()) == document
    assert not elastic.left()
    status = elastic("status", "--run-dir", elastic.run_dir, "--json").document
    assert (status["state"], status["step"], status["nodes"]) == ("interrupted", document["step"], [])


def test_second_ctrl_c_ends_at_once(elastic, training):
    workers = [p for p in elastic.processes() if "elastic.engine.worker" in p.cmdline()]
    for worker in workers:
        worker.suspend()  # they will not vote
    training.process.send_signal(signal.SIGINT)
    until(lambda: "stopping" in training.err, "answer to the first")
    training.process.send_signal(signal.SIGINT)
    ended = training.wait(15)
    assert (len(workers), ended.code) == (2, 130), ended
    assert ended.document["state"] == "interrupted"
    assert ended.document["step"] >= 2
    assert not elastic.left()


def test_sigterm_is_as_ctrl_c(elastic):
    command = elastic.train(TINY)
    until(lambda: "inspecting" in command.err, "start")
    command.process.terminate()
    assert command.wait().code in (130, -signal.SIGTERM)
    until(lambda: not elastic.left(), "end of everything", TAKEN_DOWN_S)


def test_ctrl_c_while_starting(elastic):
    command = elastic.train(TINY)
    until(lambda: "starting Ray" in command.err, "start of Ray")
    command.process.send_signal(signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130, ended
    assert ended.document["error"]["code"] == "interrupted"
    assert not elastic.left()


def test_command_killed(elastic, training):
    training.process.kill()
    training.wait()
    until(lambda: not elastic.left(), "end of everything", TAKEN_DOWN_S)


def test_supervisor_killed(elastic, training):
    psutil.Process(elastic.live()["supervisor"]).kill()
    ended = training.wait(TAKEN_DOWN_S)
    assert ended.code == 1, ended
    assert "the supervisor of the run was killed" in ended.document["error"]["message"]
    assert "supervisor.log" in ended.document["error"]["hint"]
    assert not elastic.left()


def test_detached(elastic):
    command = elastic.train(TINY, "--detach", train__steps=FOREVER, cluster__nodes=3)
    ended = command.wait()
    assert ended.code == 0, ended
    assert ended.document == {"job": "gpt-tiny", "state": "running", "run_dir": str(elastic.run_dir)}
    elastic.note()
    until(lambda: len(elastic.lines("steps.jsonl")) >= 2, "two steps")
    here = ("--run-dir", elastic.run_dir, "--json")

    status = elastic("status", *here)
    assert status.code == 0, status
    check_status(status.document, elastic)

    second = elastic.train(TINY).wait()
    assert second.code == 2, second
    error = second.document["error"]
    assert error["code"] == "job_alive"
    assert f"process {elastic.live()['supervisor']})" in error["message"]

    events = elastic("events", *here)
    kinds = [json.loads(line)["kind"] for line in events.out.splitlines()]
    assert [kind for kind in kinds if "checkpoint" not in kind] == ["node_joined"] * 3 + ["plan", "formed"]

    stopped = elastic("stop", *here)
    assert stopped.code == 0, stopped
    assert stopped.document.keys() == DOCUMENT_KEYS
    assert stopped.document["state"] == "stopped"
    assert stopped.document["step"] == len(elastic.lines("steps.jsonl"))
    assert not elastic.left()


def check_status(document, elastic):
    assert document.keys() == {"job", "state", "epoch", "step", "nodes"}
    assert (document["job"], document["state"], document["epoch"]) == ("gpt-tiny", "running", 1)
    assert document["step"] >= 2
    nodes = document["nodes"]
    assert [node["id"] for node in nodes] == ["node-0", "node-1", "node-2"]
    (plan,) = (event for event in elastic.lines("events.jsonl") if event["kind"] == "plan")
    ranks = set()
    for node in nodes:
        assert node.keys() == {"id", "incarnation", "state", "agent_pid", "workers"}
        assert node["state"] == "active"
        assert "AgentActor" in psutil.Process(node["agent_pid"]).cmdline()[0]
        (worker,) = node["workers"]
        assert worker.keys() == {"rank", "pid", "pipeline", "stage", "layers"}
        assert psutil.Process(worker["pid"]).ppid() == node["agent_pid"]
        assert plan["pipelines"][worker["pipeline"]][worker["stage"]] == node["id"]
        assert worker["layers"] == list(range(6))
        ranks.add(worker["rank"])
    assert ranks == {0, 1, 2}
