"""Reconfiguration: the plan after nodes left or joined, and which layers move to whom.

First the composition. The candidates are the fastest one; the pipelines that are still whole, kept as they are, with
the survivors of broken pipelines and the new nodes composed anew; and the same with one, two or all of the whole
pipelines taken apart as well, which is how a remainder too small for a pipeline of its own is used (to borrow and to
merge, in Oobleck's terms). Composed anew means with ``compose``, so no candidate has fewer copies than fault tolerance
asks for while the nodes there are suffice; Oobleck's rules (SOSP'23) are not that careful. Of the candidates that are
at most ``TOLERANCE`` slower than the fastest, the one that moves the fewest bytes is taken. None may leave more devices
idle than the fastest: otherwise a node that joins a large cluster, or comes back to it, would stay a spare for ever
because what it adds is less than the tolerance.

Then the assignment: which device takes which stage, such that the layers that its node lacks are the fewest bytes. See
``assign.py``. It covers all nodes, also those of pipelines that are kept: that they stay costs nothing, so they do
unless fewer bytes move otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from elastic.errors import PlanError
from elastic.planning.assign import assign
from elastic.planning.compose import Composition, compose, composed, distribute, listed, replicas
from elastic.planning.make import Device, equal_shares, fastest, lay_out, usable_devices
from elastic.planning.plan import Node, Plan
from elastic.planning.profile import ModelProfile, format_bytes
from elastic.planning.templates import Template, TemplateSearch, timed

# How much slower than the fastest composition a plan may be, as a fraction, to move fewer bytes.
TOLERANCE = 0.05

# What the use of a device costs where bytes are equal: in its place, 0 for one of a pipeline that is whole, so that a
# survivor of a broken one is rather left over; elsewhere, the more the better it should stay where it is.
_BROKEN_STAYS, _BROKEN_MOVES, _UNPLACED, _WHOLE_MOVES = 1, 2, 3, 4

Slot = tuple[tuple[tuple[int, int], ...], int]  # cuts of the pipeline, number of the stage in it


@dataclass(frozen=True)
class Transfer:
    """One layer to be copied to one node.

    Args:
        layer: its index.
        node: id of the node that needs it.
        sources: ids of all nodes that hold it, sorted; never ``node``.
    """

    layer: int
    node: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Reconfiguration:
    """A plan and the way to it.

    Args:
        plan: passes ``check()``.
        transfers: by layer, then node.
        missing: indices of the layers that nobody holds; to be restored or rebuilt wherever the plan wants them.
        moved_bytes: sum of ``state_bytes`` of the layers of all transfers.
        reason: what stays and what moves, in words.
    """

    plan: Plan
    transfers: tuple[Transfer, ...]
    missing: tuple[int, ...]
    moved_bytes: int
    reason: str


def reconfigure(
    profile: ModelProfile,
    nodes: Sequence[Node],
    holdings: Mapping[str, frozenset[int]],
    *,
    microbatches: int,
    fault_tolerance: int,
    device_bytes: int | None,
    previous: Plan | None = None,
) -> Reconfiguration:
    """The plan for these nodes that is at most ``TOLERANCE`` slower than the fastest and moves the fewest bytes.

    A pure function of its arguments, whatever the order of the nodes. Where nothing is held and there is no previous
    plan, it is the plan of ``make_plan``. Called again with its own plan and the layers in place, it changes nothing.

    Bytes are counted per node: what one device of a node holds, its other devices have at no cost. With one device per
    node the bytes are the least that the composition allows (up to the limit of ``assign``). With more, two devices of
    a node that lack the same layer count twice in the choice of places, once in ``moved_bytes``.

    Ties: the previous plan as it is, then the faster candidate. Where bytes are equal a device keeps its stage of its
    pipeline; the next choice is a survivor of a broken pipeline, then a node without a place, and last one of a whole
    pipeline; else by zone and id.

    Args:
        nodes: that may be used.
        holdings: by id of the node, the indices of the layers it holds at the right version. A node that is left out
            holds nothing. One that is not among ``nodes`` is a source only: it is being drained.
        microbatches: in a step; they are dealt anew, since nothing is held for them.
        device_bytes: memory of a device, None if unlimited.
        previous: the plan to stay close to.

    Raises:
        TooFewNodes: the model needs more devices than these nodes have.
        PlanError: as ``make_plan``, or the holdings or the previous plan are of another model.
    """
    smallest, devices = usable_devices(profile, nodes, microbatches, fault_tolerance, device_bytes)
    _check_model(profile, holdings, previous)
    search = TemplateSearch(profile, device_bytes)
    quickest = fastest(search, len(devices), smallest, microbatches, fault_tolerance)
    stock = _Stock(profile, devices, holdings, previous)
    candidates = [quickest]
    if previous is not None:
        least = min(replicas(len(devices), smallest, fault_tolerance, microbatches), len(quickest.templates))
        menu = equal_shares(search, len(devices), smallest, microbatches)
        chosen = _running(profile, previous, microbatches, device_bytes)
        whole = [chosen[p] for p in stock.whole if p in chosen]
        limit = quickest.seconds * (1 + TOLERANCE)
        seen = {_cuts_of(quickest.templates)}
        for kept, able in _kept(menu, list(chosen.values()), whole):
            around = _around(kept, able, len(devices), least, microbatches)
            if around is None or _cuts_of(around) in seen:
                continue
            seen.add(_cuts_of(around))
            found = composed(len(devices), around, distribute(microbatches, around), smallest, fault_tolerance)
            if found.seconds <= limit and found.spares <= quickest.spares:
                candidates.append(found)
    options: list[tuple[int, bool, float, int, Plan]] = []
    for index, found in enumerate(candidates):
        plan = lay_out(nodes, stock.places(found), found, len(profile), microbatches)
        changed = previous is None or [p.stages for p in plan.pipelines] != [p.stages for p in previous.pipelines]
        moved = sum(profile.layers[layer].state_bytes for layer, _ in stock.lacking(plan))
        options.append((moved, changed, plan.seconds, index, plan))
    moved, _, _, index, plan = min(options, key=lambda option: option[:4])
    transfers = tuple(Transfer(layer, node, stock.holders[layer]) for layer, node in stock.lacking(plan))
    missing = tuple(layer for layer, holders in enumerate(stock.holders) if not holders)
    reason = _reason(plan, transfers, missing, moved, nodes, holdings, previous)
    if index and plan.seconds > quickest.seconds:
        slower = 100 * (plan.seconds / quickest.seconds - 1)
        reason += f"; {slower:.1f}% slower than the fastest composition, which moves {format_bytes(options[0][0])}"
    return Reconfiguration(plan, transfers, missing, moved, reason)


def _check_model(profile: ModelProfile, holdings: Mapping[str, frozenset[int]], previous: Plan | None) -> None:
    for node in sorted(holdings):
        if wrong := [layer for layer in holdings[node] if not 0 <= layer < len(profile)]:
            raise PlanError(f"node {node!r} holds layer {min(wrong)}, the model has {len(profile)} layers")
    if previous is not None and previous.layers != len(profile):
        raise PlanError(f"the previous plan is for {previous.layers} layers, the model has {len(profile)}")


def _running(profile: ModelProfile, previous: Plan, microbatches: int, device_bytes: int | None) -> dict[int, Template]:
    """By index, the previous pipelines that a new plan may contain as they are.

    GPipe is left out: whether it fits depends on the number of microbatches, and it runs only where there are fewer of
    them than a pipeline has stages, so that there is hardly a choice.
    """
    made: dict[tuple[tuple[int, int], ...], Template | None] = {}
    found = {}
    for index, pipeline in enumerate(previous.pipelines):
        cuts = tuple((stage.start, stage.stop) for stage in pipeline.stages)
        if cuts not in made:
            size = len(cuts)
            fits = device_bytes is None or all(
                profile.stage_bytes(start, stop, size - i) <= device_bytes for i, (start, stop) in enumerate(cuts)
            )
            made[cuts] = timed(profile, cuts, microbatches) if fits and size <= microbatches else None
        if pipeline.schedule == "1f1b" and (template := made[cuts]) is not None:
            found[index] = template
    return found


def _kept(
    menu: Mapping[int, Template], running: Sequence[Template], whole: Sequence[Template]
) -> Iterator[tuple[list[Template], Mapping[int, Template]]]:
    """What to keep, and the templates to compose the rest from: the new ones, or where a size runs already, its cuts.

    Taking apart the largest pipelines frees devices that they can spare; taking apart the smallest disturbs the fewest.
    """
    common = Counter(template.cuts for template in running)
    settled = dict(menu)
    for template in sorted(running, key=lambda template: common[template.cuts]):
        settled[template.size] = template
    menus = [menu] if _cuts_by_size(settled) == _cuts_by_size(menu) else [settled, menu]
    by_size = sorted(range(len(whole)), key=lambda p: whole[p].size)
    apart = [frozenset[int]()]
    for count in (1, 2):
        apart += [frozenset(by_size[-count:]), frozenset(by_size[:count])]
    apart.append(frozenset(by_size))
    for without in dict.fromkeys(apart):
        for able in menus:
            yield [template for p, template in enumerate(whole) if p not in without], able


def _around(
    kept: Sequence[Template], able: Mapping[int, Template], devices: int, least: int, microbatches: int
) -> tuple[Template, ...] | None:
    """At least ``least`` pipelines: those kept, and the fastest on the rest of the devices; None if there are none.

    The rest is composed for the share of the microbatches that its devices are of all devices.
    """
    rest = devices - sum(template.size for template in kept)
    left = microbatches - sum(template.least for template in kept)
    if left < 0:
        return None
    wanted = max(least - len(kept), 0)
    new: tuple[Template, ...] = ()
    if able:
        smallest = min(able)
        share = min(left, max((2 * microbatches * rest + devices) // (2 * devices), wanted * smallest))
        if min(rest, share) >= smallest:
            new = compose(rest, able, fault_tolerance=max(wanted - 1, 0), microbatches=share).templates
    if len(kept) + len(new) < max(least, 1):
        return None
    return tuple(sorted((*kept, *new), key=lambda template: template.size))


def _cuts_of(chosen: Sequence[Template]) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
    return tuple(sorted((template.schedule, template.cuts) for template in chosen))


def _cuts_by_size(able: Mapping[int, Template]) -> dict[int, tuple[tuple[int, int], ...]]:
    return {size: template.cuts for size, template in able.items()}


class _Stock:
    """What the nodes hold and where they were.

    Args:
        devices: that may be used, by zone, then id.
    """

    def __init__(
        self,
        profile: ModelProfile,
        devices: Sequence[Device],
        holdings: Mapping[str, frozenset[int]],
        previous: Plan | None,
    ) -> None:
        self._profile = profile
        self._holdings = holdings
        self.holders: tuple[tuple[str, ...], ...]
        holders: list[list[str]] = [[] for _ in profile.layers]
        for node in sorted(holdings):
            for layer in holdings[node]:
                holders[layer].append(node)
        self.holders = tuple(tuple(nodes) for nodes in holders)
        live = set(devices)
        self._place: dict[Device, tuple[int, Slot]] = {}  # pipeline and slot of every live device
        self.whole: list[int] = []  # indices of the pipelines all of whose devices are live
        for index, pipeline in enumerate(previous.pipelines if previous is not None else ()):
            cuts = tuple((stage.start, stage.stop) for stage in pipeline.stages)
            at = [(stage.node, stage.device) for stage in pipeline.stages]
            self._place |= {device: (index, (cuts, i)) for i, device in enumerate(at) if device in live}
            if live.issuperset(at):
                self.whole.append(index)
        whole = set(self.whole)
        # Kinds of devices that are alike: what they hold, where they were, and what it costs to keep or move them.
        self._kinds: dict[tuple[frozenset[int], Slot | None, tuple[int, int]], list[Device]] = {}
        for device in devices:
            index, slot = self._place.get(device, (-1, None))
            use = (0, _WHOLE_MOVES) if index in whole else (_BROKEN_STAYS, _BROKEN_MOVES)
            if slot is None:
                use = _UNPLACED, _UNPLACED
            self._kinds.setdefault((holdings.get(device[0], frozenset()), slot, use), []).append(device)
        self._order = {device: i for i, device in enumerate(devices)}

    def lacking(self, plan: Plan) -> list[tuple[int, str]]:
        """``(layer, node)`` for every layer that a node needs in this plan, does not hold, and somebody holds."""
        wanted = {
            (layer, stage.node)
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for layer in range(stage.start, stage.stop)
            if self.holders[layer] and layer not in self._holdings.get(stage.node, ())
        }
        return sorted(wanted)

    def places(self, found: Composition) -> list[Device]:
        """The device of every stage of a composition, pipeline by pipeline."""
        slots: dict[Slot, list[int]] = {}  # pipelines that have it
        for pipeline, template in enumerate(found.templates):
            for stage in range(template.size):
                slots.setdefault((template.cuts, stage), []).append(pipeline)
        flows = assign(
            self._costs(list(slots), sum(template.size for template in found.templates)),
            [len(pipelines) for pipelines in slots.values()],
            [len(devices) for devices in self._kinds.values()],
        )
        flow = dict(zip(slots, flows, strict=True))
        free = list(self._kinds.values())
        placed = self._stay(found, flow, free)
        ordered = [iter(devices) for devices in free]
        heads = [next(devices, None) for devices in ordered]
        for pipeline, template in enumerate(found.templates):
            for stage in range(template.size):
                if (pipeline, stage) in placed:
                    continue
                here = flow[template.cuts, stage]
                kind = min((k for k, n in here.items() if n), key=lambda k: self._order[_some(heads[k])])
                here[kind] -= 1
                placed[pipeline, stage] = _some(heads[kind])
                heads[kind] = next(ordered[kind], None)
        return [device for _, device in sorted(placed.items())]

    def _costs(self, slots: Sequence[Slot], count: int) -> list[list[int]]:
        """Bytes that a device of each kind lacks in each slot; where equal, what its use costs."""
        lacks = []
        for held, _, _ in self._kinds:
            sizes = (0 if i in held else layer.state_bytes for i, layer in enumerate(self._profile.layers))
            lacks.append(list(accumulate(sizes, initial=0)))
        scale = _WHOLE_MOVES * count + 1  # all preferences together weigh less than one byte
        costs = []
        for slot in slots:
            start, stop = slot[0][slot[1]]
            costs.append(
                [
                    (lack[stop] - lack[start]) * scale + use[slot != was]
                    for lack, (_, was, use) in zip(lacks, self._kinds, strict=True)
                ]
            )
        return costs

    def _stay(
        self, found: Composition, flow: Mapping[Slot, dict[int, int]], free: list[list[Device]]
    ) -> dict[tuple[int, int], Device]:
        """Puts devices that keep their slot into the same pipeline as before, as far as that is there.

        Takes them out of ``flow`` and ``free``. What then remains of a slot's kind may go to any pipeline with it.
        """
        stay: dict[int, list[tuple[int, int, Device]]] = {}  # by pipeline of the previous plan: stage, kind, device
        for kind, (_, slot, _) in enumerate(self._kinds):
            if slot is not None and (count := flow.get(slot, {}).get(kind, 0)):
                for device in sorted(free[kind], key=lambda device: self._place[device][0])[:count]:
                    stay.setdefault(self._place[device][0], []).append((slot[1], kind, device))
        fullest = sorted(stay, key=lambda p: (-len(stay[p]), p))
        homes: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for pipeline, template in enumerate(found.templates):
            homes.setdefault(template.cuts, []).append(pipeline)
        chosen: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for old in fullest:
            cuts = self._place[stay[old][0][2]][1][0]
            if len(chosen.setdefault(cuts, [])) < len(homes[cuts]):
                chosen[cuts].append(old)
        placed: dict[tuple[int, int], Device] = {}
        for cuts, old_pipelines in chosen.items():
            for old, pipeline in zip(sorted(old_pipelines), homes[cuts], strict=False):
                for stage, kind, device in stay[old]:
                    placed[pipeline, stage] = device
                    flow[cuts, stage][kind] -= 1
        gone = set(placed.values())
        free[:] = [[device for device in devices if device not in gone] for devices in free]
        return placed


def _some(device: Device | None) -> Device:
    assert device is not None  # an assignment takes no more devices of a kind than there are
    return device


def _reason(
    plan: Plan,
    transfers: Sequence[Transfer],
    missing: Sequence[int],
    moved: int,
    nodes: Sequence[Node],
    holdings: Mapping[str, frozenset[int]],
    previous: Plan | None,
) -> str:
    words = []
    if previous is not None:
        now = {pipeline.stages for pipeline in plan.pipelines}
        kept = sum(pipeline.stages in now for pipeline in previous.pipelines)
        words.append(f"kept {kept} of {_count(len(previous.pipelines), 'pipeline')}")
        before = {stage.node for pipeline in previous.pipelines for stage in pipeline.stages} | set(previous.spares)
        ids = {node.id for node in nodes}
        drained = len((before - ids) & holdings.keys())
        lost = len(before - ids) - drained
        if lost:
            words.append(f"{lost} of {_count(len(before), 'node')} lost")
        if drained:
            words.append(f"{drained} of {_count(len(before), 'node')} drained")
        if joined := len(ids - before):
            words.append(f"{_count(joined, 'node')} joined")
    to = sorted({transfer.node for transfer in transfers})
    ending = "moves nothing"
    if to:
        ending = f"moves {format_bytes(moved)} to {listed(to) if len(to) <= 3 else _count(len(to), 'node')}"
    if missing:
        few = f" ({', '.join(map(str, missing))})" if len(missing) <= 4 else ""
        ending += f", {_count(len(missing), 'layer')}{few} held by nobody"
    return f"{', '.join(words)}; {ending}" if words else ending


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
