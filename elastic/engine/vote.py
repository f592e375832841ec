"""The commit vote: one small all-reduce per step that decides it, the same on every rank.

Every entry of the vector has one contributor, all others add zero, so doubles travel as the bits of an int64 and come
out exactly. Flags are counts. `Ballot` is what a rank puts in; `decide` turns the sum into a `Verdict`, purely.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from elastic.engine.gradients import limit
from elastic.engine.units import Unit

Kind = Literal["commit", "redo", "skip", "stop"]
FLAGS = ("non_finite", "stop_requested", "switch_ready")


@dataclass(frozen=True)
class Layout:
    """Where each value stands. ``leaves`` are all ``(unit, layer)`` pairs, in order; ``copies`` as of `Unit.copies`."""

    microbatches: int
    evaluations: int
    units: int
    pipelines: int
    leaves: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]

    @classmethod
    def of(cls, microbatches: int, evaluations: int, units: Sequence[Unit], pipelines: int) -> Layout:
        leaves = tuple((u, layer) for u, unit in enumerate(units) for layer in unit.layers)
        return cls(microbatches, evaluations, len(units), pipelines, leaves, tuple(unit.copies for unit in units))

    @property
    def terms(self) -> tuple[int, ...]:
        """Of each unit: how many gradients are summed into one element."""
        return tuple(self.microbatches * copies for copies in self.copies)

    @property
    def size(self) -> int:
        samples = 3 * self.microbatches + 2 * self.evaluations
        return len(FLAGS) + samples + self.units + self.pipelines * len(self.leaves)

    def flag(self, name: str) -> int:
        return FLAGS.index(name)

    def loss(self, microbatch: int) -> int:
        """Of a microbatch: loss sum, then weight, then number of samples read."""
        return len(FLAGS) + 3 * microbatch

    def evaluation(self, microbatch: int) -> int:
        """Of a held-out microbatch: loss sum, then weight."""
        return self.loss(self.microbatches) + 2 * microbatch

    def norm(self, unit: int) -> int:
        return self.evaluation(self.evaluations) + unit

    def largest(self, pipeline: int, leaf: int) -> int:
        return self.norm(self.units) + pipeline * len(self.leaves) + leaf


def bits(value: float) -> int:
    """A double as the int64 with the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def double(value: int) -> float:
    """The inverse of `bits`."""
    return float(struct.unpack("<d", struct.pack("<q", value))[0])


class Ballot:
    """What one rank contributes: a list of int64 values, zero where another rank is the contributor."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.values = [0] * layout.size

    def flag(self, name: str) -> None:
        self.values[self.layout.flag(name)] = 1

    def loss(self, microbatch: int, total: float, weight: float) -> None:
        at = self.layout.loss(microbatch)
        self.values[at], self.values[at + 1] = bits(total), bits(weight)

    def samples(self, microbatch: int, count: int) -> None:
        self.values[self.layout.loss(microbatch) + 2] = count

    def evaluation(self, microbatch: int, total: float, weight: float) -> None:
        at = self.layout.evaluation(microbatch)
        self.values[at], self.values[at + 1] = bits(total), bits(weight)

    def norm(self, unit: int, squared: float) -> None:
        self.values[self.layout.norm(unit)] = bits(squared)

    def largest(self, pipeline: int, leaf: int, magnitude: float) -> None:
        self.values[self.layout.largest(pipeline, leaf)] = bits(magnitude)


@dataclass(frozen=True)
class Verdict:
    """What all ranks know after a vote.

    ``factor`` is what the summed gradients are multiplied by (clip factor over total weight). ``largest`` is the
    largest magnitude per unit. ``lost`` and ``repeated`` count samples of this step that no pipeline or more than one
    pipeline read. ``switch_ready`` counts the ranks that have the plan of the next epoch.
    """

    kind: Kind
    loss: float
    weight: float
    grad_norm: float | None
    factor: float
    largest: tuple[float, ...]
    samples: int
    lost: int
    repeated: int
    eval_loss: float | None
    stop_requested: bool
    switch_ready: int
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> Verdict:
        return cls(**{**mapping, "largest": tuple(mapping["largest"])})


def decide(
    values: Sequence[int],
    layout: Layout,
    *,
    microbatch_size: int,
    exponents: Sequence[int],
    exact: bool,
    clip_norm: float | None,
    non_finite: str,
) -> Verdict:
    """The verdict of a step from the summed vector.

    A non-finite loss or gradient goes by the job's policy (``skip`` or ``stop``); an exact gradient too large for its
    exponent means ``redo``. A total weight of zero makes the mean undefined and counts as non-finite.
    """
    losses = [double(values[layout.loss(m)]) for m in range(layout.microbatches)]
    weights = [double(values[layout.loss(m) + 1]) for m in range(layout.microbatches)]
    counts = [values[layout.loss(m) + 2] for m in range(layout.microbatches)]
    total, weight = _sum(losses), _sum(weights)
    largest = [0.0] * layout.units
    for pipeline in range(layout.pipelines):
        for leaf, (unit, _) in enumerate(layout.leaves):
            largest[unit] = max(largest[unit], double(values[layout.largest(pipeline, leaf)]))
    norm = math.sqrt(_sum([double(values[layout.norm(u)]) for u in range(layout.units)])) / weight if weight else 0.0
    overflow = exact and any(
        value >= limit(exponent, terms) for value, exponent, terms in zip(largest, exponents, layout.terms, strict=True)
    )
    finite = math.isfinite(total) and weight > 0 and math.isfinite(weight) and all(map(math.isfinite, largest))
    # In fast mode a large sum may overflow float32 although every part is finite: the norm shows it.
    finite = finite and not values[layout.flag("non_finite")] and (overflow or math.isfinite(norm))
    kind: Kind = "commit"
    reason = ""
    if not finite:
        kind = "skip" if non_finite == "skip" else "stop"
        reason = "the loss weights sum to zero" if weight == 0 else "the loss or a gradient is not finite"
    elif overflow:
        kind, reason = "redo", "a gradient outgrew its fixed-point scale"
    clip = 1.0
    if clip_norm is not None and kind == "commit" and norm > clip_norm:
        clip = clip_norm / norm
    evaluated = [double(values[layout.evaluation(m)]) for m in range(layout.evaluations)]
    eval_weight = _sum([double(values[layout.evaluation(m) + 1]) for m in range(layout.evaluations)])
    return Verdict(
        kind=kind,
        loss=total / weight if weight else math.nan,
        weight=weight,
        grad_norm=norm,
        factor=clip / weight if weight else 0.0,
        largest=tuple(largest),
        samples=sum(counts),
        lost=sum(max(0, microbatch_size - count) for count in counts),
        repeated=sum(max(0, count - microbatch_size) for count in counts),
        eval_loss=_sum(evaluated) / eval_weight if eval_weight else None,
        stop_requested=values[layout.flag("stop_requested")] > 0,
        switch_ready=values[layout.flag("switch_ready")],
        reason=reason,
    )


def _sum(values: Sequence[float]) -> float:
    """In order, left to right; ``math.fsum`` raises on infinities of both signs."""
    total = 0.0
    for value in values:
        total += value
    return total
