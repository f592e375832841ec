"""Plans: invariants for every input, each invariant broken on purpose, JSON, groups, and golden texts."""

from __future__ import annotations

import ast
import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_reference import model, random_model

import elastic.planning
from elastic.errors import PlanError, from_json
from elastic.planning import (
    Bucket,
    ModelProfile,
    Node,
    Pipeline,
    Plan,
    PlanInvariant,
    Stage,
    TooFewNodes,
    groups,
    make_plan,
    smallest_size,
)

GOLDEN = Path(__file__).parent / "golden"
NODES = [Node(f"node-{i}") for i in range(8)]
PIPELINE = model([(1, 2)] * 6)  # 110 bytes a layer with one microbatch in flight


def _plan(nodes: int, **changes: int) -> Plan:
    arguments = {"microbatches": 8, "fault_tolerance": 1, "device_bytes": 400} | changes
    return make_plan(PIPELINE, NODES[:nodes], **arguments)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    devices=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    microbatches=st.integers(1, 20),
    fault_tolerance=st.integers(0, 4),
    device_bytes=st.none() | st.integers(5, 120),
)
def test_every_plan_passes_its_check(
    seed: int, devices: list[int], microbatches: int, fault_tolerance: int, device_bytes: int | None
) -> None:
    profile = random_model(random.Random(seed), 7)
    nodes = [Node(f"n{i}", count, f"zone-{i % 2}") for i, count in enumerate(devices)]
    arguments = {"microbatches": microbatches, "fault_tolerance": fault_tolerance, "device_bytes": device_bytes}
    try:
        smallest = smallest_size(profile, device_bytes)
    except PlanError as refused:
        with pytest.raises(PlanError, match=re.escape(refused.message)):
            make_plan(profile, nodes, **arguments)
        return
    if sum(devices) < smallest:
        with pytest.raises(TooFewNodes) as few:
            make_plan(profile, nodes, **arguments)
        assert (few.value.needed, few.value.present) == (smallest, sum(devices))
        return
    try:
        plan = make_plan(profile, nodes, **arguments)
    except PlanError:
        assert microbatches < smallest, "there is always a plan with a microbatch per stage"
        return
    plan.check(profile, device_bytes)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert make_plan(profile, nodes[::-1], **arguments) == plan
    copies = (fault_tolerance + 1) * smallest
    if min(sum(devices), microbatches) >= copies:
        assert len(plan.pipelines) >= fault_tolerance + 1
    _check_groups(plan, profile, seed)


def _check_groups(plan: Plan, profile: ModelProfile, seed: int) -> None:
    rng = random.Random(seed)
    units = [(layer,) for layer in range(len(profile))]
    if len(units) > 1:
        units.append((0, rng.randrange(1, len(profile))))
    buckets = groups(plan, units)
    assert sorted(unit for bucket in buckets for unit in bucket.units) == list(range(len(units)))
    assert len({bucket.ranks for bucket in buckets}) == len(buckets) <= len(units)
    assert [bucket.units[0] for bucket in buckets] == sorted(bucket.units[0] for bucket in buckets)
    for bucket in buckets:
        for unit in bucket.units:
            assert bucket.ranks == tuple(sorted({rank for layer in units[unit] for rank in plan.owners(layer)}))


def test_ranks_count_pipeline_by_pipeline() -> None:
    plan = _plan(5)
    places = plan.ranks()
    assert [(p.rank, p.pipeline, p.stage) for p in places] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 1, 2)]
    assert [place.node for place in places] == [f"node-{i}" for i in range(5)]
    assert [plan.owners(layer) for layer in range(6)] == [(0, 2), (0, 2), (0, 3), (1, 3), (1, 4), (1, 4)]


def test_units_with_equal_owners_share_a_bucket_also_when_apart() -> None:
    plan = _plan(5)
    tied = [(0, 5), (1,), (2,), (3,), (4,), (0, 4)]  # first and last share a weight, so do first and fifth
    assert groups(plan, tied) == (
        Bucket((0, 1, 2, 4), (0, 5)),
        Bucket((0, 2), (1,)),
        Bucket((0, 3), (2,)),
        Bucket((1, 3), (3,)),
        Bucket((1, 4), (4,)),
    )


