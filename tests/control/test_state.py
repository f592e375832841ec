"""Decisions of the state machine, without clocks, processes or etcd."""

from __future__ import annotations

import pytest

from elastic.control.state import (
    Broken,
    Expected,
    Failed,
    Finish,
    Formed,
    Joined,
    Left,
    Member,
    Publish,
    RankEnded,
    Record,
    Refused,
    Settings,
    State,
    StopRequested,
    Tick,
    WorkerExited,
    advance,
)
from elastic.digest import combined_digest
from elastic.planning import LayerProfile, ModelProfile

LAYERS = ("embed", "a", "b", "head")


def settings(**changes):
    profile = ModelProfile(tuple(LayerProfile(name, 1.0, 2.0, 100, 10, 5) for name in LAYERS))
    defaults = {"fault_tolerance": 0, "device_bytes": None, "min_nodes": 1, "exact": True, "microbatches": 8}
    return Settings(profile=profile, layers=LAYERS, **{**defaults, **changes})


def member(i, incarnation="1", **fingerprint):
    name = f"node-{i}"
    return Member(name, f"{name}.{incarnation}", f"10.0.0.{i}:29500", 100 + i, 200 + i, {"torch": "2", **fingerprint})


def drive(state, *events, now=0.0):
    effects = []
    for event in events:
        state, more = advance(state, event, now)
        effects += more
    return state, effects


def running(nodes=2, **changes):
    state, _ = drive(State(settings(**changes)), Expected(nodes), *[Joined(member(i)) for i in range(nodes)])
    state, _ = drive(state, *[Formed(node, 1) for node in state.in_plan])
    assert state.phase == "running"
    return state


def end(node, layers=LAYERS, kind="done", digest="d", **changes):
    values = {"step": 5, "reason": "", "loss": 1.5, "ledger": {"samples": 80, "lost": 0, "repeated": 0}, **changes}
    return RankEnded(node, 1, kind, digests={layer: digest + layer for layer in layers}, **values)


def kinds(effects):
    return [effect.kind if isinstance(effect, Record) else type(effect).__name__ for effect in effects]


def failure(effects):
    (finish,) = [effect for effect in effects if isinstance(effect, Finish)]
    return finish.result["error"]


def test_starts_when_all_expected_nodes_are_there():
    state, effects = drive(State(settings()), Joined(member(0)), Expected(2))
    assert (state.phase, kinds(effects)) == ("waiting", ["node_joined"])
    state, effects = drive(state, Joined(member(1)))
    assert kinds(effects) == ["node_joined", "Publish"]
    publish = effects[-1]
    assert (publish.epoch, publish.step, set(publish.members)) == (1, 0, {"node-0", "node-1"})
    assert publish.plan.microbatches == 8


def test_starts_without_the_missing_ones_after_a_while():
    state, _ = drive(State(settings(settle_s=10)), Expected(3), Joined(member(0)), Joined(member(1)), now=100)
    assert drive(state, Tick(), now=109)[1] == []
    assert kinds(drive(state, Tick(), now=110)[1]) == ["Publish"]


def test_waits_for_min_nodes_and_for_memory_and_says_so_once():
    waiting = State(settings(min_nodes=2))
    state, effects = drive(waiting, Expected(1), Joined(member(0)), Tick(), Tick())
    assert kinds(effects) == ["node_joined", "waiting"]
    assert state.phase == "waiting"
    assert "min_nodes is 2" in state.waiting_for
    small = State(settings(device_bytes=300))  # a stage of two layers and no more
    state, effects = drive(small, Expected(1), Joined(member(0)), Tick())
    assert kinds(effects) == ["node_joined", "waiting"]
    state, effects = drive(state, Expected(2), Joined(member(1)))
    assert kinds(effects) == ["node_joined", "Publish"]


def test_a_model_that_fits_nowhere_ends_the_job():
    _, effects = drive(State(settings(device_bytes=50)), Expected(1), Joined(member(0)))
    assert failure(effects)["code"] == "plan"


