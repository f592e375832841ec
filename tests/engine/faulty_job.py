"""A job that goes wrong in a chosen way when it meets a chosen sample; ``params`` say how and which.

The dataset is long enough that no sample comes twice in the steps of a test, so a sample stands for one microbatch of
one step, wherever that is computed and however often it is redone.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import elastic

SAMPLES, WIDTH, OUTPUTS = 96, 16, 2


class Features:
    """Sample i: made-up features, and targets that end with i itself."""

    def __init__(self, width=WIDTH, bad=None):
        self.width, self.bad = width, bad

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(f"sample {index} cannot be read")
        made = torch.Generator().manual_seed(index)
        x = torch.randn(self.width, generator=made)
        return x, torch.cat([torch.randn(OUTPUTS, generator=made), torch.tensor([float(index)])])


class Noisy(Features):
    """Augmented in the ways that are usual: from the global generators of torch, NumPy and Python."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(self.width) + 0.1 * np.random.rand() + 0.1 * random.random(), y


class Held(Features):
    """The ``nth`` time that the bad sample is read, reading waits until the file ``go`` is in the folder; a file
    ``here.<pid>`` says that it waits."""

    def __init__(self, width, bad, folder, nth):
        super().__init__(width)
        self.held, self.folder, self.left = bad, Path(folder), nth

    def __getitem__(self, index):
        self.left -= index == self.held
        if index == self.held and self.left == 0:
            (self.folder / f"here.{os.getpid()}").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.005)
        return super().__getitem__(index)


class Middle(nn.Module):
    """Raises in its forward pass number ``calls``."""

    def __init__(self, calls=None):
        super().__init__()
        self.inner, self.left = nn.Linear(WIDTH, WIDTH), calls

    def forward(self, x):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise ValueError("the middle gave way")
        return x + F.dropout(torch.tanh(self.inner(x)), 0.2, self.training)


class Partly(nn.Module):
    """A layer whose first half is frozen, as in fine-tuning."""

    def __init__(self, width):
        super().__init__()
        self.frozen, self.tuned = nn.Linear(width, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.tuned(self.frozen(x))


def job(params):
    fault, bad = params.get("fault"), params.get("sample")
    width = params.get("width", WIDTH)

    def loss(output, target):
        each = (output - target[:, :OUTPUTS]).square().sum(1)
        hit = target[:, OUTPUTS] == bad if bad is not None else torch.zeros(len(target), dtype=torch.bool)
        if fault == "loss" and hit.any():
            raise ArithmeticError("the loss is lost")
        if fault == "exit" and hit.any():
            sys.exit(3)
        if fault == "detached":
            each = each.detach()
        factor = {"nan": float("nan"), "grow": 2.0**20}.get(fault, 1.0)
        return (each * torch.where(hit, factor, 1.0)).sum(), len(target)

    if fault == "job":
        raise KeyError("no such corpus")
    if fault == "leave":
        sys.exit("no such corpus")
    if "hold" in params:
        dataset = Held(width, bad, **params["hold"])
    else:
        dataset = (Noisy if fault == "noise" else Features)(width, bad if fault == "sample" else None)
    calls = params.get("calls") if fault == "forward" else None
    first = Partly if fault == "frozen" else lambda width: nn.Linear(width, WIDTH)
    layers = [
        elastic.Layer("first", lambda: first(width)),
        elastic.Layer("middle", lambda: Middle(calls)),
        elastic.Layer("last", lambda: nn.Linear(WIDTH, OUTPUTS)),
    ]
    if fault == "twins":
        layers.insert(2, elastic.Layer("twin", Middle, {"inner.weight": "middle.inner.weight"}))

        def optimizer(named):
            return torch.optim.SGD(named, lr=1e-2, momentum=0.9, nesterov=True, foreach=True)
    else:

        def optimizer(named):
            return torch.optim.AdamW(named, lr=1e-2)

    return elastic.Job(layers=layers, loss=loss, dataset=dataset, optimizer=optimizer)
