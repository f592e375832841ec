"""Decisions of the state machine after a failure: who is asked, what the open step's outcome is, what is planned."""

from __future__ import annotations

import pytest

from elastic.control.messages import (
    AgentGone,
    Broken,
    Current,
    DrainRequested,
    Expected,
    Failed,
    Freeze,
    Joined,
    Left,
    Progressed,
    Publish,
    Release,
    Resize,
    SizeRequested,
    Tick,
    WorkerExited,
)
from tests.control.machine import (
    COMMIT,
    drive,
    end,
    failure,
    form,
    frozen,
    kinds,
    member,
    only,
    published,
    record,
    running,
)

LOST_2 = WorkerExited("node-2", "node-2.1", -9, "w.log")


def broken(nodes=3, **changes):
    """Training on some nodes; the worker of node-2 has died, and everybody is asked to freeze."""
    state, effects = drive(running(nodes, **changes), LOST_2)
    assert (state.phase, only(effects, Freeze).epoch) == ("freezing", 2)
    return state


def test_a_lost_worker_freezes_the_others_and_their_reports_make_the_next_plan():
    state = broken()
    state, effects = drive(state, frozen(state, "node-0"))
    assert effects == []  # node-1 may be the one that saw the vote
    state, effects = drive(state, frozen(state, "node-1"))
    plan = published(effects)
    assert (plan.epoch, set(plan.members), plan.base, plan.version) == (2, {"node-0", "node-1"}, None, (0, 5, 0))
    assert (plan.outcome.step, plan.outcome.verdict) == (5, None)
    assert plan.reason.startswith("node-2 lost; ")
    state, effects = form(state, now=1.0)
    assert only(effects, Current).epoch == 2
    recovered = record(effects, "recovered")
    assert recovered["losses"] == [{"cause": "worker", "node": "node-2", "incarnation": "node-2.1", "detect_s": 0.0}]
    assert (recovered["epoch"], recovered["lost_steps"], recovered["total_s"]) == (2, 0, 1.0)
    assert set(recovered["phases"]) == {"detect", "quiesce", "plan", "form", "transfer", "first_step"}


def test_a_vote_that_one_survivor_saw_is_carried_out_by_all():
    state = broken()
    saw = frozen(state, "node-0", prepared=5, vote=(5, 1, COMMIT))
    state, effects = drive(state, saw, frozen(state, "node-1", prepared=5))
    plan = published(effects)
    assert (plan.outcome.step, plan.outcome.verdict, plan.outcome.after, plan.version) == (5, COMMIT, 6, (0, 6, 0))
    assert plan.sources == {}


def test_a_step_that_one_survivor_has_applied_is_committed():
    state = broken()
    ahead = frozen(state, "node-0", step=6, vote=(5, 1, COMMIT))
    plan = published(drive(state, ahead, frozen(state, "node-1", step=5, prepared=5))[1])
    assert (plan.outcome.step, plan.outcome.verdict, plan.version) == (5, COMMIT, (0, 6, 0))


def test_the_report_of_one_that_died_since_is_evidence_but_no_holding():
    state = broken()
    state, _ = drive(state, frozen(state, "node-0", step=6, vote=(5, 1, COMMIT)))
    state, effects = drive(state, AgentGone("10.0.0.0:71"))
    assert kinds(effects) == ["node_left"]  # the attempt goes on: node-1 has yet to report
    state, effects = drive(state, frozen(state, "node-1", step=5, prepared=5))
    plan = published(effects)
    assert (plan.outcome.verdict, plan.version, set(plan.members)) == (COMMIT, (0, 6, 0), {"node-1"})
    assert plan.base is None


