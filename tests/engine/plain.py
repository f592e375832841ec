"""The oracle: one process, one loop, no pipeline, no process group. It shares with the engine only the layers, the
optimizer, the order of the samples, the seeds, and the rule by which a gradient is rounded to fixed point."""

from __future__ import annotations

import math

import torch

from elastic.digest import combined_digest
from elastic.engine.cursor import Cursor
from elastic.engine.gradients import FIRST_EXPONENT, next_exponent
from elastic.engine.layers import build_layer
from elastic.engine.randomness import seed_of, set_all_seeds, set_seed
from elastic.engine.units import units_of


def plain_train(job, train, on_step=None):
    """``(digest, losses)`` after ``train.steps`` steps."""
    torch.set_num_threads(1)
    layers = [build_layer(job, i, train.seed) for i in range(len(job.layers))]
    units = units_of(job)
    tied = {leaf for unit in units for leaf in unit.leaves}
    slots = []  # per unit: list of lists of parameters
    for unit in units:
        if unit.leaves:
            slots.append([[layers[i].module.get_parameter(path) for i, path in unit.leaves]])
        else:
            own = layers[unit.layers[0]]
            slots.append([[p] for path, p in own.parameters() if (own.index, path) not in tied])
    exponents = [FIRST_EXPONENT] * len(units)
    cursor = Cursor(len(job.dataset), train.global_batch, train.microbatch, train.seed)
    losses = []
    for step in range(train.steps):
        sums = [[torch.zeros(s[0].shape, dtype=torch.int64) for s in unit] for unit in slots]
        floats = [[torch.zeros(s[0].shape) for s in unit] for unit in slots]
        largest = [0.0] * len(units)
        total = weight = 0.0
        for m in range(train.microbatches):
            samples = []
            for place, i in enumerate(cursor.samples(step, m)):
                set_all_seeds(seed_of(train.seed, "sample", step, m, place))
                samples.append(job.dataset[i])
            x = torch.stack([s[0] for s in samples])
            y = torch.stack([s[1] for s in samples])
            for layer in layers:
                set_seed(seed_of(train.seed, "forward", step, m, layer.name))
                with precision(train):
                    x = layer.module(x)
            set_seed(seed_of(train.seed, "loss", step, m))
            with precision(train):
                s, w = job.loss(x, y)
            s.backward()
            total, weight = total + float(s.detach()), weight + float(w)
            for u, unit in enumerate(slots):
                for k, parameters in enumerate(unit):
                    for p in parameters:
                        sums[u][k] += torch.round(p.grad * 2.0 ** exponents[u]).to(torch.int64)
                        floats[u][k] += p.grad
                        largest[u] = max(largest[u], float(p.grad.abs().max()))
                        p.grad = None
        if train.reduction == "exact":
            summed = [[q.to(torch.float32) * 2.0 ** -exponents[u] for q in qs] for u, qs in enumerate(sums)]
        else:
            summed = floats
        squares = [math.fsum(float(torch.linalg.vector_norm(g)) ** 2 for g in unit) for unit in summed]
        norm = math.sqrt(sum(squares)) / weight
        clip = train.clip_norm / norm if train.clip_norm is not None and norm > train.clip_norm else 1.0
        for u, unit in enumerate(slots):
            for k, parameters in enumerate(unit):
                for p in parameters:
                    p.grad = summed[u][k] * (clip / weight)
        for layer in layers:
            if layer.optimizer is None:
                continue
            set_seed(seed_of(train.seed, "optimize", step, layer.name))
            for group in layer.optimizer.param_groups:
                if job.lr is not None:
                    group["lr"] = job.lr(step)
            layer.optimizer.step()
            layer.optimizer.zero_grad()
        terms = [train.microbatches * unit.copies for unit in units]
        exponents = [next_exponent(e, m, n) for e, m, n in zip(exponents, largest, terms, strict=True)]
        losses.append(total / weight)
        if on_step is not None:
            on_step(step, layers)
    return combined_digest([(layer.name, layer.digest()) for layer in layers]), losses


def precision(train):
    return torch.autocast("cpu", torch.bfloat16, enabled=train.precision == "bf16", cache_enabled=False)
