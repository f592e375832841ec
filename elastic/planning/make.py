"""From a profile and the nodes there are to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from elastic.errors import PlanError
from elastic.planning.compose import Composition, compose, compose_short, replicas
from elastic.planning.plan import Node, Pipeline, Plan, Stage
from elastic.planning.profile import ModelProfile, format_bytes
from elastic.planning.templates import TemplateSearch, smallest_size


class TooFewNodes(PlanError):
    """The devices present cannot hold the model, more of them could.

    Args:
        needed, present: numbers of devices.
    """

    code = "too_few_nodes"

    def __init__(self, message: str, hint: str = "", detail: str = "", *, needed: int = 0, present: int = 0) -> None:
        super().__init__(message, hint, detail)
        self.needed = needed
        self.present = present


def make_plan(
    profile: ModelProfile,
    nodes: Sequence[Node],
    *,
    microbatches: int,
    fault_tolerance: int,
    device_bytes: int | None,
) -> Plan:
    """The fastest plan for these nodes that keeps ``fault_tolerance + 1`` copies of every layer where it can.

    A pure function of its arguments, whatever the order of the nodes: they are used by zone, then id, a pipeline
    taking the next devices node by node, so that neighbours in a pipeline are close and a zone that fails takes few
    pipelines along. Pipelines come by ascending size; microbatches are dealt to them as contiguous ranges of ids.

    Templates are made for the microbatches a pipeline of each size has if all devices get equal shares; the
    distribution then differs from that by little.

    Raises:
        TooFewNodes: the model needs more devices than these nodes have.
        PlanError: no number of devices could hold the model, there are too few microbatches for any schedule that fits,
            or the arguments make no sense.
    """
    if microbatches < 1 or fault_tolerance < 0:
        raise PlanError(f"no plan for {microbatches} microbatches and fault tolerance {fault_tolerance}")
    if len({node.id for node in nodes}) < len(nodes):
        raise PlanError("two nodes have the same id", "every node needs an id of its own")
    smallest = smallest_size(profile, device_bytes)
    ordered = sorted(nodes, key=lambda node: (node.zone, node.id))
    devices = [(node.id, device) for node in ordered for device in range(node.devices)]
    if len(devices) < smallest:
        limit = "" if device_bytes is None else f" of {format_bytes(device_bytes)}"
        raise TooFewNodes(
            f"the model needs {smallest} devices{limit}, {len(devices)} present",
            "add nodes or raise device_memory",
            needed=smallest,
            present=len(devices),
        )
    found = _compose(profile, len(devices), smallest, microbatches, fault_tolerance, device_bytes)
    free, ids = iter(devices), iter(range(microbatches))
    pipelines = tuple(
        Pipeline(_stages(free, template.cuts), tuple(islice(ids, count)), template.schedule)
        for template, count in zip(found.templates, found.microbatches, strict=True)
    )
    used = {stage.node for pipeline in pipelines for stage in pipeline.stages}
    here = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    if len(devices) != len(nodes):
        here += f" with {len(devices)} devices"
    return Plan(
        pipelines=pipelines,
        spares=tuple(sorted(node.id for node in nodes if node.id not in used)),
        layers=len(profile),
        microbatches=microbatches,
        seconds=found.seconds,
        reason=f"{here}: {found.reason}",
    )


def _compose(
    profile: ModelProfile, devices: int, smallest: int, microbatches: int, tolerance: int, device_bytes: int | None
) -> Composition:
    search = TemplateSearch(profile, device_bytes)
    needed = replicas(devices, smallest, tolerance, microbatches)
    if microbatches < needed * smallest:
        short = compose_short(devices, smallest, search, fault_tolerance=tolerance, microbatches=microbatches)
        if short is not None:
            return short
        if microbatches < smallest:
            raise PlanError(
                f"{devices} devices hold the model only with a microbatch per stage: {smallest}, not {microbatches}",
                "use a smaller microbatch or more nodes",
            )
    usable = min(devices, microbatches)
    sizes = range(smallest, min(usable, len(profile)) + 1)
    found = {size: search.best(size, -(-microbatches * size // usable)) for size in sizes}
    fitting = {size: template for size, template in found.items() if template is not None}
    return compose(devices, fitting, fault_tolerance=tolerance, microbatches=microbatches)


def _stages(free: Iterator[tuple[str, int]], cuts: tuple[tuple[int, int], ...]) -> tuple[Stage, ...]:
    # cuts first: zip then stops without taking a device from the next pipeline
    return tuple(Stage(node, device, start, stop) for (start, stop), (node, device) in zip(cuts, free, strict=False))