def test_the_outcome_is_repeated_until_an_epoch_has_formed():
    # node-0 alone saw the vote; the plan says commit; node-0 dies before anybody has carried it out.
    state = broken()
    state, _ = drive(
        state, frozen(state, "node-0", prepared=5, vote=(5, 1, COMMIT)), frozen(state, "node-1", prepared=5)
    )
    state, effects = drive(state, AgentGone("10.0.0.0:71"))
    assert only(effects, Freeze).epoch == 3
    plan = published(drive(state, frozen(state, "node-1", prepared=5))[1])
    assert (plan.epoch, plan.outcome.verdict, plan.version) == (3, COMMIT, (0, 6, 0))


def test_once_formed_the_next_open_step_is_void_again():
    state = broken(4)
    reports = [frozen(state, f"node-{i}", prepared=5, vote=(5, 1, COMMIT)) for i in (0, 1, 3)]
    state, _ = form(drive(state, *reports)[0])
    state, _ = drive(state, AgentGone("10.0.0.3:71"))
    plan = published(drive(state, *[frozen(state, f"node-{i}", step=6) for i in (0, 1)])[1])
    assert (plan.outcome.step, plan.outcome.verdict, plan.version) == (6, None, (0, 6, 0))


def test_layers_of_a_lost_stage_come_from_the_other_pipeline():
    state = running(4, device_bytes=320)  # two layers to a node: two pipelines of two stages
    stages = {s.node: range(s.start, s.stop) for p in state.published.plan.pipelines for s in p.stages}
    state, _ = drive(state, AgentGone("10.0.0.3:71"), Joined(member(4)))
    for node in ("node-0", "node-1", "node-2"):
        state, effects = drive(state, frozen(state, node))
    plan = published(effects)
    twin = next(n for n in ("node-0", "node-1", "node-2") if stages[n] == stages["node-3"])
    assert plan.sources == {"node-4": dict.fromkeys(stages["node-3"], (twin,))}


def test_without_any_copy_of_a_layer_training_starts_again_from_the_seeds_in_the_next_lineage():
    state, _ = drive(running(2, device_bytes=320), Progressed(7), AgentGone("10.0.0.1:71"))
    state, effects = drive(state, frozen(state, "node-0", step=7), now=3.0)
    assert kinds(effects) == ["waiting"]  # one node cannot hold the model; what it holds is kept
    state, effects = drive(state, Joined(member(1, "2")), now=4.0)
    assert record(effects, "rollback") == {
        "lineage": 1,
        "manifest": "",
        "to_step": 0,
        "lost_steps": 7,
    }
    plan = published(effects)
    assert (plan.base is not None, plan.lineage, plan.version, plan.outcome) == (True, 1, (1, 0, 0), None)
    _, effects = form(state, now=5.0)
    assert record(effects, "recovered")["lost_steps"] == 7


def test_holders_that_may_still_live_are_waited_for_before_a_rollback():
    state, _ = drive(running(2, device_bytes=320), Broken("node-0", 1, "reset"), Left("node-1", "node-1.1"), now=1.0)
    state, effects = drive(state, frozen(state, "node-0"), Joined(member(2)), now=2.0)
    assert state.phase == "waiting"
    assert effects[-1].data["reason"].startswith("no live node holds")
    assert drive(state, Tick(), now=15.0)[1] == []
    assert kinds(drive(state, Tick(), now=16.5)[1]) == ["rollback", "Publish"]


def test_a_member_that_never_reports_is_excluded_at_the_deadline():
    state = broken(freeze_s=10.0)
    state, _ = drive(state, frozen(state, "node-0"))
    assert drive(state, Tick(), now=9.0)[1] == []
    state, effects = drive(state, Tick(), now=10.5)
    assert kinds(effects) == ["node_left", "Publish"]
    assert set(published(effects).members) == {"node-0"}


def test_an_expired_lease_kills_nobody_while_votes_pass():
    state, effects = drive(running(), Left("node-1", "node-1.1"), now=1.0)
    assert (state.phase, kinds(effects)) == ("running", ["lease_expired"])
    for now in range(2, 30):
        state, effects = drive(state, Progressed(now), Tick(), now=float(now))
        assert (state.phase, effects) == ("running", [])
    state, effects = drive(state, Tick(), now=36.0)
    assert kinds(effects) == ["node_left", "Freeze"]


