"""From a profile and the nodes there are to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from elastic.errors import PlanError
from elastic.planning.compose import Composition, compose, compose_short, replicas
from elastic.planning.plan import Node, Pipeline, Plan, Stage
from elastic.planning.profile import ModelProfile, format_bytes
from elastic.planning.templates import Template, TemplateSearch, smallest_size

Device = tuple[str, int]  # id of the node, number of the device on it


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
    smallest, devices = usable_devices(profile, nodes, microbatches, fault_tolerance, device_bytes)
    search = TemplateSearch(profile, device_bytes)
    found = fastest(search, len(devices), smallest, microbatches, fault_tolerance)
    return lay_out(nodes, devices, found, len(profile), microbatches)


def usable_devices(
    profile: ModelProfile, nodes: Sequence[Node], microbatches: int, fault_tolerance: int, device_bytes: int | None
) -> tuple[int, list[Device]]:
    """``(n0, devices)``: the fewest devices that hold the model, and all that there are, by zone, then id of the node.

    Raises:
        TooFewNodes: there are fewer than n0.
        PlanError: no number of devices could hold the model, or the arguments make no sense.
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
    return smallest, devices


def fastest(
    search: TemplateSearch, devices: int, smallest: int, microbatches: int, fault_tolerance: int
) -> Composition:
    """The fastest composition of so many devices.

    Raises:
        PlanError: there are too few microbatches for any schedule that fits.
    """
    needed = replicas(devices, smallest, fault_tolerance, microbatches)
    if microbatches < needed * smallest:
        short = compose_short(devices, smallest, search, fault_tolerance=fault_tolerance, microbatches=microbatches)
        if short is not None:
            return short
        if microbatches < smallest:
            raise PlanError(
                f"{devices} devices hold the model only with a microbatch per stage: {smallest}, not {microbatches}",
                "use a smaller microbatch or more nodes",
            )
    able = equal_shares(search, devices, smallest, microbatches)
    return compose(devices, able, fault_tolerance=fault_tolerance, microbatches=microbatches)


def equal_shares(search: TemplateSearch, devices: int, smallest: int, microbatches: int) -> dict[int, Template]:
    """The best template of every size that fits, for the microbatches it has if all devices get equal shares."""
    usable = min(devices, microbatches)
    sizes = range(smallest, min(usable, len(search.profile)) + 1)
    found = {size: search.best(size, -(-microbatches * size // usable)) for size in sizes}
    return {size: template for size, template in found.items() if template is not None}


def lay_out(
    nodes: Sequence[Node], places: Iterable[Device], found: Composition, layers: int, microbatches: int
) -> Plan:
    """The plan in which the stages of a composition, pipeline by pipeline, sit on ``places`` in that order."""
    free, ids = iter(places), iter(range(microbatches))
    pipelines = tuple(
        Pipeline(
            # cuts first: zip then stops without taking a device from the next pipeline
            tuple(
                Stage(node, device, start, stop)
                for (start, stop), (node, device) in zip(template.cuts, free, strict=False)
            ),
            tuple(islice(ids, count)),
            template.schedule,
        )
        for template, count in zip(found.templates, found.microbatches, strict=True)
    )
    used = {stage.node for pipeline in pipelines for stage in pipeline.stages}
    here = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    devices = sum(node.devices for node in nodes)
    if devices != len(nodes):
        here += f" with {devices} devices"
    return Plan(
        pipelines=pipelines,
        spares=tuple(sorted(node.id for node in nodes if node.id not in used)),
        layers=layers,
        microbatches=microbatches,
        seconds=found.seconds,
        reason=f"{here}: {found.reason}",
    )