def test_stages_are_laid_node_by_node_and_a_partly_used_node_is_no_spare() -> None:
    nodes = [Node("b", 2), Node("a", 3), Node("c", 1), Node("d", 1)]
    plan = make_plan(PIPELINE, nodes, microbatches=4, fault_tolerance=0, device_bytes=400)
    plan.check(PIPELINE, 400)
    used = [(place.node, place.device) for place in plan.ranks()]
    assert used == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert plan.spares == ("c", "d")
    assert plan.reason.startswith("4 nodes with 7 devices: ")


def test_pipelines_keep_to_a_zone() -> None:
    nodes = [Node("a", zone="west"), Node("b", zone="east"), Node("c", zone="west"), Node("d", zone="east")]
    plan = make_plan(PIPELINE, nodes, microbatches=8, fault_tolerance=1, device_bytes=400)
    assert [[stage.node for stage in pipeline.stages] for pipeline in plan.pipelines] == [["b", "d"], ["a", "c"]]


def test_too_few_nodes_says_how_many_are_missing() -> None:
    with pytest.raises(TooFewNodes, match="the model needs 2 devices of 400B, 1 present") as raised:
        _plan(1)
    assert (raised.value.needed, raised.value.present, raised.value.code) == (2, 1, "too_few_nodes")
    again = from_json(raised.value.as_json())
    assert isinstance(again, TooFewNodes)
    assert again.as_json() == raised.value.as_json()


def test_arguments_that_make_no_sense_are_refused() -> None:
    for changes in ({"microbatches": 0}, {"fault_tolerance": -1}):
        with pytest.raises(PlanError, match="no plan for"):
            _plan(3, **changes)
    with pytest.raises(PlanError, match="same id"):
        make_plan(PIPELINE, [Node("a"), Node("a")], microbatches=4, fault_tolerance=0, device_bytes=None)


def test_too_few_microbatches_for_any_schedule_that_fits_are_refused() -> None:
    profile = model([(1, 2)] * 4, state=10, activations=30)
    with pytest.raises(PlanError, match="3 devices hold the model only with a microbatch per stage: 3, not 2"):
        make_plan(profile, NODES[:3], microbatches=2, fault_tolerance=0, device_bytes=100)
    make_plan(profile, NODES[:4], microbatches=2, fault_tolerance=0, device_bytes=100).check(profile, 100)


def _stage(pipeline: Pipeline, index: int, **changes: object) -> Pipeline:
    stages = list(pipeline.stages)
    stages[index] = replace(stages[index], **changes)  # type: ignore[arg-type]
    return replace(pipeline, stages=tuple(stages))


GOOD = _plan(5)
A, B = GOOD.pipelines  # stages (0-3, 3-6) and (0-2, 2-4, 4-6); microbatches 0-2 and 3-7
LONG = (Stage("node-2", 0, 0, 6),)

BROKEN = {
    "the plan has no pipeline": replace(GOOD, pipelines=()),
    "the plan is for 7 layers, the model has 6": replace(GOOD, layers=7),
    "pipeline 0: stage 0 has no layer": replace(GOOD, pipelines=(_stage(A, 0, stop=0), B)),
    "pipeline 0: layer 3 is owned by no stage": replace(GOOD, pipelines=(_stage(A, 1, start=4), B)),
    "pipeline 0: layer 2 is owned twice": replace(GOOD, pipelines=(_stage(A, 1, start=2), B)),
    "pipeline 1: layer 5 is owned by no stage": replace(GOOD, pipelines=(A, _stage(B, 2, stop=5))),
    "pipeline 1: layer 6 does not exist": replace(GOOD, pipelines=(A, _stage(B, 2, stop=7))),
    "pipeline 1: layer 0 is owned by no stage": replace(GOOD, pipelines=(A, replace(B, stages=()))),
    "pipeline 0: unknown schedule 'zb'": replace(GOOD, pipelines=(replace(A, schedule="zb"), B)),  # type: ignore[arg-type]
    "pipeline 0: has no microbatch": replace(GOOD, pipelines=(replace(A, microbatches=()), B)),
    "pipeline 1: 1f1b with 2 microbatches on 3 stages": replace(GOOD, pipelines=(A, replace(B, microbatches=(3, 4)))),
    "pipeline 1: stage 0 needs 660B with 1 microbatches in flight, a device has 400B": replace(
        GOOD, pipelines=(A, replace(B, stages=LONG))
    ),
    "pipeline 1: stage 1 needs 600B with 10 microbatches in flight, a device has 400B": replace(
        GOOD,
        pipelines=(
            replace(A, microbatches=(0, 1)),
            replace(
                B,
                stages=(Stage("x", 0, 0, 1), Stage("x", 1, 1, 4), Stage("x", 2, 4, 6)),
                microbatches=tuple(range(2, 12)),
                schedule="gpipe",
            ),
        ),
        microbatches=12,
    ),
    "microbatch 8 does not exist, there are 8": replace(GOOD, pipelines=(replace(A, microbatches=(0, 1, 2, 8)), B)),
    "microbatch 3 is assigned 2 times": replace(GOOD, pipelines=(replace(A, microbatches=(0, 1, 2, 3)), B)),
    "microbatch 2 is assigned to no pipeline": replace(GOOD, pipelines=(replace(A, microbatches=(0, 1)), B)),
    "device 0 of node 'node-2' is used 2 times": replace(GOOD, pipelines=(_stage(A, 0, node="node-2"), B)),
    "a spare is listed twice": replace(GOOD, spares=("node-7", "node-7")),
    "node 'node-1' is a spare and is used": replace(GOOD, spares=("node-1", "node-7")),
}