def test_a_joiner_is_taken_in_by_a_switch_that_interrupts_nobody():
    state, effects = drive(running(2), Expected(3), Joined(member(2)), now=5.0)
    assert kinds(effects) == ["node_joined", "Publish"]
    plan = published(effects)
    assert (plan.switch_from, plan.version, plan.outcome) == (1, None, None)
    assert plan.sources == {"node-2": dict.fromkeys(range(4), ("node-0", "node-1"))}
    assert state.phase == "running"
    state, effects = form(state)
    assert kinds(effects) == ["Current", "formed", "reconfigured"]
    assert record(effects, "reconfigured")["pause_s"] == 0.1


def test_joiners_that_come_together_are_taken_in_together():
    state, effects = drive(running(2), Expected(9), *[Joined(member(i)) for i in range(2, 6)], now=5.0)
    assert kinds(effects) == ["node_joined"] * 4
    _, effects = drive(state, Tick(), now=5.6)
    assert set(published(effects).members) == {f"node-{i}" for i in range(6)}


def test_thirty_come_back_one_by_one_in_few_plans():
    """Scenario 8's second half, without processes."""
    state, plans = running(2), 0
    for i in range(2, 32):
        state, effects = drive(state, Expected(32), Joined(member(i)), now=i * 0.1)
        if any(isinstance(effect, Publish) for effect in effects):
            plans += 1
            state, _ = form(state, now=i * 0.1)
    state, effects = drive(state, Tick(), now=10.0)
    plans += len([effect for effect in effects if isinstance(effect, Publish)])
    assert plans <= 8
    assert len((state.switching or state.published).members) >= 8


def test_a_joiner_that_dies_while_joining_is_forgotten():
    state, _ = drive(running(2), Expected(3), Joined(member(2)), now=5.0)
    state, effects = drive(state, WorkerExited("node-2", "node-2.1", -9, "w.log"))
    assert only(effects, Freeze).epoch == 3
    plan = published(drive(state, *[frozen(state, f"node-{i}", step=8) for i in (0, 1)])[1])
    assert (set(plan.members), plan.version) == ({"node-0", "node-1"}, (0, 8, 0))


def test_a_drained_node_stays_until_the_next_epoch_has_formed():
    state, effects = drive(running(3), DrainRequested("node-1"))
    assert kinds(effects) == ["draining", "Publish"]
    assert "node-1" in published(effects).members
    state, effects = form(state)
    assert kinds(effects) == ["Current", "formed", "reconfigured", "node_released", "Release"]
    assert only(effects, Release).node == "node-1"
    # Its departure is no failure.
    state, effects = drive(state, WorkerExited("node-1", "node-1.1", 0, "w.log"), AgentGone("10.0.0.1:71"))
    assert (state.phase, effects) == ("running", [])


def test_the_only_copy_is_handed_over_by_a_drained_node():
    state = running(3, device_bytes=320)  # one pipeline of three
    (pipeline,) = state.published.plan.pipelines
    leaving = pipeline.stages[1]
    _, effects = drive(state, DrainRequested(leaving.node))
    handed = {layer: nodes for layers in published(effects).sources.values() for layer, nodes in layers.items()}
    assert all(handed[layer] == (leaving.node,) for layer in range(leaving.start, leaving.stop))


def test_a_drain_that_would_leave_too_few_is_refused():
    state, effects = drive(running(2, device_bytes=320), DrainRequested("node-1"))
    assert kinds(effects) == ["draining", "drain_refused"]
    assert state.draining == frozenset()


def test_nodes_set_drains_the_highest_numbers():
    _, effects = drive(running(12), SizeRequested(9))
    assert {effect.data["node"] for effect in effects if getattr(effect, "kind", "") == "draining"} == {
        "node-9",
        "node-10",
        "node-11",
    }


