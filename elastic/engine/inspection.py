"""What a job looks like before it runs: boundary shapes, memory and cost per layer, and refusals by name.

Everything is computed on fake tensors (no memory, no arithmetic), so it works for a model that fits no single machine,
and from formulas rather than clocks, so the plans do not vary from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from elastic.config import Train
from elastic.engine.randomness import seed_of, set_seed
from elastic.engine.step import Boundary, evaluation_microbatches, load
from elastic.engine.units import units_of
from elastic.engine.usercode import user_code
from elastic.errors import JobError, UserCodeError
from elastic.job import Job, Layer
from elastic.planning import LayerProfile, ModelProfile

# A nominal core, to turn operations and bytes into seconds. Only ratios matter to the planner.
FLOPS_PER_S = 60e9
BYTES_PER_S = 8e9


@dataclass(frozen=True)
class Inspection:
    """``boundaries``: input of the first layer, then the output of every layer (microbatch in dimension 0)."""

    profile: ModelProfile
    boundaries: tuple[Boundary, ...]


def inspect_job(job: Job, train: Train) -> Inspection:
    """Runs one fake microbatch through every layer.

    Raises:
        JobError: a layer with mutable buffers, sparse gradients, a wrong output; ties that do not resolve.
        UserCodeError: the job's own code raised.
    """
    units_of(job)  # resolves ties
    evaluation_microbatches(job, train)
    cpu = torch.device("cpu")
    inputs, _ = load(job.dataset, [(0, [0] * train.microbatch)], True, True, cpu, (train.seed, "inspect"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x: Tensor = mode.from_tensor(inputs[0])
    boundaries: list[Boundary] = [_boundary(x)]
    profiles = []
    for layer in job.layers:
        profile, x = _inspect_layer(job, layer, x, train, mode)
        profiles.append(profile)
        boundaries.append(_boundary(x))
    return Inspection(ModelProfile(tuple(profiles)), tuple(boundaries))


def _boundary(x: Tensor) -> Boundary:
    return tuple(x.shape), str(x.dtype).removeprefix("torch.")


def _inspect_layer(
    job: Job, layer: Layer, x: Tensor, train: Train, mode: FakeTensorMode
) -> tuple[LayerProfile, Tensor]:
    what = f"layer {layer.name!r}"
    set_seed(seed_of(train.seed, "inspect", layer.name))
    with mode, user_code(f"building {what}"):
        module = layer.build().train()
    _refuse(layer.name, module)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.precision == "bf16", cache_enabled=False)
    buffers = dict(module.named_buffers())
    versions = {name: buffer._version for name, buffer in buffers.items()}
    saved = _Saved(module)
    with mode, FlopCounterMode(display=False) as flops, saved.recording():
        inner = x.detach().requires_grad_(x.dtype.is_floating_point)
        try:
            with user_code(f"the forward pass of {what}"), autocast:
                y = module(inner)
        except UserCodeError as error:
            if "leaf Variable" in error.message:
                raise JobError(f"{what} changes its input in place", "use inplace=False at its start") from None
            raise
    for name, buffer in module.named_buffers():
        if buffers.get(name) is not buffer or buffer._version != versions[name]:
            raise JobError(
                f"{what} changes its buffer {name!r} in the forward pass",
                "mutable buffers (such as batch-norm statistics) are not supported; use LayerNorm or GroupNorm",
            )
    if not isinstance(y, Tensor):
        raise JobError(f"{what} returned {type(y).__name__}, not a tensor", "a layer maps one tensor to one tensor")
    if y.dim() == 0 or y.shape[0] != x.shape[0]:
        raise JobError(
            f"{what} returned shape {tuple(y.shape)} for input {tuple(x.shape)}",
            "dimension 0 is the batch and must stay what it was",
        )
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    count = sum(p.numel() for p in module.parameters())
    accumulator = count * (12 if train.reduction == "exact" else 4)  # int64 sum and float32 result, or the result alone
    state = 2 * parameters + accumulator + _optimizer_bytes(job, layer, module)
    output = y.numel() * y.element_size()
    activations = saved.bytes + output
    forward = flops.get_total_flops() / FLOPS_PER_S + (activations + parameters) / BYTES_PER_S
    return LayerProfile(layer.name, forward, 2 * forward, state, activations, output), y.detach()


class _Saved:
    """Counts the bytes that autograd keeps for the backward pass, without parameters and without counting twice."""

    def __init__(self, module: nn.Module) -> None:
        self._seen = {id(p.untyped_storage()) for p in module.parameters()}
        self._parameters = {id(p) for p in module.parameters()}
        self._kept: list[Any] = []
        self.bytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._base is not None else tensor
        if id(base) not in self._parameters and all(base is not kept for kept in self._kept):
            self._kept.append(base)
            self.bytes += base.numel() * base.element_size()
        return tensor


def _optimizer_bytes(job: Job, layer: Layer, module: nn.Module) -> int:
    """Optimizer state, from one step on small stand-ins: bytes per element of each parameter, times its elements."""
    small = [
        (name, nn.Parameter(torch.zeros([min(size, 4) for size in p.shape]))) for name, p in module.named_parameters()
    ]
    if not small:
        return 0
    with user_code(f"the optimizer of layer {layer.name!r}"):
        optimizer = job.optimizer(small)
        for _, parameter in small:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    total = 0.0
    for (_, stand_in), real in zip(small, module.parameters(), strict=True):
        state = optimizer.state.get(stand_in, {})
        tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
        held = sum(value.numel() * value.element_size() for value in tensors)
        total += held / max(1, stand_in.numel()) * real.numel()
    return round(total)


def _refuse(name: str, module: nn.Module) -> None:
    for path, part in module.named_modules():
        where = f"layer {name!r}" + (f", module {path!r}" if path else "")
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise JobError(
                f"{where} keeps running statistics ({type(part).__name__})",
                "mutable buffers are not supported: use LayerNorm or GroupNorm, or track_running_stats=False",
            )
        if getattr(part, "sparse", False) is True and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise JobError(f"{where} asks for sparse gradients", "sparse gradients are not supported: use sparse=False")
