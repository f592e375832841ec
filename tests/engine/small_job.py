"""A small job for tests on made-up tokens; tied and token-weighted variants, one layer without parameters."""

from __future__ import annotations

import ctypes
import time

import torch
import torch.nn.functional as F
from torch import nn

import elastic
from elastic.engine.randomness import seed_of

WIDTH, VOCAB, LENGTH = 16, 32, 8


class Tokens:
    """Sample i is a short arithmetic sequence; 37 samples, so that steps wrap in mid-batch."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        x = (torch.arange(LENGTH + 1) * (1 + index % 5) + index) % VOCAB
        return x[:-1], x[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="sum"), target.numel()


def weighted_loss(output, target):
    each = F.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="none")
    keep = (target.flatten() % 3 != 0).float()
    return (each * keep).sum(), keep.sum()


class Slow(Tokens):
    """The same samples, each after a pause: for tests that would otherwise train thousands of steps meanwhile."""

    def __init__(self, pause_s):
        self.pause_s = pause_s

    def __getitem__(self, index):
        time.sleep(self.pause_s)
        return super().__getitem__(index)


class Stuck(Tokens):
    """Hangs for ever, in the one process of all that finds the file ``token`` absent, once it has read ``reads``
    samples; with ``locked`` it does not let go of the interpreter meanwhile."""

    def __init__(self, token, reads, locked):
        self.token, self.left, self.locked = token, reads, locked

    def __getitem__(self, index):
        time.sleep(0.004)
        self.left -= 1
        if self.left == 0:
            try:
                open(self.token, "x").close()
            except FileExistsError:
                return super().__getitem__(index)
            ctypes.PyDLL(None).sleep(10**6) if self.locked else time.sleep(10**6)
        return super().__getitem__(index)


class Raising(Tokens):
    """Raises for a sample that only one step reads."""

    def __init__(self, step):
        self.step = step

    def __getitem__(self, index):
        # Sample order wraps: the same sample comes in earlier steps too, so tell them by the seed of the reading.
        if torch.default_generator.initial_seed() == seed_of(3, "sample", self.step, 0, 0):
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


class RaisesOnce(torch.optim.AdamW):
    """Raises after its update number ``step``, in the one process of all that finds the file ``token`` absent."""

    def __init__(self, named, step, token, **options):
        super().__init__(named, **options)
        self.left, self.token = step, token

    def step(self, closure=None):
        super().step(closure)
        self.left -= 1
        if self.left == 0:
            try:
                open(self.token, "x").close()
            except FileExistsError:
                return
            raise ValueError("this update went wrong")


def optimizer(params):
    once = params.get("optimizer_raises")

    def build(named):
        if once and torch.initial_seed() == seed_of(3, "optimizer", once["layer"]):
            return RaisesOnce(named, once["step"], once["token"], lr=1e-3)
        return torch.optim.AdamW(named, lr=1e-3)

    return build


def job(params):
    tied = {"out.weight": "embed.weight"} if params.get("tied") else {}
    data = Tokens()
    if "raise_at" in params:
        data = Raising(params["raise_at"])
    elif "stuck" in params:
        data = Stuck(**params["stuck"])
    elif "slow" in params:
        data = Slow(params["slow"])
    layers = [elastic.Layer("embed", lambda: nn.Embedding(VOCAB, WIDTH))]
    layers += [elastic.Layer(f"block.{i}", Block) for i in range(4)]
    layers.append(elastic.Layer("act", nn.Tanh))
    layers.append(elastic.Layer("head", Head, tied))
    return elastic.Job(
        layers=layers,
        loss=weighted_loss if params.get("weighted") else loss,
        dataset=data,
        optimizer=optimizer(params),
        lr=lambda step: 1e-2 / (1 + step),
        evaluation=elastic.Evaluation(Tokens(), every=3, samples=8) if params.get("evaluate") else None,
    )