def test_a_size_asked_for_while_nodes_are_leaving_counts_those_that_stay():
    state, effects = drive(running(3), SizeRequested(1))
    assert only(effects, Resize).nodes == 3
    state, effects = drive(state, SizeRequested(2))  # two of three are on their way out: one more is needed
    assert only(effects, Resize).nodes == 4


def test_a_node_that_comes_after_the_size_was_reduced_is_sent_away_again():
    state, _ = form(drive(running(3), SizeRequested(2))[0])
    state, effects = drive(state, Joined(member(5)), now=9.0)
    assert kinds(effects) == ["node_joined", "draining", "node_released", "Release"]
    assert set(state.members) == {"node-0", "node-1"}


def test_a_users_error_is_tried_three_times_and_kills_nobody():
    error = {"code": "user_code", "message": "ValueError in the loss", "hint": "h", "detail": "Traceback"}
    state = running(2)
    for attempt in (1, 2):
        epoch = state.published.epoch
        # The peer of the one that raised breaks too; in whichever order the two reports come.
        events = [Broken("node-1", epoch, "reset"), Failed("node-0", epoch, 5, error)][:: 1 if attempt == 1 else -1]
        state, effects = drive(state, *events)
        assert kinds([e for e in effects if isinstance(e, Freeze)]) == ["Freeze"]
        assert set(state.members) == {"node-0", "node-1"}
        state, _ = drive(state, *[frozen(state, f"node-{i}") for i in (0, 1)])
    state, effects = drive(state, Failed("node-0", state.published.epoch, 5, error))
    assert (state.phase, failure(effects)) == ("ended", error)


def test_a_refusal_by_name_is_not_tried_again():
    error = {"code": "job", "message": "sparse gradient", "hint": "h"}
    assert failure(drive(running(2), Failed("node-0", 1, 0, error))[1])["code"] == "job"


def test_epochs_that_keep_breaking_without_a_death_end_the_job():
    state, effects = running(2), []
    for _ in range(7):
        state, effects = drive(state, Broken("node-0", state.published.epoch, "no route"))
        if state.phase == "ended":
            break
        state, _ = drive(state, *[frozen(state, f"node-{i}") for i in (0, 1)])
    assert "5 epochs in a row broke" in failure(effects)["message"]


def test_a_second_failure_while_forming_opens_another_epoch_and_form_gets_more_time():
    state = broken(4)
    state, effects = drive(state, *[frozen(state, f"node-{i}") for i in (0, 1, 3)])
    assert published(effects).form_s == 1.0
    state, effects = drive(state, AgentGone("10.0.0.3:71"))
    assert only(effects, Freeze).epoch == 3
    plan = published(drive(state, *[frozen(state, f"node-{i}") for i in (0, 1)])[1])
    assert (set(plan.members), plan.form_s) == ({"node-0", "node-1"}, 2.0)


def test_a_rank_that_dies_after_the_last_step_is_no_reason_to_lose_the_result():
    state, _ = drive(running(3), end("node-0"))
    state, effects = drive(state, WorkerExited("node-1", "node-1.1", -9, "w.log"))
    assert only(effects, Freeze).epoch == 2
    state, _ = drive(state, *[frozen(state, node, step=5) for node in ("node-0", "node-2")])
    _, effects = drive(state, end("node-0", epoch=2), end("node-2", epoch=2))
    assert kinds(effects) == ["ended", "Finish"]


@pytest.mark.parametrize("late", [WorkerExited("node-1", "node-1.1", -9, "log"), AgentGone("10.0.0.1:71")])
def test_a_node_that_comes_back_before_its_death_is_noticed_is_lost_and_joined(late):
    state, effects = drive(running(2), Joined(member(1, "2")))
    assert kinds(effects) == ["node_left", "Freeze", "node_joined"]
    assert drive(state, late)[0].members["node-1"].incarnation == "node-1.2"
