"""Mistakes of a user: one message that names the thing, the right exit code, nothing left running."""

from __future__ import annotations

import os

import pytest

from elastic.rendezvous.server import EtcdServer
from tests.e2e.harness import CONFIGS, DOCUMENT_KEYS

TINY = CONFIGS / "gpt-tiny.yaml"
JOB = """
import torch
from torch import nn
import elastic


class Lines:
    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.broken and index == 40:
            raise KeyError("row 40 is [damaged]")
        x = torch.full((8,), float(index)) / 64
        return x, x.sum(0, keepdim=True)


def job(params):
    kind = params.get("kind")

    def loss(output, target):
        if kind == "loss" and output.requires_grad:
            raise ZeroDivisionError("no such thing")
        return ((output - target) ** 2).sum(), target.numel()

    norm = nn.BatchNorm1d(32) if kind == "batchnorm" else nn.LayerNorm(32)
    return elastic.Job(
        layers=elastic.layers_of(nn.Sequential(nn.Linear(8, 32), norm, nn.Linear(32, 1))),
        loss=loss,
        dataset=Lines(kind == "sample"),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )
"""
CONFIG = """
name: small
job: rows.py:job
train: {steps: 8, global_batch: 16, microbatch: 4}
cluster: {nodes: 2}
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "rows.py").write_text(JOB)
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


def check(ended, code, kind, *words, traceback=False):
    """One error, as document and exit code; a traceback is shown only of the user's own code."""
    assert ended.code == code, ended
    document = ended.document
    error = document["error"]
    assert document.keys() in ({"error"}, DOCUMENT_KEYS | {"error"})
    assert error["code"] == kind, ended
    assert error["message"]
    for word in words:
        assert word in error["message"] + error["hint"], error
    assert "Traceback" not in error["message"] + error["hint"] + ended.err
    assert ("Traceback" in error.get("detail", "")) == traceback
    assert "elastic-" not in error["message"], "a temporary folder says nothing to a user"
    return error


# --- Before anything starts -------------------------------------------------------------------------------------------


def test_unknown_key(elastic, config):
    check(elastic.train(config, train__stepz=4).wait(), 2, "config", "train.stepz", "train.steps")


def test_batch_that_does_not_divide(elastic, config):
    check(elastic.train(config, train__global_batch=18).wait(), 2, "config", "18", "train.microbatch 4")


def test_a_file_where_the_run_should_be(elastic, config):
    elastic.run_dir.write_text("mine")
    check(elastic.train(config).wait(), 2, "usage", str(elastic.run_dir), "--run-dir")
    assert elastic.run_dir.read_text() == "mine"


def test_a_run_folder_that_cannot_be_written(elastic, config):
    if os.getuid() == 0:  # may write everywhere but here
        elastic.run_dir.symlink_to("/proc/self")
    else:
        elastic.run_dir.mkdir(mode=0o500)
    check(elastic.train(config).wait(), 2, "usage", str(elastic.run_dir), "--run-dir")


def test_the_logs_cannot_be_written(elastic, config):
    elastic.run_dir.mkdir()
    (elastic.run_dir / "logs").write_text("a file")
    check(elastic.train(config).wait(), 1, "failed", str(elastic.run_dir), "cannot be written")


# --- While the cluster starts -----------------------------------------------------------------------------------------


def test_missing_module(elastic, config):
    check(elastic.train(config, job="nowhere:job").wait(), 2, "job", "'nowhere'", "beside the config")


def test_missing_function(elastic, config):
    check(elastic.train(config, job="rows.py:other").wait(), 2, "job", "rows.py", "'other'")


def test_a_job_that_is_refused_by_name(elastic, config):
    check(elastic.train(config, params__kind="batchnorm").wait(), 2, "job", "BatchNorm1d", "'1'", "LayerNorm")


def test_a_model_larger_than_any_size_allows(elastic, config):
    ended = elastic.train(config, cluster__device_memory="2KiB").wait()
    check(ended, 2, "plan", "layer", "2KiB", "device_memory")


def test_more_nodes_needed_than_there_are(elastic):
    ended = elastic.train(CONFIGS / "gpt-bytes-pipeline.yaml", cluster__nodes=1).wait()
    check(ended, 2, "plan", "2 nodes", "cluster.nodes is 1")


def test_unreachable_etcd(elastic, config):
    check(elastic.train(config, cluster__etcd="127.0.0.1:1").wait(), 3, "etcd_unreachable", "127.0.0.1:1")


def test_unreachable_ray(elastic, config, tmp_path):
    with EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log") as etcd:
        ended = elastic.train(config, cluster__etcd=etcd.endpoint, cluster__ray="127.0.0.1:1").wait()
        check(ended, 3, "ray_unreachable", "127.0.0.1:1", "cluster.ray")


def test_a_store_that_cannot_be_written(elastic, config, tmp_path):
    (tmp_path / "store").write_text("a file")
    ended = elastic.train(config, checkpoint__url=tmp_path / "store").wait()
    check(ended, 3, "store_unreachable", str(tmp_path / "store"), "checkpoint.url")


# --- While it trains --------------------------------------------------------------------------------------------------


def test_exception_in_the_loss(elastic, config):
    ended = elastic.train(config, params__kind="loss").wait()
    error = check(ended, 1, "user_code", "ZeroDivisionError", "no such thing", "loss", traceback=True)
    assert 'rows.py", line' in error["detail"]
    assert ended.document["state"] == "failed"
    assert ended.document["step"] == 0


def test_exception_in_a_sample(elastic, config):
    """And how it looks without ``--json``."""
    command = elastic.start("run", config, "--run-dir", elastic.run_dir, "--set=params.kind=sample")
    ended = command.wait()
    assert ended.code == 1, ended
    (line,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    for word in ("KeyError", "row 40 is [damaged]", "dataset[40]"):
        assert word in line
    assert ended.err.count("Traceback") == 1
    assert 'rows.py", line' in ended.err
    assert "small: failed after" in ended.out
