"""What the planner knows about a model: time and memory of every layer.

Times are per microbatch, in seconds (any other unit works as well, as long as one profile keeps to it). Sizes are
bytes. A profile is data: measured or computed elsewhere, compared, stored and sent as plain JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from elastic.errors import PlanError

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def format_bytes(count: int) -> str:
    """``24MiB``, ``1.5GiB``, ``700B``: the way sizes are written in a config, rounded to one decimal."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count // unit}{name}" if count % unit == 0 else f"{count / unit:.1f}{name}"
    return f"{count}B"


@dataclass(frozen=True)
class LayerProfile:
    """One layer, the atom of a plan.

    Args:
        name: the layer's logical name.
        forward_s, backward_s: time per microbatch.
        state_bytes: parameters + gradients + accumulator + optimizer state; held once, whatever is in flight.
        activation_bytes: kept for every microbatch in flight.
        output_bytes: the boundary tensor of one microbatch, were the pipeline cut after this layer.

    Raises:
        PlanError: a time is negative or not finite, or a size is negative.
    """

    name: str
    forward_s: float
    backward_s: float
    state_bytes: int
    activation_bytes: int
    output_bytes: int

    def __post_init__(self) -> None:
        for key in ("forward_s", "backward_s", "state_bytes", "activation_bytes", "output_bytes"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"layer {self.name!r}: {key} is {value}", "a profile holds finite values of 0 or more")


@dataclass(frozen=True)
class ModelProfile:
    """All layers of a model in forward order.

    Raises:
        PlanError: there is no layer.
    """

    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("the model has no layers", "a profile needs at least one layer")

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def state_prefix(self) -> tuple[int, ...]:
        """``state_prefix[i]``: bytes of state of the layers before ``i``; one entry more than there are layers."""
        return tuple(accumulate((layer.state_bytes for layer in self.layers), initial=0))

    @cached_property
    def activation_prefix(self) -> tuple[int, ...]:
        """``activation_prefix[i]``: bytes of activations of one microbatch in the layers before ``i``."""
        return tuple(accumulate((layer.activation_bytes for layer in self.layers), initial=0))

    @cached_property
    def ticks(self) -> int:
        """How many ticks make one unit of time: the least power of two that turns every time into an integer."""
        return max(float(t).as_integer_ratio()[1] for lay in self.layers for t in (lay.forward_s, lay.backward_s))

    @cached_property
    def forward_prefix(self) -> tuple[int, ...]:
        """Forward time of the layers before ``i``, in ticks.

        Ticks, because sums of floats depend on where they start: two equal stages would differ in the last bit, and
        with it the choice among splits. Integers compare exactly.
        """
        return tuple(accumulate((self._in_ticks(layer.forward_s) for layer in self.layers), initial=0))

    @cached_property
    def backward_prefix(self) -> tuple[int, ...]:
        """Backward time of the layers before ``i``, in ticks."""
        return tuple(accumulate((self._in_ticks(layer.backward_s) for layer in self.layers), initial=0))

    def _in_ticks(self, seconds: float) -> int:
        numerator, denominator = float(seconds).as_integer_ratio()
        return numerator * (self.ticks // denominator)

    def stage_bytes(self, start: int, stop: int, in_flight: int) -> int:
        """Memory of a stage made of layers ``start`` to ``stop - 1`` with ``in_flight`` microbatches begun."""
        state = self.state_prefix[stop] - self.state_prefix[start]
        return state + in_flight * (self.activation_prefix[stop] - self.activation_prefix[start])

    def to_json(self) -> dict[str, Any]:
        return {"layers": [asdict(layer) for layer in self.layers]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelProfile:
        return cls(tuple(LayerProfile(**layer) for layer in data["layers"]))
