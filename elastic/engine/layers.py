"""A layer as a worker holds it: module, optimizer, and which step its bits belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from elastic.engine.randomness import seed_of, set_seed
from elastic.errors import JobError
from elastic.job import Job, Layer

# What names the bits of a layer beside its name: (lineage, committed steps, epoch whose vote decided the last of them).
# The last is 0 with `reduction: exact`, where a step redone in another epoch gives the same bits.
Version = tuple[int, int, int]


@dataclass
class LayerState:
    """One held layer. ``version`` is ``None`` while an update is under way, and stays so if the update is cut: such a
    *torn* layer has bits that belong to no step and counts as not held.
    """

    index: int
    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer | None  # None for a layer without parameters
    version: Version | None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    def digest(self) -> str:
        """xxh3-128 (hex) over parameters and optimizer state, each under its path, in a fixed order."""
        h = xxhash.xxh3_128()
        for path, parameter in self.parameters():
            hash_tensor(h, path, parameter)
            state: Mapping[str, Any] = self.optimizer.state.get(parameter, {}) if self.optimizer else {}
            for key in sorted(state):
                value = state[key]
                hash_tensor(h, f"{path}/{key}", value if isinstance(value, Tensor) else torch.tensor(value))
        return h.hexdigest()


def hash_tensor(h: xxhash.xxh3_128, path: str, tensor: Tensor) -> None:
    h.update(f"{path}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    h.update(data.numpy().data if data.numel() else b"")


def build_layer(job: Job, index: int, seed: int, lineage: int = 0) -> LayerState:
    """Builds a layer as it is before the first step, the same bits on every machine of one class.

    A tied parameter starts with the value of the layer that owns it, which is built for that purpose and dropped.
    """
    layer = job.layers[index]
    module = _build_module(layer, seed)
    named = dict(module.named_parameters())
    for path, target in layer.tied.items():
        owner_name, owner_path = resolve_tied(job, target)
        owner = next(other for other in job.layers if other.name == owner_name)
        source = dict(_build_module(owner, seed).named_parameters()).get(owner_path)
        if path not in named or source is None or source.shape != named[path].shape:
            raise JobError(f"layer {layer.name!r} ties {path!r} to {target!r}, which is missing or has another shape")
        with torch.no_grad():
            named[path].copy_(source)
    set_seed(seed_of(seed, "optimizer", layer.name))
    optimizer = job.optimizer(list(named.items())) if named else None  # torch refuses an empty list
    return LayerState(index, layer.name, module, optimizer, version=(lineage, 0, 0))


def _build_module(layer: Layer, seed: int) -> nn.Module:
    set_seed(seed_of(seed, "build", layer.name))
    return layer.build().train()


def resolve_tied(job: Job, target: str) -> tuple[str, str]:
    """``layer.path`` of a tied parameter to ``(layer, path)`` of the parameter it finally names.

    Raises:
        JobError: no layer of that name, or a chain of ties without an end.
    """
    for _ in range(1 + sum(len(layer.tied) for layer in job.layers)):
        # A layer name may hold dots; the longest name that fits wins.
        layer = max(
            (layer for layer in job.layers if target.startswith(layer.name + ".")),
            key=lambda layer: len(layer.name),
            default=None,
        )
        if layer is None:
            raise JobError(f"tied parameter {target!r} names no layer of the job", "write it as layer.path")
        path = target[len(layer.name) + 1 :]
        if path not in layer.tied:
            return layer.name, path
        target = layer.tied[path]
    raise JobError(f"tied parameter {target!r} is tied to itself")
