"""One pipeline stage: consecutive layers, seeded per layer and microbatch, on torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from elastic.engine.gate import Gate
from elastic.engine.layers import LayerState
from elastic.engine.randomness import seed_of, set_seed
from elastic.engine.usercode import user_code
from elastic.errors import JobError

ALIGNMENT = 64  # bytes; what torch's allocators give at least


class Boundary(torch.autograd.Function):
    """Contiguous forward and backward at every layer boundary, whether or not a wire runs there, so that a layer sees
    the same memory layout wherever the cuts are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return canonical(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return canonical(grads[0])


def canonical(x: Tensor) -> Tensor:
    """The same values, laid out as a new tensor would be: BLAS kernels give other bits on other alignments and strides,
    and a view into a stacked batch has those of its place in it."""
    strides, step = [], 1
    for size in reversed(x.shape):
        strides.append(step)
        step *= max(size, 1)
    if x.stride() == tuple(reversed(strides)) and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def boundary(x: Tensor) -> Tensor:
    return Boundary.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class StageModule(nn.Module):
    """Runs layers in order. ``step`` and ``microbatch`` are set before each forward pass.

    Args:
        layers: in forward order.
        boundaries: for each layer of the *stage*, shape and dtype of its output, checked in every pass: a layer whose
            output varies would otherwise hang the next stage.
        autocast: the dtype to compute in, or ``None``.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        boundaries: Sequence[tuple[torch.Size, torch.dtype]],
        seed: int,
        autocast: torch.dtype | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layer.module for layer in layers)
        self._names = [layer.name for layer in layers]
        self._boundaries = boundaries
        self._seed, self._autocast, self._device = seed, autocast, device
        self.step = 0
        self.microbatch = 0

    def forward(self, x: Tensor) -> Tensor:
        for part, name, expected in zip(self.parts, self._names, self._boundaries, strict=True):
            x = boundary(x)
            set_seed(seed_of(self._seed, "forward", self.step, self.microbatch, name))
            with self.precision(), user_code(f"the forward pass of layer {name!r}, microbatch {self.microbatch}"):
                x = part(x)
            if (x.shape, x.dtype) != expected:
                raise JobError(
                    f"layer {name!r} returned {tuple(x.shape)} {x.dtype}, expected {tuple(expected[0])} {expected[1]}",
                    "layers must return one tensor of the same shape and dtype for every microbatch",
                )
        return boundary(x)

    def precision(self) -> torch.autocast:
        """Entered per layer and microbatch, without the weight cache: a cached cast would depend on the cuts."""
        return torch.autocast(
            self._device.type,
            dtype=self._autocast or torch.bfloat16,
            enabled=self._autocast is not None,
            cache_enabled=False,
        )


class Stage(PipelineStage):
    """torch's stage, told which global microbatch each of its chunks is.

    Args:
        microbatches: global ids of the chunks.
        after_backward: called after each chunk's backward pass, when its gradients are in ``.grad``.
        gate: of the epoch; forward and backward passes are what may go on while it is shut.
    """

    def __init__(
        self,
        module: StageModule,
        microbatches: Sequence[int],
        after_backward: Callable[[], None],
        gate: Gate,
        **arguments: Any,
    ) -> None:
        super().__init__(module, **arguments)
        self.module = module
        self._microbatches = microbatches
        self._after_backward = after_backward
        self._gate = gate

    def forward_one_chunk(  # type: ignore[no-untyped-def]
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs=None, save_forward_output: bool = True
    ):
        self.module.microbatch = self._microbatches[fwd_chunk_id]
        what = f"the forward pass of microbatch {self.module.microbatch}"
        with self._gate.computing(what), user_code(what):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(  # type: ignore[no-untyped-def]
        self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False
    ):
        what = f"the backward pass of microbatch {self._microbatches[bwd_chunk_id]}"
        with self._gate.computing(what), user_code(what):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and not loss._is_view():
            loss.detach_()  # the schedule keeps the losses of a step; let it not keep their graphs
        if self.has_backward:
            self._after_backward()
