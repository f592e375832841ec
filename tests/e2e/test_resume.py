"""From object storage: after everything died, at another shape, from another machine's bucket; and a rollback within a
run when every copy of a layer is gone. Always the digest of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import yaml

from elastic.engine.inspection import inspect_job
from tests.e2e.harness import ROOT, Elastic, plain_digest, until
from tests.e2e.objects import s3_server
from tests.e2e.test_kills import nodes_of, of_kind
from tests.engine.processes import load, memory_for, small_config

STEPS = 200
BATCH = 16
pytestmark = pytest.mark.timeout(400)


def write_config(folder, pause_s=0.004, **sections):
    """A job of quick steps, of a few tens of milliseconds each by ``pause_s`` per sample."""
    config = {
        "name": "small",
        "job": f"{ROOT}/tests/engine/small_job.py:job",
        "params": {"slow": pause_s},
        "train": {"steps": STEPS, "global_batch": BATCH, "microbatch": 2, "seed": 3},
        "cluster": {"nodes": 3},
        "checkpoint": {"every": 50},
        "detection": {"rollback_after_s": 2},
    }
    for name, section in sections.items():
        config[name] = {**config[name], **section}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return plain_digest(write_config(tmp_path_factory.mktemp("plain"), pause_s=0))[0]


def memory_of_two():
    """The device memory with which a copy needs two nodes."""
    config = small_config()
    return memory_for(inspect_job(load(config), config.train).profile, 2)


def everything_dies(elastic, config, step):
    """Trains until so many steps are committed, then SIGKILL for the command and all that it started."""
    command = elastic.train(config)
    elastic.until_step(step, command)
    victims = elastic.processes()
    for process in victims:
        process.kill()
    command.process.wait()
    assert len(victims) > 6, victims  # command, supervisor, etcd, Ray's own, agents, workers


def check(ended, expected, resumed_at):
    assert ended.code == 0, ended
    document = ended.document
    assert (document["state"], document["step"]) == ("done", STEPS)
    assert document["resumed_from"] == {"generation": 1, "step": resumed_at}
    assert document["steps_trained"] == STEPS - resumed_at
    assert (document["samples"], document["samples_lost"], document["samples_repeated"]) == (BATCH * STEPS, 0, 0)
    assert document["params_digest"] == expected
    return document


def test_the_same_command_resumes_after_everything_died_at_any_shape(elastic, tmp_path, expected):
    config = write_config(tmp_path)
    everything_dies(elastic, config, 130)
    copies = [tmp_path / name for name in ("two-nodes", "pipelines")]
    for copy in copies:
        shutil.copytree(elastic.run_dir / "checkpoints", copy)

    document = check(elastic.train(config).wait(), expected, 100)
    assert [one["step"] for one in document["checkpoints"]] == [150, 200]
    again = elastic.train(config).wait()
    assert (again.code, again.document["params_digest"], again.document["step"]) == (0, expected, STEPS)
    assert "--resume never" in again.err
    assert not again.document["plans"]  # nothing was started

    for copy, cluster in zip(copies, ({"nodes": 2}, {"nodes": 5, "device_memory": memory_of_two()}), strict=True):
        other = write_config(tmp_path, cluster=cluster, checkpoint={"url": str(copy)})
        document = check(elastic.train(other).wait(), expected, 100)
        depth = {len(pipeline) for pipeline in document["plans"][-1]["pipelines"]}
        assert depth == ({1} if cluster["nodes"] == 2 else {2, 3})


def test_from_a_bucket_into_a_fresh_folder_and_while_the_store_is_away(elastic, tmp_path, expected):
    with s3_server() as (url, options):
        config = write_config(tmp_path, checkpoint={"url": f"{url}/run", "storage_options": options})
        everything_dies(elastic, config, 130)
        for folder in elastic.traces.folders:  # nobody is left to remove it: a run in the same place would
            shutil.rmtree(folder)
        (elastic.run_dir / "run.json").unlink()
        elsewhere = Elastic(tmp_path)
        elsewhere.run_dir = tmp_path / "elsewhere"
        check(elsewhere.train(config).wait(), expected, 100)
        assert elsewhere.left() == []

        longer = write_config(
            tmp_path, train={"steps": STEPS + 200}, checkpoint={"url": f"{url}/run", "storage_options": options}
        )
        elastic.run_dir = tmp_path / "third"
        command = elastic.train(longer)
        elastic.until_step(20, command)
    ended = command.wait(200)  # the server is gone: training went on without it
    assert ended.code == 3, ended
    document = ended.document
    assert (document["state"], document["step"], document["error"]["code"]) == (
        "failed",
        STEPS + 200,
        "store_unreachable",
    )
    assert document["params_digest"] is not None
    failed = of_kind(elastic, "checkpoint_failed")
    assert {event["step"] for event in failed} >= {STEPS + 200}
    assert all(event["reason"] for event in failed)


def test_a_damaged_checkpoint_is_found_and_the_one_before_it_used(elastic, tmp_path, expected):
    config = write_config(tmp_path)
    everything_dies(elastic, config, 130)
    (pack, *_) = sorted((elastic.run_dir / "checkpoints").glob("g*/attempts/*-000000000100-*/*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-3] ^= 4
    pack.write_bytes(data)
    check(elastic.train(config).wait(), expected, 50)
    (rejected,) = of_kind(elastic, "checkpoint_rejected")
    assert rejected["step"] == 100
    sentences = elastic("events", "--run-dir", elastic.run_dir).out
    assert "checkpoint of step 100" in sentences, sentences


def test_another_job_is_not_resumed_and_never_starts_anew(elastic, tmp_path, expected):
    config = write_config(tmp_path, pause_s=0)
    first = elastic.train(config).wait()
    assert (first.code, first.document["generation"]) == (0, 1)
    assert first.document["checkpoints"][-1]["step"] == STEPS
    assert all(one["stall_s"] >= 0 and one["upload_s"] > 0 for one in first.document["checkpoints"])

    refused = elastic.train(write_config(tmp_path, pause_s=0, train={"seed": 4})).wait()
    assert refused.code == 2, refused
    assert "train.seed was 3 and is 4" in refused.document["error"]["message"]
    assert "--resume never" in refused.document["error"]["hint"]

    config = write_config(tmp_path, pause_s=0)
    second = elastic.train(config, "--resume", "never", train__steps=60).wait()
    assert (second.code, second.document["generation"], second.document["resumed_from"]) == (0, 2, None)
    listed = elastic("checkpoints", "ls", elastic.run_dir, "--json")
    assert listed.code == 0, listed
    assert {(one["generation"], one["step"]) for one in listed.document["checkpoints"]} == {
        (1, 100),
        (1, 150),
        (1, 200),
        (2, 50),
        (2, 60),
    }
    absent = elastic.train(config, "--resume", "55").wait()
    assert absent.code == 4, absent
    back = elastic.train(config, "--resume", "50").wait()
    assert back.document["resumed_from"] == {"generation": 2, "step": 50}
    assert (back.code, back.document["params_digest"]) == (0, expected)


@pytest.mark.parametrize(("at", "every"), [(20, 1000), (70, 50)])
def test_all_holders_of_a_layer_die_at_once_and_the_job_rolls_back(elastic, tmp_path, expected, at, every):
    cluster = {"nodes": 4, "device_memory": memory_of_two()}
    config = write_config(tmp_path, cluster=cluster, checkpoint={"every": every})
    command = elastic.train(config)
    elastic.until_step(at, command)
    ranks = {node: one["workers"][0] for node, one in nodes_of(elastic).items()}
    first = [node for node, worker in ranks.items() if worker["stage"] == 0]
    assert len(first) == 2
    agents = [nodes_of(elastic)[node]["agent_pid"] for node in first]
    for agent in agents:
        os.killpg(agent, signal.SIGKILL)
    until(lambda: of_kind(elastic, "rollback"), "rolled back")
    ended = command.wait()
    assert ended.code == 0, ended
    document = ended.document
    (undone,) = of_kind(elastic, "rollback")
    assert undone["lineage"] == 1
    assert undone["to_step"] % every == 0
    assert (undone["to_step"] > 0) == (at > every)  # it may have trained on a little before the kill
    assert undone["lost_steps"] + undone["to_step"] >= at
    assert {one["lost_steps"] for one in document["recoveries"]} == {undone["lost_steps"]}
    assert (document["step"], document["params_digest"]) == (STEPS, expected)
    assert (document["samples"], document["samples_lost"]) == (BATCH * STEPS, 0)
