"""What a job looks like before it runs, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import elastic
from elastic.config import Train, load_config
from elastic.engine.inspection import inspect_job
from elastic.errors import JobError, UserCodeError
from elastic.job import load_job
from elastic.planning import Node, make_plan, smallest_size
from tests.engine.processes import load, small_config

CONFIGS = Path(__file__).parents[2] / "configs"


class Pairs:
    def __init__(self, width=4):
        self.width = width

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((self.width,), float(index)), torch.tensor(1.0)


def job_of(*modules, optimizer=None, dataset=None):
    return elastic.Job(
        layers=[elastic.Layer(f"l{i}", lambda m=m: m) for i, m in enumerate(modules)],
        loss=lambda output, target: (output.sum(), 1),
        dataset=dataset or Pairs(),
        optimizer=optimizer or (lambda named: torch.optim.AdamW(named)),
    )


def inspect(*modules, **kwargs):
    train = Train(global_batch=8, microbatch=2)
    return inspect_job(job_of(*modules, **kwargs), train)


def test_boundaries_and_bytes():
    found = inspect(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
    assert found.boundaries == (((2, 4), "float32"), ((2, 6), "float32"), ((2, 6), "float32"), ((2, 3), "float32"))
    first = found.profile.layers[0]
    # parameter and gradient 4 + 4, int64 sum and float32 result 8 + 4, two moments 4 + 4 bytes per element
    assert first.state_bytes == 24 * 28
    assert first.output_bytes == 2 * 6 * 4
    assert found.profile.layers[1].state_bytes == 0


def test_bf16_boundaries_are_bf16_although_nothing_is_computed():
    config = small_config(precision="bf16")
    boundaries = inspect_job(load(config), config.train).boundaries
    assert [dtype for _, dtype in boundaries] == ["int64", "float32", *["float32"] * 4, "float32", "bfloat16"]


def test_buffers_that_stay_are_fine():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            return x * self.scale

    assert len(inspect(Scaled(), nn.Linear(4, 1)).boundaries) == 3


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return x


class Pair(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Counting(), "layer 'l0' changes its buffer 'seen' in the forward pass"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "layer 'l0', module '1' keeps running statistics"),
        (nn.Embedding(3, 4, sparse=True), "layer 'l0' asks for sparse gradients"),
        (Pair(), "layer 'l0' returned tuple, not a tensor"),
        (nn.ReLU(inplace=True), "layer 'l0' changes its input in place"),
        (nn.Sequential(nn.Dropout(inplace=True), nn.Linear(4, 4)), "layer 'l0' changes its input in place"),
        (nn.Flatten(0), r"layer 'l0' returned shape \(8,\) for input \(2, 4\)"),
    ],
)
def test_refused_by_name(module, message):
    with pytest.raises(JobError, match=message):
        inspect(module)


def test_in_place_later_in_a_layer_is_fine():
    found = inspect(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Linear(4, 1))
    assert [shape for shape, _ in found.boundaries] == [(2, 4), (2, 4), (2, 1)]


def test_in_place_is_refused_in_any_layer():
    with pytest.raises(JobError, match="layer 'l1' changes its input in place"):
        inspect(nn.Linear(4, 4), nn.ReLU(inplace=True))


def test_the_users_errors_say_where():
    with pytest.raises(UserCodeError, match="the forward pass of layer 'l1'"):
        inspect(nn.Linear(4, 6), nn.Linear(4, 6))
    with pytest.raises(UserCodeError, match="the optimizer of layer 'l0'"):
        inspect(nn.Linear(4, 6), optimizer=lambda named: torch.optim.SGD(named, lr=-1))


@pytest.mark.parametrize(("name", "needed"), [("gpt-bytes", 1), ("gpt-bytes-pipeline", 2), ("gpt-tiny", 1)])
def test_shipped_configs_need_as_many_nodes_as_they_say(name, needed):
    config = load_config(CONFIGS / f"{name}.yaml", env={})
    profile = inspect_job(load_job(config.job, config.params, 0, config.folder), config.train).profile
    memory = config.cluster.device_memory
    assert smallest_size(profile, memory) == needed
    nodes = [Node(f"n{i}") for i in range(config.cluster.nodes)]
    plan = make_plan(profile, nodes, microbatches=config.train.microbatches, fault_tolerance=1, device_bytes=memory)
    plan.check(profile, memory)
    sizes = sorted(len(pipeline.stages) for pipeline in plan.pipelines)
    assert sizes == {"gpt-bytes": [1] * 4, "gpt-bytes-pipeline": [2, 3], "gpt-tiny": [1] * 4}[name]
