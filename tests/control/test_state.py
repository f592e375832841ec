"""Decisions of the state machine: start, end, and what is no failure."""

from __future__ import annotations

from elastic.control.messages import (
    Broken,
    Expected,
    Failed,
    Finish,
    Formed,
    Joined,
    Left,
    Publish,
    Refused,
    StopRequested,
    Tick,
    WorkerExited,
)
from elastic.control.state import State
from elastic.digest import combined_digest
from tests.control.machine import LAYERS, drive, end, failure, kinds, member, only, published, running, settings


def test_starts_when_all_expected_nodes_are_there():
    state, effects = drive(State(settings()), Joined(member(0)), Expected(2))
    assert (state.phase, kinds(effects)) == ("waiting", ["node_joined"])
    state, effects = drive(state, Joined(member(1)))
    assert kinds(effects) == ["node_joined", "Publish"]
    publish = published(effects)
    assert (publish.epoch, publish.base is not None, set(publish.members)) == (1, True, {"node-0", "node-1"})
    assert (publish.version, publish.outcome, publish.sources) == ((0, 0, 0), None, {})
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
    error = failure(effects)
    assert (error["code"], error["message"]) == ("config", "every node was refused; node-1: no store")


def test_a_worker_that_never_gets_ready_ends_the_job_at_the_third_try():
    exits = [WorkerExited("node-0", f"node-0.{i}", 1, "w.log") for i in range(3)]
    state, effects = drive(State(settings()), Expected(1), *exits[:2])
    assert (state.phase, effects) == ("waiting", [])
    _, effects = drive(state, exits[2])
    assert "ended with exit code 1 before it was ready" in failure(effects)["message"]


def test_done_when_every_rank_is_done_and_the_digest_covers_all_layers_in_order():
    state, effects = drive(running(), end("node-1"))
    assert effects == []
    state, effects = drive(state, end("node-0"))
    assert kinds(effects) == ["ended", "Finish"]
    result = only(effects, Finish).result
    assert (result["state"], result["step"], result["loss"], result["samples"]) == ("done", 5, 1.5, 80)
    assert result["params_digest"] == combined_digest([(layer, "d" + layer) for layer in LAYERS])
    assert drive(state, end("node-0"), Tick(), Left("node-0", "node-0.1"))[1] == []


def test_replicas_that_disagree_are_never_called_done():
    _, effects = drive(running(), end("node-0"), end("node-1", digest="other"))
    assert "replicas of layer 'embed' disagree" in failure(effects)["message"]


def test_stale_and_foreign_reports_change_nothing():
    state = running()
    error = {"code": "user_code", "message": "of another epoch"}
    stale = [
        Broken("node-0", 7, "old"),
        Failed("node-0", 7, 3, error),
        Left("node-0", "node-0.0"),
        Formed("node-9", 1),
        end("node-0", epoch=9),
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
