"""Scenarios and oracles: what is due when, who is hit, and what each verdict is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml

from elastic.errors import ConfigError
from failure_injection.oracles import Evidence, judge
from failure_injection.runner import load_scenario
from failure_injection.scenario import Checks, Fault, Schedule, scenario_from, victims

CHAOS = Path(__file__).parents[2] / "configs" / "chaos"


def fault(**changes):
    return Fault.model_validate({"at": {"step": 5}, "do": "kill", "to": "worker", **changes})


def test_all_scenarios_that_ship_are_ones_and_their_jobs_are_there():
    found = [load_scenario(path) for path in CHAOS.glob("*.yaml")]
    assert len(found) >= 3
    assert all((CHAOS / one.config).is_file() and one.about for one in found)
    assert {path.stem for path in CHAOS.glob("*.yaml")} == {one.name for one in found}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"faults": []}, "faults"),
        ({"faults": [{"at": {}, "do": "kill", "to": "node"}]}, "give one of step, event, after_s"),
        ({"faults": [{"at": {"step": 1, "after_s": 2}, "do": "kill", "to": "node"}]}, "give one of step"),
        ({"faults": [{"at": {"step": 1}, "do": "melt", "to": "node"}]}, "do"),
        ({"faults": [{"at": {"step": 1}, "do": "kill", "to": "node", "pick": "rank x"}]}, "must be random"),
        ({"cheks": {}}, "cheks"),
    ],
)
def test_a_mistake_is_named(change, said):
    mapping = yaml.safe_load((CHAOS / "single-node.yaml").read_text()) | change
    with pytest.raises(ConfigError, match=said) as caught:
        scenario_from(mapping, "my.yaml")
    assert str(caught.value).startswith("my.yaml: ")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "no.yaml")


def test_faults_are_due_by_step_event_and_time_and_again():
    schedule = Schedule(
        [fault(times=2, every_steps=10), fault(at={"event": "plan", "nth": 2}), fault(at={"after_s": 3})]
    )
    assert schedule.advance(step=4) == []
    assert [due.number for due in schedule.advance(step=6)] == [0]
    assert schedule.advance(event="plan") == []
    assert [due.number for due in schedule.advance(event="plan")] == [1]
    assert schedule.advance(step=15) == []
    assert [(due.number, due.nth) for due in schedule.advance(step=16)] == [(0, 2)]
    assert len(schedule.left) == 1
    assert [due.number for due in schedule.advance(seconds=3.5)] == [2]
    assert schedule.left == []


def test_who_is_hit():
    nodes = [
        {"id": f"node-{i}", "workers": [{"rank": i, "layers": [i % 2]}] if i < 4 else [], "agent_pid": i}
        for i in range(5)
    ]
    layers = ["embed", "head"]

    def hit(pick, seed=0):
        return [node["id"] for node in victims(pick, nodes, layers, Random(seed))]

    assert hit("rank 2") == ["node-2"]
    assert hit("layer head") == ["node-1", "node-3"]
    assert hit("layer none") == []
    assert hit("node-4") == ["node-4"]
    assert hit("random") == hit("random")
    assert {name for seed in range(50) for name in hit("random", seed)} == {"node-0", "node-1", "node-2", "node-3"}


WELL = Evidence(
    document={
        "state": "done", "step": 3, "params_digest": "a", "samples": 12, "samples_lost": 0, "samples_repeated": 0,
        "recoveries": [{"epoch": 2, "node": "node-1", "total_s": 0.5, "lost_steps": 0}],
    },
    events=[{"kind": "plan", "epoch": 1}, {"kind": "plan", "epoch": 2}],
    steps=[{"step": 1}, {"step": 2}, {"step": 3}],
    undisturbed={"params_digest": "a"},
    batch=4,
    unfired=[],
    left=[],
    damaged=[],
)  # fmt: skip


def recovered(**changes):
    (recovery,) = WELL.document["recoveries"]
    return {**WELL.document, "recoveries": [{**recovery, **changes}]}


def failed(evidence, checks=None):
    return [verdict.oracle for verdict in judge(evidence, checks or Checks(recovery_s=1.0)) if not verdict.holds]


def test_all_is_well():
    assert failed(WELL) == []
    assert all(verdict.why for verdict in judge(WELL, Checks()))


@pytest.mark.parametrize(
    ("oracle", "change"),
    [
        ("ended well", {"document": {**WELL.document, "state": "stopped"}}),
        ("ended well", {"document": {**WELL.document, "error": {"message": "no"}}}),
        ("faults fired", {"unfired": [fault()]}),
        ("same bits", {"undisturbed": {"params_digest": "b"}}),
        ("every sample once", {"document": {**WELL.document, "samples_repeated": 4}}),
        ("every sample once", {"batch": 5}),
        ("steps lost", {"document": recovered(lost_steps=1)}),
        ("recoveries in time", {"document": recovered(total_s=2.0)}),
        ("steps never go back", {"steps": [{"step": 1}, {"step": 2}, {"step": 2}, {"step": 3}]}),
        ("one plan per epoch", {"events": [{"kind": "plan", "epoch": 2}, {"kind": "plan", "epoch": 2}]}),
        ("every checkpoint restores", {"damaged": ["step 2: pack missing"]}),
        ("nothing is left", {"left": ["process 7"]}),
    ],
)  # fmt: skip
def test_each_oracle_sees_its_fault_and_only_that(oracle, change):
    assert failed(replace(WELL, **change)) == [oracle]


def test_a_rollback_may_go_back_to_where_it_says():
    undone = {"kind": "rollback", "to_step": 1, "lost_steps": 1}
    again = [{"step": 1}, {"step": 2}, {"step": 2}, {"step": 3}]
    assert failed(replace(WELL, steps=again, events=[*WELL.events, undone])) == []
