"""The plan: who computes which layers for which microbatches. Plain data, the same on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic.errors import PlanError
from elastic.planning.profile import ModelProfile, format_bytes
from elastic.planning.templates import Schedule


class PlanInvariant(PlanError):
    """A plan breaks one of its invariants: a defect of the planner or a damaged plan, never a user's mistake."""

    code = "plan_invariant"
    advice = "this is a defect: please report it with the plan"


@dataclass(frozen=True)
class Node:
    """A machine that can take part: ``devices`` stages, in ``zone`` (nodes of a zone tend to fail together)."""

    id: str
    devices: int = 1
    zone: str = ""


@dataclass(frozen=True)
class Stage:
    """Layers ``start`` to ``stop - 1`` on one device of one node."""

    node: str
    device: int
    start: int
    stop: int


@dataclass(frozen=True)
class Pipeline:
    """One copy of the model, and the ids of the microbatches of every step that it computes."""

    stages: tuple[Stage, ...]
    microbatches: tuple[int, ...]
    schedule: Schedule

    def in_flight(self, stage: int) -> int:
        """Most microbatches whose activations the stage (0-based) holds at one time."""
        count = len(self.microbatches)
        return count if self.schedule == "gpipe" else min(len(self.stages) - stage, count)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank sits. Ranks count stages pipeline by pipeline."""

    rank: int
    node: str
    device: int
    pipeline: int
    stage: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Units whose gradients the same ranks sum: one process group, one buffer. Both tuples ascend."""

    ranks: tuple[int, ...]
    units: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Pipelines that together compute every microbatch of a step once.

    Args:
        spares: ids of nodes that are members but compute nothing.
        layers, microbatches: how many the model and the step have; microbatches have the ids 0 .. microbatches - 1.
        seconds: predicted iteration time, in the unit of the profile.
        reason: why this plan, in words.
    """

    pipelines: tuple[Pipeline, ...]
    spares: tuple[str, ...]
    layers: int
    microbatches: int
    seconds: float
    reason: str

    def ranks(self) -> tuple[RankPlace, ...]:
        """Every rank's place, in rank order: pipeline by pipeline, first stage first."""
        places = [(p, s, at) for p, pipeline in enumerate(self.pipelines) for s, at in enumerate(pipeline.stages)]
        return tuple(
            RankPlace(rank, at.node, at.device, p, s, at.start, at.stop) for rank, (p, s, at) in enumerate(places)
        )

    def owners(self, layer: int) -> tuple[int, ...]:
        """The ranks that hold the layer, one per pipeline."""
        return tuple(place.rank for place in self.ranks() if place.start <= layer < place.stop)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        pipelines = tuple(
            Pipeline(tuple(Stage(**stage) for stage in p["stages"]), tuple(p["microbatches"]), p["schedule"])
            for p in data["pipelines"]
        )
        return cls(**{**data, "pipelines": pipelines, "spares": tuple(data["spares"])})

    def check(self, profile: ModelProfile, device_bytes: int | None) -> None:
        """Verifies all that a plan promises.

        Raises:
            PlanInvariant: names the first thing that does not hold.
        """
        if not self.pipelines:
            raise PlanInvariant("the plan has no pipeline")
        if self.layers != len(profile):
            raise PlanInvariant(f"the plan is for {self.layers} layers, the model has {len(profile)}")
        for index, pipeline in enumerate(self.pipelines):
            self._check_layers(f"pipeline {index}", pipeline)
            self._check_schedule(f"pipeline {index}", pipeline)
            if device_bytes is not None:
                _check_memory(f"pipeline {index}", pipeline, profile, device_bytes)
        self._check_microbatches()
        self._check_devices()

    def _check_layers(self, who: str, pipeline: Pipeline) -> None:
        at = 0
        for index, stage in enumerate(pipeline.stages):
            if stage.stop <= stage.start:
                raise PlanInvariant(f"{who}: stage {index} has no layer")
            if stage.start > at:
                raise PlanInvariant(f"{who}: layer {at} is owned by no stage")
            if stage.start < at:
                raise PlanInvariant(f"{who}: layer {stage.start} is owned twice")
            at = stage.stop
        if at < self.layers:
            raise PlanInvariant(f"{who}: layer {at} is owned by no stage")
        if at > self.layers:
            raise PlanInvariant(f"{who}: layer {self.layers} does not exist")

    def _check_schedule(self, who: str, pipeline: Pipeline) -> None:
        count, stages = len(pipeline.microbatches), len(pipeline.stages)
        if pipeline.schedule not in ("1f1b", "gpipe"):
            raise PlanInvariant(f"{who}: unknown schedule {pipeline.schedule!r}")
        if count == 0:
            raise PlanInvariant(f"{who}: has no microbatch")
        if pipeline.schedule == "1f1b" and count < stages:
            raise PlanInvariant(f"{who}: 1f1b with {count} microbatches on {stages} stages")

    def _check_microbatches(self) -> None:
        dealt = Counter(m for pipeline in self.pipelines for m in pipeline.microbatches)
        for microbatch in sorted(dealt):
            if not 0 <= microbatch < self.microbatches:
                raise PlanInvariant(f"microbatch {microbatch} does not exist, there are {self.microbatches}")
            if dealt[microbatch] > 1:
                raise PlanInvariant(f"microbatch {microbatch} is assigned {dealt[microbatch]} times")
        for microbatch in range(self.microbatches):
            if microbatch not in dealt:
                raise PlanInvariant(f"microbatch {microbatch} is assigned to no pipeline")

    def _check_devices(self) -> None:
        used = Counter((stage.node, stage.device) for pipeline in self.pipelines for stage in pipeline.stages)
        for (node, device), times in used.items():
            if times > 1:
                raise PlanInvariant(f"device {device} of node {node!r} is used {times} times")
        if len(set(self.spares)) < len(self.spares):
            raise PlanInvariant("a spare is listed twice")
        for node in sorted({node for node, _ in used} & set(self.spares)):
            raise PlanInvariant(f"node {node!r} is a spare and is used")


def _check_memory(who: str, pipeline: Pipeline, profile: ModelProfile, device_bytes: int) -> None:
    for index, stage in enumerate(pipeline.stages):
        in_flight = pipeline.in_flight(index)
        if (need := profile.stage_bytes(stage.start, stage.stop, in_flight)) > device_bytes:
            raise PlanInvariant(
                f"{who}: stage {index} needs {format_bytes(need)} with {in_flight} microbatches in flight, "
                f"a device has {format_bytes(device_bytes)}"
            )


def groups(plan: Plan, units: Sequence[Sequence[int]]) -> tuple[Bucket, ...]:
    """Who sums which gradients: one bucket per distinct set of owners, ordered by its first unit.

    A unit is the layers whose leaves are summed together: one layer as a rule, two for a weight that they share. Its
    owners are all ranks that own any of its layers in any pipeline. There are never more buckets than units, and a
    model of L layers in pipelines of S stages has few: owners change only at cuts.
    """
    layer_owners: list[list[int]] = [[] for _ in range(plan.layers)]
    for place in plan.ranks():
        for layer in range(place.start, place.stop):
            layer_owners[layer].append(place.rank)
    buckets: dict[tuple[int, ...], list[int]] = {}
    for index, layers in enumerate(units):
        owners = tuple(sorted({rank for layer in layers for rank in layer_owners[layer]}))
        buckets.setdefault(owners, []).append(index)
    return tuple(Bucket(ranks, tuple(members)) for ranks, members in buckets.items())
