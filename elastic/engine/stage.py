"""One pipeline stage: consecutive layers, seeded per layer and microbatch, on torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from elastic.engine.layers import LayerState
from elastic.engine.randomness import seed_of, set_seed
from elastic.errors import JobError


class Boundary(torch.autograd.Function):
    """Contiguous forward and backward at every layer boundary, whether or not a wire runs there, so that a layer sees
    the same memory layout wherever the cuts are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous().view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


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
            with self.precision():
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
    """

    def __init__(
        self,
        module: StageModule,
        microbatches: Sequence[int],
        after_backward: Callable[[], None],
        **arguments: Any,
    ) -> None:
        super().__init__(module, **arguments)
        self.module = module
        self._microbatches = microbatches
        self._after_backward = after_backward

    def forward_one_chunk(  # type: ignore[no-untyped-def]
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs=None, save_forward_output: bool = True
    ):
        self.module.microbatch = self._microbatches[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(  # type: ignore[no-untyped-def]
        self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False
    ):
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and not loss._is_view():
            loss.detach_()  # the schedule keeps the losses of a step; let it not keep their graphs
        if self.has_backward:
            self._after_backward()
