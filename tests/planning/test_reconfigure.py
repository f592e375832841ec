"""Reconfiguration against enumeration, its promises for every input, and a story in golden text."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterable, Sequence
from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_reference import model, random_model

from elastic.errors import PlanError
from elastic.planning import (
    TOLERANCE,
    Composition,
    LayerProfile,
    ModelProfile,
    Node,
    Plan,
    Reconfiguration,
    TemplateSearch,
    TooFewNodes,
    Transfer,
    distribute,
    make_plan,
    reconfigure,
    replicas,
    smallest_size,
)
from elastic.planning import assign as assign_module
from elastic.planning.assign import assign
from elastic.planning.make import lay_out
from elastic.planning.templates import timed

GOLDEN = Path(__file__).parent / "golden" / "reconfiguration.txt"
NODES = [Node(f"node-{i}") for i in range(24)]
PIPELINE = model([(1, 2)] * 6)  # 110 bytes a layer with one microbatch in flight
MEMORY = {"microbatches": 8, "fault_tolerance": 1, "device_bytes": 400}  # a copy needs two nodes
Holdings = dict[str, frozenset[int]]


def in_place(plan: Plan) -> Holdings:
    """What the nodes hold once the plan is carried out."""
    held: dict[str, set[int]] = {}
    for place in plan.ranks():
        held.setdefault(place.node, set()).update(range(place.start, place.stop))
    return {node: frozenset(layers) for node, layers in held.items()}


def without(plan: Plan, nodes: Iterable[Node], *lost: str) -> tuple[list[Node], Holdings]:
    """The nodes and what is held when some are lost."""
    held = {node: layers for node, layers in in_place(plan).items() if node not in lost}
    return [node for node in nodes if node.id not in lost], held


def running(profile: ModelProfile, sizes: Sequence[int], microbatches: int, device_bytes: int | None) -> Plan:
    """A plan with pipelines of these sizes, whether or not it would be chosen."""
    search = TemplateSearch(profile, device_bytes)
    made = {size: search.best(size, max(size, microbatches // len(sizes))) for size in set(sizes)}
    chosen = tuple(template for size in sizes if (template := made[size]) is not None)
    assert len(chosen) == len(sizes)
    found = Composition(chosen, distribute(microbatches, chosen), 0, 0.0, "given")
    devices = [(f"n{i:02}", 0) for i in range(sum(sizes))]
    plan = lay_out([Node(node) for node, _ in devices], devices, found, len(profile), microbatches)
    plan.check(profile, device_bytes)
    return plan


def shape(plan: Plan) -> list[list[tuple[str, int, int]]]:
    return [[(stage.node, stage.start, stage.stop) for stage in pipeline.stages] for pipeline in plan.pipelines]


@pytest.mark.parametrize(
    ("sizes", "layers", "device_bytes", "tolerance"),
    [([2, 5, 2], 30, 1800, 2), ([3, 3, 3, 3, 4, 3], 12, 520, 4)],
)
def test_copies_survive_where_borrowing_and_merging_lose_one(
    sizes: list[int], layers: int, device_bytes: int, tolerance: int
) -> None:
    """So many microbatches that fewer, longer pipelines would be within the tolerance, and move less."""
    profile = model([(1, 2)] * layers)
    assert smallest_size(profile, device_bytes) == min(sizes)
    plan = running(profile, sizes, 480, device_bytes)
    nodes = [Node(f"n{i:02}") for i in range(sum(sizes))]
    for lost in combinations([node.id for node in nodes], 2):
        live, held = without(plan, nodes, *lost)
        arguments = {"microbatches": 480, "fault_tolerance": tolerance, "device_bytes": device_bytes}
        found = reconfigure(profile, live, held, previous=plan, **arguments)
        found.plan.check(profile, device_bytes)
        assert len(found.plan.pipelines) >= tolerance + 1
        assert not found.missing


def test_fewer_nodes_than_copies_need_degrade_and_too_few_are_refused() -> None:
    plan = make_plan(PIPELINE, NODES[:4], **MEMORY)
    live, held = without(plan, NODES[:4], "node-1")
    found = reconfigure(PIPELINE, live, held, previous=plan, **MEMORY)
    assert len(found.plan.pipelines) == 1
    assert "1 of the 2 copies that fault tolerance 1 asks for" in found.plan.reason
    live, held = without(plan, NODES[:4], "node-0", "node-1", "node-2")
    with pytest.raises(TooFewNodes) as few:
        reconfigure(PIPELINE, live, held, previous=plan, **MEMORY)
    assert (few.value.needed, few.value.present) == (2, 1)


def test_holdings_and_plans_of_another_model_are_refused() -> None:
    with pytest.raises(PlanError, match="node 'x' holds layer 6, the model has 6 layers"):
        reconfigure(PIPELINE, NODES[:4], {"x": frozenset({2, 6})}, **MEMORY)
    other = make_plan(model([(1, 2)] * 5), NODES[:4], **MEMORY)
    with pytest.raises(PlanError, match="the previous plan is for 5 layers, the model has 6"):
        reconfigure(PIPELINE, NODES[:4], {}, previous=other, **MEMORY)


def test_losing_a_node_of_pure_data_parallel_moves_nothing() -> None:
    arguments = MEMORY | {"device_bytes": None}
    for count in range(2, 8):
        plan = make_plan(PIPELINE, NODES[:count], **arguments)
        assert {len(pipeline.stages) for pipeline in plan.pipelines} == {1}
        for node in NODES[:count]:
            live, held = without(plan, NODES[:count], node.id)
            found = reconfigure(PIPELINE, live, held, previous=plan, **arguments)
            assert (found.moved_bytes, found.transfers, found.missing) == (0, (), ())
            assert found.reason == f"kept {count - 1} of {count} pipelines, 1 of {count} nodes lost; moves nothing"


def test_a_failure_leaves_other_pipelines_alone() -> None:
    """12 nodes, pipelines of 2 and 3; whole ones keep nodes, stages and layers unless a node must be borrowed."""
    plan = running(PIPELINE, [2, 2, 2, 3, 3], 24, 400)
    nodes = [Node(f"n{i:02}") for i in range(12)]
    for node in nodes:
        live, held = without(plan, nodes, node.id)
        found = reconfigure(PIPELINE, live, held, microbatches=24, fault_tolerance=1, device_bytes=400, previous=plan)
        before = shape(plan)
        same = [pipeline for pipeline in shape(found.plan) if pipeline in before]
        assert len(same) >= 3, (node, found.reason)
        assert found.reason.startswith(f"kept {len(same)} of 5 pipelines, 1 of 12 nodes lost; moves ")


def test_every_node_that_the_fastest_plan_uses_is_used_however_little_it_adds() -> None:
    arguments = {"microbatches": 800, "fault_tolerance": 1, "device_bytes": None}
    nodes = [Node(f"n{i:03}") for i in range(101)]
    plan = make_plan(PIPELINE, nodes[:100], **arguments)
    found = reconfigure(PIPELINE, nodes, in_place(plan), previous=plan, **arguments)
    assert not found.plan.spares
    assert found.reason == "kept 100 of 100 pipelines, 1 node joined; moves 600B to n100"
    assert found.transfers == tuple(Transfer(i, "n100", tuple(n.id for n in nodes[:100])) for i in range(6))


def test_a_remainder_too_small_for_a_pipeline_is_used() -> None:
    """One more node makes 40 nodes little faster, but it would never be used if it were left idle for that."""
    plan = running(PIPELINE, [2] * 20, 400, 400)
    nodes = [Node(f"n{i:02}") for i in range(41)]
    arguments = {"microbatches": 400, "fault_tolerance": 1, "device_bytes": 400}
    found = reconfigure(PIPELINE, nodes, in_place(plan), previous=plan, **arguments)
    assert not found.plan.spares
    assert found.reason == "kept 19 of 20 pipelines, 1 node joined; moves 200B to n40"
    assert found.plan.seconds > (1 - TOLERANCE) * make_plan(PIPELINE, nodes[:40], **arguments).seconds


SEVEN = model([(1, 2)] * 7)  # with 400 bytes a device, a copy needs three, of which one has three layers


def _seven() -> tuple[Plan, dict[str, int]]:
    """Two pipelines whose longest stage is the second, though the first would be 4 % faster."""
    arguments = {"microbatches": 16, "fault_tolerance": 1, "device_bytes": 400}
    slower = timed(SEVEN, ((0, 2), (2, 5), (5, 7)), 8)
    found = Composition((slower, slower), (8, 8), 0, slower.time(8), "given")
    plan = lay_out(NODES[:6], [(node.id, 0) for node in NODES[:6]], found, 7, 16)
    fastest = make_plan(SEVEN, NODES[:6], **arguments)
    assert shape(fastest)[0] == [("node-0", 0, 3), ("node-1", 3, 5), ("node-2", 5, 7)]
    assert fastest.seconds < plan.seconds < fastest.seconds * (1 + TOLERANCE)
    return plan, arguments


def test_cuts_that_run_are_used_again_for_a_pipeline_that_is_mended() -> None:
    plan, arguments = _seven()
    live, held = without(plan, NODES[:7], "node-4")
    found = reconfigure(SEVEN, live, held, previous=plan, **arguments)
    assert shape(found.plan)[0] == shape(plan)[0]
    assert shape(found.plan)[1] == [("node-3", 0, 2), ("node-6", 2, 5), ("node-5", 5, 7)]
    assert found.reason == (
        "kept 1 of 2 pipelines, 1 of 6 nodes lost, 1 node joined; moves 300B to node-6; "
        "3.8% slower than the fastest composition, which moves 400B"
    )


def test_what_runs_stays_also_where_a_change_would_move_nothing() -> None:
    plan, arguments = _seven()
    everything = {node.id: frozenset(range(7)) for node in NODES[:6]}
    found = reconfigure(SEVEN, NODES[:6], everything, previous=plan, **arguments)
    assert found.plan.pipelines == plan.pipelines
    assert reconfigure(SEVEN, NODES[:6], everything, **arguments).plan == make_plan(SEVEN, NODES[:6], **arguments)


def test_a_survivor_of_a_broken_pipeline_is_left_over_before_a_member_of_a_whole_one() -> None:
    plan = running(PIPELINE, [2, 2, 2], 6, 400)
    live, held = without(plan, [Node(f"n{i:02}") for i in range(6)], "n00")
    found = reconfigure(PIPELINE, live, held, previous=plan, **(MEMORY | {"microbatches": 4}))
    assert shape(found.plan) == shape(plan)[1:]
    assert found.plan.spares == ("n01",)


def test_a_slightly_slower_plan_is_taken_where_it_moves_less() -> None:
    rng = random.Random(1000)
    profile = model([(1 + rng.random() / 3, 2 + rng.random() / 3) for _ in range(24)])
    arguments = {"microbatches": 400, "fault_tolerance": 2, "device_bytes": 1300}
    nodes = [Node(f"n{i:03}") for i in range(100)]
    traded = 0
    plan = make_plan(profile, nodes, **arguments)
    for node in nodes[:20]:
        live, held = without(plan, nodes, node.id)
        found = reconfigure(profile, live, held, previous=plan, **arguments)
        fastest = make_plan(profile, live, **arguments)
        assert found.plan.seconds <= fastest.seconds * (1 + TOLERANCE)
        if "slower than the fastest composition, which moves" in found.reason:
            traded += 1
            assert found.moved_bytes < reconfigure(profile, live, held, **arguments).moved_bytes
    assert traded


def test_a_draining_node_hands_its_layers_over() -> None:
    """Two nodes hold one copy; one of them leaves, and a new one takes over what only it held."""
    plan = make_plan(PIPELINE, NODES[:2], **MEMORY)
    held = in_place(plan)
    found = reconfigure(PIPELINE, [NODES[1], NODES[5]], held, previous=plan, **MEMORY)
    assert shape(found.plan) == [[("node-5", 0, 3), ("node-1", 3, 6)]]
    assert found.transfers == tuple(Transfer(layer, "node-5", ("node-0",)) for layer in (0, 1, 2))
    assert found.missing == ()
    assert found.reason == "kept 0 of 1 pipeline, 1 of 2 nodes drained, 1 node joined; moves 300B to node-5"
    del held["node-0"]  # dead instead of draining
    found = reconfigure(PIPELINE, [NODES[1], NODES[5]], held, previous=plan, **MEMORY)
    assert (found.transfers, found.missing, found.moved_bytes) == ((), (0, 1, 2), 0)
    assert found.reason == (
        "kept 0 of 1 pipeline, 1 of 2 nodes lost, 1 node joined; moves nothing, 3 layers (0, 1, 2) held by nobody"
    )


def test_all_holders_are_sources() -> None:
    plan = make_plan(PIPELINE, NODES[:6], **MEMORY)
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [2, 2, 2]
    live, held = without(plan, NODES[:7], "node-4")
    found = reconfigure(PIPELINE, live, held, previous=plan, **MEMORY)
    assert found.transfers == tuple(Transfer(layer, "node-6", ("node-0", "node-2")) for layer in (0, 1, 2))
    assert found.reason == "kept 2 of 3 pipelines, 1 of 6 nodes lost, 1 node joined; moves 300B to node-6"


def test_devices_of_a_node_share_what_it_holds() -> None:
    nodes = [Node("a", 2), Node("b", 2)]
    plan = make_plan(PIPELINE, nodes, **MEMORY)
    assert shape(plan) == [[("a", 0, 3), ("a", 3, 6)], [("b", 0, 3), ("b", 3, 6)]]
    found = reconfigure(PIPELINE, nodes, {"a": frozenset(range(6))}, previous=plan, **MEMORY)
    assert found.plan == plan
    assert found.transfers == tuple(Transfer(layer, "b", ("a",)) for layer in range(6))


def needs(plan: Plan) -> set[tuple[int, str]]:
    return {(layer, node) for node, layers in in_place(plan).items() for layer in layers}


def judge(profile: ModelProfile, found: Reconfiguration, holdings: Holdings, device_bytes: int | None) -> None:
    """All that a reconfiguration promises without regard to how it was chosen."""
    found.plan.check(profile, device_bytes)
    held = {(layer, node) for node, layers in holdings.items() for layer in layers}
    nobody = set(range(len(profile))) - {layer for layer, _ in held}
    assert set(found.missing) == nobody
    assert list(found.missing) == sorted(nobody)
    moves = [(transfer.layer, transfer.node) for transfer in found.transfers]
    assert moves == sorted(set(moves))
    assert set(moves) == {(layer, node) for layer, node in needs(found.plan) - held if layer not in nobody}
    for transfer in found.transfers:
        assert transfer.sources == tuple(sorted(node for layer, node in held if layer == transfer.layer))
        assert transfer.node not in transfer.sources
    assert found.moved_bytes == sum(profile.layers[layer].state_bytes for layer, _ in moves)


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    devices=st.lists(st.integers(1, 2), min_size=1, max_size=9),
    microbatches=st.integers(1, 20),
    fault_tolerance=st.integers(0, 3),
    device_bytes=st.none() | st.integers(5, 120),
)
def test_promises_for_every_input(
    seed: int, devices: list[int], microbatches: int, fault_tolerance: int, device_bytes: int | None
) -> None:
    rng = random.Random(seed)
    profile = random_model(rng, 7)
    everyone = [Node(f"n{i}", count, f"zone-{i % 2}") for i, count in enumerate(devices)]
    arguments = {"microbatches": microbatches, "fault_tolerance": fault_tolerance, "device_bytes": device_bytes}
    nodes = [node for node in everyone if rng.random() < 0.8] or everyone[:1]
    try:
        fastest = make_plan(profile, nodes, **arguments)
    except PlanError as refused:
        with pytest.raises(type(refused), match=re.escape(refused.message)):
            reconfigure(profile, nodes, {}, **arguments)
        return
    first = reconfigure(profile, nodes, {}, **arguments)
    assert first.plan == fastest
    assert first.missing == tuple(range(len(profile)))
    try:
        previous = make_plan(profile, [n for n in everyone if rng.random() < 0.8], **arguments)
    except PlanError:
        previous = fastest
    held = in_place(previous) if rng.random() < 0.7 else {}
    for node in rng.sample(everyone, rng.randint(0, len(everyone))):  # lost, torn, or left over from before
        held[node.id] = frozenset(layer for layer in range(len(profile)) if rng.random() < 0.4)
    found = reconfigure(profile, nodes, held, previous=previous, **arguments)
    judge(profile, found, held, device_bytes)
    rng.shuffle(nodes)
    turned = dict(sorted(held.items(), reverse=True))
    assert reconfigure(profile, nodes, turned, previous=previous, **arguments) == found
    total, smallest = sum(node.devices for node in nodes), smallest_size(profile, device_bytes)
    if microbatches >= (fault_tolerance + 1) * smallest:
        assert len(found.plan.pipelines) >= replicas(total, smallest, fault_tolerance, microbatches)
    assert len(found.plan.pipelines) >= min(len(fastest.pipelines), fault_tolerance + 1)
    assert found.plan.seconds <= fastest.seconds * (1 + TOLERANCE)
    assert len(found.plan.ranks()) >= len(fastest.ranks())
    again = reconfigure(profile, nodes, in_place(found.plan), previous=found.plan, **arguments)
    assert (again.plan, again.transfers, again.missing) == (found.plan, (), ())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_a_long_life_stays_close_to_the_fastest(seed: int) -> None:
    """Nodes come and go; slowness within the tolerance does not add up, and nothing changes without a cause."""
    rng = random.Random(seed)
    profile = random_model(rng, 8)
    arguments = {"microbatches": rng.randint(8, 40), "fault_tolerance": 1, "device_bytes": rng.choice([None, 40, 80])}
    live = NODES[: rng.randint(2, 9)]
    plan: Plan | None = None
    held: Holdings = {}
    for _ in range(8):
        try:
            found = reconfigure(profile, live, held, previous=plan, **arguments)
        except PlanError:
            return
        judge(profile, found, held, arguments["device_bytes"])
        fastest = make_plan(profile, live, **arguments)
        assert found.plan.seconds <= fastest.seconds * (1 + TOLERANCE)
        plan, held = found.plan, in_place(found.plan)
        assert reconfigure(profile, live, held, previous=plan, **arguments).plan == plan
        gone = rng.sample([node.id for node in live], min(rng.randint(0, 2), len(live) - 1))
        held = {node: layers for node, layers in held.items() if node not in gone}
        joined = [node for node in NODES if node not in live][: rng.randint(0, 2)]
        live = [node for node in live if node.id not in gone] + joined


@pytest.mark.parametrize("seed", range(3))
def test_no_assignment_moves_fewer_bytes(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    tried = 0
    while tried < 60:
        profile = random_model(rng, 6)
        nodes = NODES[: rng.randint(1, 6)]
        arguments = {
            "microbatches": rng.randint(1, 12),
            "fault_tolerance": rng.randint(0, 2),
            "device_bytes": rng.choice([None, 20, 30, 50]),
        }
        chance = rng.random()
        held = {
            node.id: frozenset(layer for layer in range(len(profile)) if rng.random() < chance) for node in NODES[:7]
        }
        try:
            previous = make_plan(profile, NODES[1:7], **arguments) if rng.random() < 0.5 else None
            found = reconfigure(profile, nodes, held, previous=previous, **arguments)
        except PlanError:
            continue
        tried += 1
        held_by_any = frozenset[int]().union(*held.values())
        slots = [range(place.start, place.stop) for place in found.plan.ranks()]
        least = min(
            sum(
                profile.layers[layer].state_bytes
                for node, slot in zip(order, slots, strict=True)
                for layer in slot
                if layer in held_by_any and layer not in held[node.id]
            )
            for order in permutations(nodes, len(slots))
        )
        assert found.moved_bytes == least


def total(costs: Sequence[Sequence[int]], flows: Sequence[dict[int, int]]) -> int:
    return sum(costs[s][t] * n for s, flow in enumerate(flows) for t, n in flow.items())


@pytest.mark.parametrize("seed", range(3))
def test_assignment_of_kinds_is_the_cheapest_of_all(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(120):
        slots = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        takers = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
        if not sum(slots) <= sum(takers) <= 7:
            continue
        costs = [[rng.randint(0, rng.choice([1, 9])) for _ in takers] for _ in slots]
        each_slot = [s for s, n in enumerate(slots) for _ in range(n)]
        each_taker = [t for t, n in enumerate(takers) for _ in range(n)]
        least = min(
            sum(costs[s][t] for s, t in zip(each_slot, order, strict=True))
            for order in permutations(each_taker, len(each_slot))
        )
        for work in (assign_module._WORK, 0):
            flows = assign(costs, slots, takers, work)
            assert [sum(flow.values()) for flow in flows] == slots
            assert all(n > 0 for flow in flows for n in flow.values())
            assert all(sum(flow.get(t, 0) for flow in flows) <= n for t, n in enumerate(takers))
            assert total(costs, flows) == least if work else total(costs, flows) >= least


def test_assignment_of_64_different_nodes_is_exact_and_of_a_thousand_still_quick() -> None:
    rng = random.Random(5)
    for most in (1, 3, 100, 10**6):
        costs = [[rng.randint(0, most) for _ in range(64)] for _ in range(64)]
        flows = assign(costs, [1] * 64, [1] * 64)
        assert total(costs, flows) == total(costs, assign(costs, [1] * 64, [1] * 64, 10**9))
    costs = [[rng.randint(0, 10**6) for _ in range(1000)] for _ in range(24)]
    begin = time.perf_counter()
    flows = assign(costs, [40] * 24, [1] * 1000)
    print(f"960 slots of 24 kinds, 1000 different takers: {time.perf_counter() - begin:.3f} s")
    assert [sum(flow.values()) for flow in flows] == [40] * 24


def test_a_split_that_runs_is_timed_like_a_new_one() -> None:
    rng = random.Random(2)
    for _ in range(200):
        profile = random_model(rng, 8)
        size = rng.randint(1, len(profile))
        made = TemplateSearch(profile, None).best(size, rng.randint(size, 20))
        assert made is not None
        assert timed(profile, made.cuts, made.microbatches) == made


@pytest.mark.parametrize("count", [1000, 10_000])
@pytest.mark.parametrize("device_bytes", [None, 700, 1300])
def test_thousands_of_nodes(count: int, device_bytes: int | None) -> None:
    rng = random.Random(count)
    profile = model([(1 + rng.random() / 3, 2 + rng.random() / 3) for _ in range(24)])
    arguments = {"microbatches": 4 * count, "fault_tolerance": 2, "device_bytes": device_bytes}
    nodes = [Node(f"n{i:05}", zone=f"zone-{i % 3}") for i in range(count)]
    plan = make_plan(profile, nodes, **arguments)
    lost = [node.id for node in rng.sample(nodes, count // 50)]
    live, held = without(plan, nodes, *lost)
    torn = held | {node.id: frozenset(rng.sample(range(24), 12)) for node in rng.sample(live, count // 10)}
    for what, members, holdings in (("lost", live, held), ("joined", nodes, held), ("torn", live, torn)):
        begin = time.perf_counter()
        found = reconfigure(profile, members, holdings, previous=plan, **arguments)
        print(f"{count} nodes, {device_bytes} bytes, {what}: {time.perf_counter() - begin:.3f} s: {found.reason}")
        found.plan.check(profile, device_bytes)
        assert not found.missing


def _shipped() -> ModelProfile:
    """A byte GPT of 6 blocks, as large as one that ships: two devices of 88 MiB hold it."""
    block = (0.0063, 0.0126, 7_019_712, 10_330_112, 294_912)
    return ModelProfile(
        (
            LayerProfile("embed", 0.0001, 0.0002, 1_548_288, 593_920, 294_912),
            *(LayerProfile(f"block.{i}", *block) for i in range(6)),
            LayerProfile("head", 0.0008, 0.0016, 1_040_256, 1_118_208, 524_288),
        )
    )


def _draw(title: str, found: Reconfiguration) -> str:
    lines = [f"{title}: {found.reason}", f"  {found.plan.reason}; {1000 * found.plan.seconds:.0f} ms"]
    for pipeline in found.plan.pipelines:
        stages = "  ".join(f"{stage.node}[{stage.start}:{stage.stop}]" for stage in pipeline.stages)
        lines.append(f"  {pipeline.microbatches[0]}..{pipeline.microbatches[-1]}  {stages}")
    lines += [f"  spare {node}" for node in found.plan.spares]
    lines += [f"  layer {move.layer} to {move.node} from {', '.join(move.sources)}" for move in found.transfers]
    return "\n".join(lines) + "\n"


def _story() -> str:
    profile, arguments = _shipped(), {"microbatches": 8, "fault_tolerance": 1, "device_bytes": 88 << 20}
    first = reconfigure(profile, NODES[:5], {}, **arguments)
    text = [_draw("5 nodes start", first)]
    for node in NODES[:5]:
        live, held = without(first.plan, NODES[:5], node.id)
        fewer = reconfigure(profile, live, held, previous=first.plan, **arguments)
        text.append(_draw(f"{node.id} is lost", fewer))
        back = reconfigure(profile, NODES[:5], in_place(fewer.plan), previous=fewer.plan, **arguments)
        text.append(_draw(f"{node.id} is back", back))
    now = first
    for count in (4, 2, 7):
        # those that are to go are drained: they still hand over what they hold
        now = reconfigure(profile, NODES[:count], in_place(now.plan), previous=now.plan, **arguments)
        text.append(_draw(f"set to {count}", now))
    return "\n".join(text)


def test_golden_story() -> None:
    """Review a change as a diff: ``GOLDEN=write python -m pytest tests/planning`` rewrites the file."""
    text = _story()
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
