"""``elastic init``: what it writes can be run as it is; and the metric callbacks that it uses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types

import pytest

from elastic import metrics
from elastic.config import load_config
from elastic.errors import JobError, UsageError
from elastic.job import Metrics, load_job
from elastic.scaffold import scaffold
from tests.e2e.harness import Elastic


def test_what_is_written_is_a_job(tmp_path):
    job_file, config_file = scaffold(tmp_path / "my_job")
    config = load_config(config_file)
    assert (config.name, config.cluster.nodes) == ("my_job", 3)
    job = load_job(config.job, config.params, config.train.seed, config.folder)
    assert [layer.name for layer in job.layers] == ["in", "block.0", "block.1", "block.2", "block.3", "out"]
    assert "elastic run" in job_file.read_text()


@pytest.mark.parametrize("name", ["123", "1e5", "null", "yes", "0x10", "2026-12-01", "a" * 100, "a.b-c_d"])
def test_whatever_the_name_the_config_can_be_loaded(tmp_path, name):
    assert load_config(scaffold(tmp_path / name)[1]).name == name


def test_nothing_is_overwritten_and_a_bad_name_is_refused(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "job.yaml").write_text("precious")
    with pytest.raises(UsageError, match=r"job\.yaml is there already"):
        scaffold(folder)
    assert [path.name for path in folder.iterdir()] == ["job.yaml"]
    for name in ("no good", "-x", ".hidden", "a" * 101):
        with pytest.raises(UsageError, match="cannot be the name of a job"):
            scaffold(tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.timeout(300)
def test_init_then_run_and_a_node_that_is_killed_is_survived(tmp_path):
    elastic = Elastic(tmp_path)
    made = elastic("init", "my_job")
    assert made.code == 0, made
    assert "elastic run my_job/job.yaml\n" in made.out
    assert "elastic status --job my_job\n" in made.out
    command = elastic.train(tmp_path / "my_job/job.yaml")
    elastic.until_step(5, command)
    agent = elastic("status", "--run-dir", elastic.run_dir, "--json").document["nodes"][1]["agent_pid"]
    os.killpg(agent, signal.SIGKILL)
    ended = command.wait(200)
    assert ended.code == 0, ended
    document = ended.document
    assert (document["state"], document["step"], document["samples_lost"]) == ("done", 400, 0)
    assert [(one["node"], one["lost_steps"]) for one in document["recoveries"]] == [("node-1", 0)]
    assert elastic.left() == []
    lines = [json.loads(line) for line in (tmp_path / "my_job/metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == set(range(1, 401))


def test_metrics_as_json_lines(tmp_path):
    write = metrics.jsonl(tmp_path / "m.jsonl")
    write(Metrics(1, 2.5, 0.1, None, 32))
    write(Metrics(2, 2.25, 0.1, 1.5, 64, eval_loss=2.0))
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["eval_loss"]) for line in lines] == [(1, 2.5, None), (2, 2.25, 2.0)]


def test_json_lines_are_json_and_whole(tmp_path):
    path = tmp_path / "new" / "m.jsonl"
    write = metrics.jsonl(path)
    write(Metrics(1, float("nan"), 0.1, float("inf"), 32))
    assert "NaN" not in path.read_text()
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # a writer that was killed, or found the disk full
    write(Metrics(2, 2.0, 0.1, None, 64))
    write(Metrics(1, 2.5, 0.1, None, 32))  # told again after a rollback
    first, cut, second, again = path.read_text().splitlines()
    assert [json.loads(line)["loss"] for line in (first, second, again)] == [None, 2.0, 2.5]
    assert cut == '{"step": 2, "lo'


def test_tensorboard_drops_what_is_told_again(monkeypatch, tmp_path):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append(("from", purge_step))

        def add_scalar(self, key, value, step):
            calls.append((key, step))

        def flush(self):
            pass

        def close(self):
            calls.append(("close",))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    write = metrics.tensorboard(tmp_path)
    assert calls == []  # every worker loads the job, one of them writes
    for step in (5, 6, 5):
        write(Metrics(step, 1.0, None, None, step))
    told = [("loss", 5), ("samples", 5)]
    assert calls == [("from", 5), *told, ("loss", 6), ("samples", 6), ("close",), ("from", 5), *told]


def test_tensorboard_that_is_not_installed_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(JobError, match="TensorBoard"):
        metrics.tensorboard(tmp_path)


def test_the_package_and_its_command_module_can_be_run():
    for module in ("elastic", "elastic.cli"):
        ended = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout[:8]) == (0, "elastic "), ended