def test_a_good_plan_passes() -> None:
    GOOD.check(PIPELINE, 400)
    replace(GOOD, spares=("node-7",)).check(PIPELINE, None)


@pytest.mark.parametrize("message", BROKEN)
def test_every_broken_invariant_is_named(message: str) -> None:
    with pytest.raises(PlanInvariant) as raised:
        BROKEN[message].check(PIPELINE, 400)
    assert raised.value.message == message
    assert isinstance(raised.value, PlanError)


def test_planning_is_pure() -> None:
    """Nothing but the standard library's data and arithmetic, and the error tree."""
    allowed = {
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "functools",
        "heapq",
        "itertools",
        "math",
        "typing",
    }
    for file in Path(elastic.planning.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                own = name == "elastic.errors" or name.startswith("elastic.planning.")
                assert own or name.split(".")[0] in allowed, f"{file.name} imports {name}"


def _draw(plan: Plan) -> str:
    """One line per pipeline: its nodes with their layers, schedule and microbatches."""
    lines = [plan.reason, f"{plan.seconds:g} s"]
    for pipeline in plan.pipelines:
        stages = "  ".join(f"{s.node}/{s.device}[{s.start}:{s.stop}]" for s in pipeline.stages)
        lines.append(f"{pipeline.schedule}  {pipeline.microbatches[0]}..{pipeline.microbatches[-1]}  {stages}")
    lines += [f"spare {node}" for node in plan.spares]
    lines += [f"bucket {b.units} ranks {b.ranks}" for b in groups(plan, [(i,) for i in range(plan.layers)])]
    return "\n".join(lines) + "\n"


def _golden_plans() -> dict[str, str]:
    heavy_ends = model([(4, 8), *[(1, 2)] * 8, (2, 5)], state=100, activations=20)
    nodes = [Node(f"node-{i}") for i in range(12)]
    memory = {"microbatches": 8, "fault_tolerance": 1, "device_bytes": 400}
    return {
        "data-parallel": _draw(make_plan(PIPELINE, nodes[:4], microbatches=8, fault_tolerance=1, device_bytes=None)),
        "two-per-copy": "\n".join(_draw(make_plan(PIPELINE, nodes[:n], **memory)) for n in range(2, 10)),
        "uneven-layers": "\n".join(
            _draw(make_plan(heavy_ends, nodes[:n], microbatches=24, fault_tolerance=1, device_bytes=600))
            for n in (3, 6, 7, 11)
        ),
        "few-microbatches": "\n".join(
            _draw(make_plan(PIPELINE, nodes[:6], microbatches=m, fault_tolerance=1, device_bytes=300))
            for m in (1, 2, 5, 6)
        ),
    }


@pytest.mark.parametrize("name", ["data-parallel", "two-per-copy", "uneven-layers", "few-microbatches"])
def test_golden_plans(name: str) -> None:
    """Review a change as a diff: ``GOLDEN=write python -m pytest tests/planning`` rewrites the files."""
    text, file = _golden_plans()[name], GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
