"""Drives the state machine without clocks, processes or etcd."""

from __future__ import annotations

from elastic.control.messages import (
    Base,
    Based,
    Claim,
    Commit,
    Committed,
    Expected,
    Finish,
    Formed,
    Frozen,
    Joined,
    Member,
    Publish,
    RankEnded,
    Record,
    Saved,
    Settings,
    Voted,
)
from elastic.control.outcome import Report
from elastic.control.state import State, advance, ranked
from elastic.planning import LayerProfile, ModelProfile

LAYERS = ("embed", "a", "b", "head")
COMMIT = {"kind": "commit"}


def settings(**changes):
    profile = ModelProfile(tuple(LayerProfile(name, 1.0, 2.0, 100, 10, 5) for name in LAYERS))
    defaults = {"fault_tolerance": 0, "device_bytes": None, "min_nodes": 1, "exact": True, "microbatches": 8}
    return Settings(profile=profile, layers=LAYERS, **{**defaults, **changes})


def member(i, incarnation="1", **fingerprint):
    name = f"node-{i}"
    return Member(
        name,
        f"{name}.{incarnation}",
        f"10.0.0.{i}:7{incarnation}",
        f"10.0.0.{i}:29500",
        f"10.0.0.{i}:29600",
        100 + i,
        200 + i,
        {"torch": "2", **fingerprint},
    )


def drive(state, *events, now=0.0):
    effects = []
    for event in events:
        state, more = advance(state, event, now)
        state, later = answered(state, more, now)
        effects += more + later
    return state, effects


def answered(state, effects, now=0.0):
    """What follows when a store without any checkpoint answers at once, and takes the last one."""
    more = []
    if any(isinstance(effect, Claim) for effect in effects):
        begun = state.published is not None
        effects[:] = [effect for effect in effects if not isinstance(effect, Claim)]
        state, more = advance(state, Based(Base(state.lineage + 1 if begun else 0)), now)
    elif state.result is not None and state.phase != "ended":
        version = (state.lineage, state.result["step"], 0)
        part = {"layers": range(len(LAYERS)), "bytes": 1, "stall_s": 0.0, "upload_s": 0.0}
        for event in (Saved("all", version, part), Committed(version, "m")):
            state, effects = advance(state, event, now)
            more += [effect for effect in effects if not isinstance(effect, Commit) and not about_saving(effect)]
    return state, more


def about_saving(effect):
    return isinstance(effect, Record) and effect.kind.startswith("checkpoint")


def running(nodes=2, now=0.0, **changes):
    state, _ = drive(State(settings(**changes)), Expected(nodes), *[Joined(member(i)) for i in range(nodes)], now=now)
    state, _ = form(state, now=now)
    assert state.phase == "running"
    return state


def form(state, now=0.0):
    """All ranks of the newest plan form and vote."""
    newest = state.switching or state.published
    events = [Formed(node, newest.epoch) for node in sorted(ranked(newest))]
    events += [Voted(node, newest.epoch, 0.1, 0.05) for node in sorted(ranked(newest))]
    return drive(state, *events, now=now)


def layers_of(state, node):
    for pipeline in state.published.plan.pipelines:
        for stage in pipeline.stages:
            if stage.node == node:
                return range(stage.start, stage.stop)
    return range(0)


def frozen(state, node, step=5, prepared=None, vote=None, voter=True, holds=None, epoch=None):
    """A report to the attempt under way, of a node that trained its stage under the last plan."""
    if holds is None:
        holds = dict.fromkeys(layers_of(state, node), (state.lineage, step, 0))
    incarnation = state.members[node].incarnation
    return Frozen(node, incarnation, epoch or state.epoch, Report(voter, step, prepared, vote, holds))


def end(node, epoch=1, layers=LAYERS, kind="done", digest="d", **changes):
    values = {"step": 5, "reason": "", "loss": 1.5, "ledger": {"samples": 80, "lost": 0, "repeated": 0}, **changes}
    return RankEnded(node, epoch, kind, digests={layer: digest + layer for layer in layers}, **values)


def kinds(effects):
    return [effect.kind if isinstance(effect, Record) else type(effect).__name__ for effect in effects]


def only(effects, kind):
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def record(effects, kind):
    (found,) = [effect for effect in effects if isinstance(effect, Record) and effect.kind == kind]
    return found.data


def published(effects):
    return only(effects, Publish)


def failure(effects):
    return only(effects, Finish).result["error"]