def test_a_node_with_other_numerics_is_refused_by_name():
    state, effects = drive(State(settings()), Joined(member(0)), Joined(member(1, torch="3")))
    assert set(state.members) == {"node-0"}
    assert effects[-1].kind == "node_refused"
    assert "torch is 3, node-0 has 2" in effects[-1].data["reason"]
    state, _ = drive(State(settings(exact=False)), Joined(member(0)), Joined(member(1, torch="3")))
    assert set(state.members) == {"node-0", "node-1"}


def test_when_every_node_is_refused_the_job_fails():
    state, effects = drive(State(settings()), Expected(2), Refused("node-0", "no store"), Refused("node-1", "no store"))
    assert state.phase == "ended"
    assert failure(effects) == {"code": "config", "message": "every node was refused; node-1: no store", "hint": ""}


def test_done_when_every_rank_is_done_and_the_digest_covers_all_layers_in_order():
    state, effects = drive(running(), end("node-1"))
    assert effects == []
    state, effects = drive(state, end("node-0"))
    assert kinds(effects) == ["ended", "Finish"]
    result = effects[-1].result
    assert (result["state"], result["step"], result["loss"], result["samples"]) == ("done", 5, 1.5, 80)
    assert result["params_digest"] == combined_digest([(layer, "d" + layer) for layer in LAYERS])
    assert drive(state, end("node-0"), Tick(), Left("node-0", "node-0.1"))[1] == []


def test_replicas_that_disagree_are_never_called_done():
    _, effects = drive(running(), end("node-0"), end("node-1", digest="other"))
    assert "replicas of layer 'embed' disagree" in failure(effects)["message"]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (Failed("node-1", 1, {"code": "user_code", "message": "ValueError in the loss", "hint": ""}), "user_code"),
        (Broken("node-1", 1, "connection reset"), "node_lost"),
        (WorkerExited("node-1", "node-1.1", -9, "w.log"), "node_lost"),
        (Left("node-1", "node-1.1"), "node_lost"),
    ],
)
def test_what_ends_an_epoch_ends_the_job_with_its_reason(event, code):
    state, effects = drive(running(), event)
    assert state.phase == "ended"
    assert failure(effects)["code"] == code


def test_stale_and_foreign_reports_change_nothing():
    state = running()
    stale = [
        Broken("node-0", 0, "old"),
        Failed("node-0", 7, {"code": "user_code", "message": "of another epoch"}),
        Left("node-0", "node-0.0"),
        WorkerExited("node-0", "node-0.0", 1, "log"),
        Formed("node-9", 1),
    ]
    assert drive(state, *stale) == (state, [])


def test_non_finite_names_the_step():
    ends = [end(f"node-{i}", kind="non_finite", reason="the loss or a gradient is not finite") for i in range(2)]
    error = failure(drive(running(), *ends)[1])
    assert (error["code"], error["message"]) == ("non_finite", "step 6: the loss or a gradient is not finite")


def test_stop_before_the_first_plan_ends_at_once_and_later_at_a_voted_step():
    _, effects = drive(State(settings()), Joined(member(0)), StopRequested())
    assert kinds(effects) == ["node_joined", "stop_requested", "ended", "Finish"]
    state, effects = drive(running(), StopRequested(), StopRequested())
    assert kinds(effects) == ["stop_requested"]
    _, effects = drive(state, end("node-0", kind="stopped"), end("node-1", kind="stopped"))
    assert effects[-1].result["state"] == "stopped"


def test_the_same_events_give_the_same_decisions():
    events = [Expected(3), *[Joined(member(i)) for i in (2, 0, 1)], Formed("node-1", 1)]
    assert drive(State(settings()), *events) == drive(State(settings()), *events)
    assert isinstance(drive(State(settings()), *events)[1][-1], Publish)
