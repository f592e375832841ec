"""``elastic init NAME``: a small job and its config to start from."""

from __future__ import annotations

import re
from pathlib import Path

from elastic.errors import ElasticError, UsageError

JOB = '''"""A job of your own: change the model, the data and the loss; nothing here knows of nodes or ranks.

    elastic run job.yaml
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastic
import elastic.metrics


def block(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))


def job(params):
    """Called in every worker with the ``params`` of the config."""
    width, depth = params["width"], params["depth"]

    # Data: any torch dataset of (input, target); the same on every node.
    inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, :16] * inputs[:, 16:]).sum(1, keepdim=True)

    # A layer is built on the worker that needs it, from a seed of its own; pipelines are cut between layers.
    layers = [elastic.Layer("in", lambda: nn.Linear(32, width))]
    layers += [elastic.Layer(f"block.{i}", lambda: block(width)) for i in range(depth)]
    layers.append(elastic.Layer("out", lambda: nn.Linear(width, 1)))

    return elastic.Job(
        layers=layers,
        # The sum over a microbatch and the weight it stands for, so that unequal parts come out right.
        loss=lambda output, target: (F.mse_loss(output, target, reduction="sum"), target.numel()),
        dataset=TensorDataset(inputs, targets),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        lr=lambda step: 1e-3 * min(1.0, (step + 1) / 20),  # warm-up; step counts from 0
        on_metrics=elastic.metrics.jsonl(Path(__file__).with_name("metrics.jsonl")),
    )
'''

CONFIG = """# elastic run job.yaml
name: "{name}"
job: job.py:job # the file, and the function in it
params: {{width: 256, depth: 4}}
train: {{steps: 400, global_batch: 128, microbatch: 16}}
cluster: {{nodes: 3}}
checkpoint: {{every: 100}}
"""


def scaffold(folder: Path) -> list[Path]:
    """Writes the files of a new job; what it wrote.

    Raises:
        UsageError: the folder has such files already, or its name cannot be that of a job.
        ElasticError: it cannot be written.
    """
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(
            f"{name!r} cannot be the name of a job",
            "use at most 100 letters, digits, '_', '.' and '-', such as my_job",
        )
    contents = {folder / "job.py": JOB, folder / "job.yaml": CONFIG.format(name=name)}
    taken = [path for path in contents if path.exists()]
    if taken:
        raise UsageError(f"{taken[0]} is there already", "give another name; nothing was written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ElasticError(f"{folder} cannot be written: {error.strerror}", "choose another folder") from error
    return list(contents)
