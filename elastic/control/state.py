"""The controller's state machine. Pure: ``(state, event, now) → (state, effects)``; every decision carries its reason.

The same function is driven by the controller against etcd, by tests, and by a simulator in virtual time. It sees
events, not clocks: ``now`` is seconds on any monotonic clock.

    waiting ──► forming ──► running ──► ended
       ▲           │  ▲        │ │
       │           ▼  │        │ └─ a join or drain: the next plan is published while training goes on, and the
       └──────── freezing ◄────┘    members switch to it at a voted step

A failure opens the next epoch (`Freeze`): every worker stops and reports. When every member of the last plan has
reported or is excluded, the outcome of the open step and the next plan are decided and published together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.control.messages import (
    AgentGone,
    Base,
    Based,
    Broken,
    Claim,
    Commit,
    Committed,
    Current,
    DrainRequested,
    Effect,
    Event,
    Expected,
    Failed,
    Finish,
    Formed,
    Freeze,
    Frozen,
    Joined,
    Kill,
    Left,
    Look,
    Looked,
    Member,
    NotBased,
    NotCommitted,
    NotSaved,
    Progressed,
    Publish,
    RankEnded,
    Record,
    Refused,
    Release,
    ReleaseRequested,
    Resize,
    Saved,
    Settings,
    SizeRequested,
    StopRequested,
    Tick,
    Unreadable,
    Voted,
    WorkerExited,
)
from elastic.control.outcome import Outcome, Report, Version, decide, holdings, version_after
from elastic.digest import combined_digest
from elastic.errors import (
    ConfigError,
    ElasticError,
    NodeLost,
    NonFinite,
    PlanError,
    StoreUnreachable,
    UserCodeError,
    from_json,
)
from elastic.planning import Node, Plan, Reconfiguration, TooFewNodes, Transfer, reconfigure

MAX_TRIES = 3  # of a step that the user's code raises in
SLACK = 10.0  # a step that takes so many times as long as steps do is looked into
SLACK_S = 5.0  # and this much on top
FORMING_S = 10.0  # after which it is looked whether all processes run
UNKNOWN_S = 60.0  # as long as nothing is known of how long a step takes
ANSWER_S = 5.0  # an agent that has not said by then what its worker does is left to its lease
FLAPS = 3  # failures of a node
FLAPPING_S = 120.0  # within so long put it into quarantine,
QUARANTINE_S = 30.0  # at first for so long, then twice as long each time,
LONGEST_S = 1800.0  # and this at most
CLAIM_AGAIN_S = 3.0  # after the checkpoint store has not answered
MAX_BROKEN = 5  # epochs in a row that break although nobody died


@dataclass(frozen=True)
class Loss:
    """One cause of a recovery under way. ``cause`` is ``worker``, ``node``, ``hang``, ``error`` or ``broken``."""

    cause: str
    node: str
    incarnation: str
    at: float  # when its first sign was seen


@dataclass(frozen=True)
class State:
    """
    Attributes:
        phase: ``waiting`` (nothing runs), ``forming``, ``running``, ``freezing`` or ``ended``.
        members: live incarnations by node.
        expected, refused, changed_at: of the start, see `Settings.settle_s`.
        epoch: the newest number given out.
        plan, published: the last plan; ``in_plan`` the incarnations it names.
        current: the newest epoch that has formed.
        reports: of this attempt; ``evidence``: reports since the last plan, also of the dead.
        losses, opened_at, decided_at, published_at, formed_at: of the recovery under way, for its record.
        unproven: incarnations that are excluded and may still live, and since when.
        tries: how often each step has raised in the user's code.
        broken_in_a_row, unformed_in_a_row: epochs that broke without a death, or did not form, since the last vote.
        suspects: members whose lease has expired while votes pass, and since when.
        step, progressed_at: of the last announced step.
        pace_s: how long a step takes, lately and at most.
        look, looking_since, looked: the number of the last look at all workers, since when it is under way, if it is,
            and the answers, by node; when the one before was over.
        hung: incarnations that were found to hang, and since when.
        failures: of each node, lately; ``quarantined``: nodes that are left out, and until when; ``quarantines``: how
            often each was.
        measured: the last switch whose pause has been recorded.
        size: how many nodes were asked for since the start, if any.
        starting_over: nobody holds every layer: the next plan starts from a `Base`, even if holders come back.
        claiming: `Claim` was given out; ``base`` is its answer, until a plan starts from it.
        damaged: manifests of checkpoints that could not be restored.
        saves: parts of checkpoints that do not count yet, by version and writer; ``committing``, ``committed``: the
            version that `Commit` was given out for, and the newest that counts.
        unsaved: why the checkpoint of a step failed, by step.
        result: how the job ended, while its last checkpoint is still to be committed.
        switching: the plan published for a switch that has not formed yet, if any, replaces ``plan`` when it has.
    """

    settings: Settings
    phase: str = "waiting"
    members: Mapping[str, Member] = field(default_factory=dict)
    expected: int | None = None
    refused: frozenset[str] = frozenset()
    changed_at: float = 0.0
    epoch: int = 0
    current: int = 0
    lineage: int = 0
    published: Publish | None = None
    switching: Publish | None = None
    formed: frozenset[str] = frozenset()
    ends: Mapping[str, RankEnded] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)
    evidence: Mapping[str, Report] = field(default_factory=dict)
    losses: tuple[Loss, ...] = ()
    opened_at: float = 0.0
    decided_at: float = 0.0
    published_at: float = 0.0
    formed_at: float = 0.0
    transfer_s: float = 0.0
    lost_steps: int = 0
    unproven: Mapping[str, float] = field(default_factory=dict)
    absent: Mapping[str, Member] = field(default_factory=dict)
    tries: Mapping[int, int] = field(default_factory=dict)
    raised_in: int = 0
    broken_in_a_row: int = 0
    unformed_in_a_row: int = 0
    draining: frozenset[str] = frozenset()
    suspects: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    progressed_at: float = 0.0
    pace_s: float = 0.0
    look: int = 0
    looking_since: float | None = None
    looked: Mapping[str, Looked] = field(default_factory=dict)
    looked_at: float = 0.0
    hung: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    quarantined: Mapping[str, float] = field(default_factory=dict)
    quarantines: Mapping[str, int] = field(default_factory=dict)
    measured: int = 0
    size: int | None = None
    stop: bool = False
    waiting_for: str = ""
    starting_over: bool = False
    claiming: bool = False
    claim_after: float = 0.0
    base: Base | None = None
    damaged: frozenset[str] = frozenset()
    saves: Mapping[Version, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    committing: Version | None = None
    committed: Version | None = None
    unsaved: Mapping[int, str] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None


Result = tuple[State, list[Effect]]


def advance(state: State, event: Event, now: float) -> Result:
    """The next state and what must be done, in order. After ``ended`` nothing changes any more."""
    if state.phase == "ended":
        return state, []
    match event:
        case Joined(member):
            return _joined(state, member, now)
        case Refused(node, reason):
            return _refused(state, node, reason)
        case Left(node, incarnation):
            return _left(state, node, incarnation, now)
        case AgentGone(agent):
            return _agent_gone(state, agent, now)
        case WorkerExited():
            return _worker_exited(state, event, now)
        case Expected(nodes):
            return _progress(replace(state, expected=nodes), now)
        case Frozen():
            return _frozen(state, event, now)
        case Formed(node, epoch, _, transfer_s):
            return _formed(state, node, epoch, transfer_s, now)
        case Voted():
            return _voted(state, event, now)
        case Progressed(step):
            return _progressed(state, step, now)
        case Looked():
            return _looked(state, event, now)
        case RankEnded():
            return _rank_ended(state, event)
        case Failed():
            return _failed(state, event, now)
        case Broken():
            return _broken(state, event, now)
        case Based(base):
            return _progress(replace(state, claiming=False, base=base), now)
        case NotBased(reason):
            return _not_based(state, reason, now)
        case Unreadable():
            return _unreadable(state, event, now)
        case Saved(writer, version, part):
            return _saved(state, writer, version, part)
        case NotSaved(node, version, reason):
            return _not_saved(state, version, f"{node}: {reason}")
        case Committed(version, manifest):
            return _committed(state, version, manifest)
        case NotCommitted(version, reason):
            return _not_saved(state, version, reason)
        case StopRequested():
            return _stop_requested(state)
        case DrainRequested(node):
            return _drain_requested(state, node, now)
        case ReleaseRequested(node):
            state, effects = _over(state, {node} & state.quarantined.keys(), "it was asked for")
            return _progress(state, now, effects)
        case SizeRequested(nodes):
            return _size_requested(state, nodes, now)
        case Tick():
            return _progress(state, now)


# Who is there.


def ranked(publish: Publish | None) -> frozenset[str]:
    """The nodes that compute under a plan."""
    if publish is None:
        return frozenset()
    return frozenset(stage.node for pipeline in publish.plan.pipelines for stage in pipeline.stages)


def _joined(state: State, member: Member, now: float) -> Result:
    refused = _numerics(state, member)
    if refused:
        return state, [Record("node_refused", {"node": member.node, "reason": refused})]
    known = state.members.get(member.node)
    if known is not None and known.incarnation == member.incarnation:  # its lease is back
        return replace(state, suspects=_without(state.suspects, member.node)), []
    effects: list[Effect] = []
    if known is not None:  # its next incarnation is here: the old one is gone
        state, effects = _lose(state, known, "node" if known.agent != member.agent else "worker", now, now, proven=True)
    state = replace(
        state,
        members={**state.members, member.node: member},
        changed_at=now,
        absent=_without(state.absent, member.incarnation),
    )
    if member.incarnation in state.evidence:  # it was given up, and is back within the attempt it reported to
        reports = {**state.reports, member.node: state.evidence[member.incarnation]}
        state = replace(state, reports=reports, unproven=_without(state.unproven, member.incarnation))
    elif member.incarnation in state.unproven:  # it lives, and will say what it holds
        state = replace(state, unproven={**state.unproven, member.incarnation: now})
    state = _ended(state, [other for other in state.absent.values() if other.node == member.node and other != member])
    effects.append(Record("node_joined", {"node": member.node, "incarnation": member.incarnation}))
    state, more = _trim(state)
    return _progress(state, now, [*effects, *more])


def _ended(state: State, members: Iterable[Member]) -> State:
    """Proof that these, given up before, do not live any more: nothing of theirs is waited for."""
    ended = {member.incarnation for member in members}
    return replace(
        state,
        absent={name: member for name, member in state.absent.items() if name not in ended},
        unproven={name: at for name, at in state.unproven.items() if name not in ended},
    )


def _without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {other: value for other, value in mapping.items() if other != key}


def _numerics(state: State, member: Member) -> str:
    """Why the member cannot be in an exact job: its bits would differ from those of the members before it."""
    if not state.settings.exact:
        return ""
    for other in state.members.values():
        if other.node == member.node:
            continue
        theirs, mine = other.fingerprint, member.fingerprint
        keys = sorted(key for key in theirs.keys() | mine.keys() if theirs.get(key) != mine.get(key))
        if keys:
            facts = ", ".join(f"{key} is {mine.get(key)}, {other.node} has {theirs.get(key)}" for key in keys)
            return f"reduction 'exact' needs equal numerics on all nodes: {facts}"
    return ""


def _refused(state: State, node: str, reason: str) -> Result:
    refused = state.refused | {node}
    effects: list[Effect] = [Record("node_refused", {"node": node, "reason": reason})]
    state = replace(state, refused=refused)
    if state.epoch == 0 and state.expected is not None and len(refused) >= state.expected:
        return _finish_failed(state, ConfigError(f"every node was refused; {node}: {reason}"), node, effects)
    return state, effects


def _left(state: State, node: str, incarnation: str, now: float) -> Result:
    """An expired lease is a report: epochs go on as long as their votes pass, which need every member."""
    member = state.members.get(node)
    if member is None or member.incarnation != incarnation:
        return state, []
    if state.phase == "running" and node in ranked(state.published):
        data = {"node": node, "incarnation": incarnation}
        return replace(state, suspects={**state.suspects, node: now}), [Record("lease_expired", data)]
    state, effects = _lose(state, member, "node", now, now, proven=False)
    return _progress(state, now, effects)


def _agent_gone(state: State, agent: str, now: float) -> Result:
    effects: list[Effect] = []
    state = _ended(state, [member for member in state.absent.values() if member.agent == agent])
    for member in [member for member in state.members.values() if member.agent == agent]:
        state, more = _lose(state, member, "node", now, now, proven=True)
        effects += more
    return _progress(state, now, effects)


def _worker_exited(state: State, event: WorkerExited, now: float) -> Result:
    member = state.members.get(event.node)
    how = f"by signal {-event.code}" if event.code < 0 else f"with exit code {event.code}"
    if event.incarnation in state.absent:
        return _progress(_ended(state, [state.absent[event.incarnation]]), now)
    if member is None or member.incarnation != event.incarnation:
        tries = {**state.tries, -1: state.tries.get(-1, 0) + 1}
        if state.epoch == 0 and tries[-1] >= MAX_TRIES:
            error = NodeLost(f"the worker of {event.node} ended {how} before it was ready", f"its log is {event.log}")
            return _finish_failed(state, error, event.node)
        return replace(state, tries=tries), []
    hung_at = state.hung.get(event.incarnation)
    cause, at = ("worker", now - event.age_s) if hung_at is None else ("hang", hung_at)
    state, effects = _lose(state, member, cause, at, now, proven=True)
    return _progress(state, now, effects)


def _lose(state: State, member: Member, cause: str, at: float, now: float, *, proven: bool) -> Result:
    """Takes an incarnation out, whose loss first showed at ``at``; opens the next epoch if the running one needs it."""
    members = {node: other for node, other in state.members.items() if node != member.node}
    unproven, absent = dict(state.unproven), dict(state.absent)
    if not proven:
        unproven[member.incarnation] = now
        absent[member.incarnation] = member
    data = {"node": member.node, "incarnation": member.incarnation, "cause": cause}
    state = replace(
        state,
        members=members,
        unproven=unproven,
        absent=absent,
        draining=state.draining - {member.node},
        reports={node: report for node, report in state.reports.items() if node != member.node},
        suspects={node: at for node, at in state.suspects.items() if node != member.node},
    )
    effects: list[Effect] = [Record("node_left", data)]
    if state.settings.quarantine and not (state.stop or state.ends):
        state, more = _flapped(state, member.node, now)
        effects += more
    if _needed(state, member):
        loss = Loss(cause, member.node, member.incarnation, at)
        state = replace(state, losses=(*state.losses, loss))
        state, more = _open(state, now)
        effects += more
    return state, effects


def _flapped(state: State, node: str, now: float) -> Result:
    """Counts a failure, and leaves a node out for a while that fails again and again: each time costs all others."""
    lately = tuple(at for at in state.failures.get(node, ()) if now - at < FLAPPING_S)
    lately = (*lately, now)
    if len(lately) < FLAPS:
        return replace(state, failures={**state.failures, node: lately}), []
    times = state.quarantines.get(node, 0)
    for_s = min(LONGEST_S, QUARANTINE_S * 2.0**times)
    state = replace(
        state,
        failures=_without(state.failures, node),
        quarantined={**state.quarantined, node: now + for_s},
        quarantines={**state.quarantines, node: times + 1},
    )
    return state, [Record("quarantined", {"node": node, "failures": len(lately), "for_s": for_s})]


def _over(state: State, nodes: Iterable[str], reason: str) -> Result:
    """Ends quarantines."""
    effects: list[Effect] = []
    for node in nodes:
        state = replace(state, quarantined=_without(state.quarantined, node))
        effects.append(Record("quarantine_over", {"node": node, "reason": reason}))
    return state, effects


def _usable(state: State) -> list[Node]:
    """The nodes that a plan may use."""
    return [
        Node(node) for node in sorted(state.members) if node not in state.draining and node not in state.quarantined
    ]


def _needed(state: State, member: Member) -> bool:
    """Whether the running epoch, or the one being formed, cannot go on without this incarnation."""
    for publish in (state.published, state.switching):
        planned = publish.members.get(member.node) if publish is not None else None
        if planned is not None and planned.incarnation == member.incarnation:
            assert publish is not None
            sources = {node for layers in publish.sources.values() for nodes in layers.values() for node in nodes}
            forming = publish is state.switching or state.phase == "forming"
            if member.node in ranked(publish) or (forming and member.node in sources):
                return member.node not in state.ends or state.phase == "freezing"
    return False


# A failure: freeze, collect reports, decide.


def _open(state: State, now: float) -> Result:
    """Opens the next epoch. While reports to an open one are still coming in, it serves the new failure as well."""
    if state.phase not in ("forming", "running"):
        return state, []
    epoch = state.epoch + 1
    failed_to_form = state.phase == "forming"
    state = replace(
        state,
        phase="freezing",
        epoch=epoch,
        reports={},
        evidence={},
        opened_at=now,
        unformed_in_a_row=state.unformed_in_a_row + (1 if failed_to_form else 0),
    )
    return state, [Freeze(epoch)]


def _broken(state: State, event: Broken, now: float) -> Result:
    newest = state.switching or state.published
    if newest is None or event.epoch not in (state.published.epoch if state.published else 0, newest.epoch):
        return state, []
    if state.phase not in ("forming", "running") or event.node not in newest.members:
        return state, []
    if state.broken_in_a_row >= MAX_BROKEN:
        error = NodeLost(
            f"{MAX_BROKEN} epochs in a row broke although no node died; last on {event.node}: {event.reason}"
        )
        return _finish_failed(state, error, event.node)
    state, effects = _open(replace(state, broken_in_a_row=state.broken_in_a_row + 1), now)
    note = Record("broken", {"node": event.node, "epoch": event.epoch, "reason": event.reason})
    return _progress(state, now, [note, *effects])


def _failed(state: State, event: Failed, now: float) -> Result:
    error = from_json(dict(event.error))
    if event.epoch == 0:
        return _finish_failed(state, error, event.node)
    if state.published is None or event.epoch != state.published.epoch:
        return state, []
    first = state.raised_in != event.epoch  # several ranks may raise in one try
    tries = {**state.tries, event.step: state.tries.get(event.step, 0) + first}
    state = replace(state, tries=tries, raised_in=event.epoch, step=max(state.step, event.step))
    if not isinstance(error, UserCodeError) or tries[event.step] >= MAX_TRIES:
        return _finish_failed(state, error, event.node)
    if not first:
        return state, []
    data = {"node": event.node, "step": event.step, "message": error.message, "tries": tries[event.step]}
    state = replace(state, losses=(*state.losses, Loss("error", event.node, "", now - event.age_s)))
    state, effects = _open(state, now)
    return _progress(state, now, [Record("user_error", data), *effects])


def _frozen(state: State, event: Frozen, now: float) -> Result:
    if event.epoch != state.epoch:
        return state, []
    asked = state.phase in ("freezing", "waiting")
    member, absent = state.members.get(event.node), state.absent.get(event.incarnation)
    if asked:
        state = replace(state, evidence={**state.evidence, event.incarnation: event.report})
    if member is None and absent is not None:  # given up because its report was late: nothing else brings it back
        return _joined(state, absent, now)
    if not asked or member is None or member.incarnation != event.incarnation:
        return state, []
    state = replace(state, unproven=_without(state.unproven, event.incarnation))
    return _progress(replace(state, reports={**state.reports, event.node: event.report}), now)


def _progress(state: State, now: float, effects: list[Effect] | None = None) -> Result:
    """Does whatever has become possible: start, decide, or take joiners and drains into the next plan."""
    effects = effects or []
    due = sorted(node for node, until in state.quarantined.items() if until <= now)
    state, more = _over(state, due, "it is time")
    effects = effects + more
    if state.phase == "waiting":
        if state.epoch == 0 and not _may_start(state, now):
            return state, effects
        return _decide(state, now, effects)
    if state.phase == "freezing":
        return _collect(state, now, effects)
    for node, since in state.suspects.items():
        if state.phase == "running" and now - max(since, state.progressed_at) > state.settings.suspect_s:
            state, more = _lose(state, state.members[node], "node", since, now, proven=False)
            return _progress(state, now, effects + more)
    if state.result is None and now - max(state.progressed_at, state.looked_at) > _deadline_s(state):
        state, more = _look(state, now)
        effects = effects + more
    if state.phase == "running" and state.switching is None and not state.stop and not state.ends:
        return _switch(state, now, effects)
    return state, effects


def _may_start(state: State, now: float) -> bool:
    here = len(state.members)
    complete = state.expected is not None and here >= state.expected
    settled = here > 0 and now - state.changed_at >= state.settings.settle_s
    return complete or settled


def _collect(state: State, now: float, effects: list[Effect]) -> Result:
    """Waits until every member of the last plan has reported or is excluded."""
    asked: dict[str, str] = {}
    for publish in (state.published, state.switching):
        if publish is not None:
            asked |= {node: member.incarnation for node, member in publish.members.items()}
    silent = [
        member
        for node, member in state.members.items()
        if node not in state.reports and asked.get(node) == member.incarnation
    ]
    if silent and now - state.opened_at < state.settings.freeze_s:
        return state, effects
    for member in silent:  # its agent ends it at the same deadline; it comes back as one that holds nothing
        state, more = _lose(state, member, "node", now, now, proven=False)
        effects = effects + more
    return _decide(replace(state, decided_at=now), now, effects)


def _decide(state: State, now: float, effects: list[Effect]) -> Result:
    """Decides the outcome of the open step and the next plan together, and publishes them."""
    settings = state.settings
    last = state.switching or state.published
    voters = _voters(state)
    reports = [report for incarnation, report in state.evidence.items() if incarnation in voters]
    # Once a plan has formed, what it told has been carried out.
    unformed = last is not None and state.current != last.epoch
    outcome = decide(reports, last.outcome, last.epoch) if last is not None and unformed else decide(reports, None)
    lineage, held, live = state.lineage, {}, {}
    version = (lineage, 0, 0)
    if outcome is not None:
        live = {
            node: report if state.members[node].incarnation in voters else replace(report, voter=False)
            for node, report in state.reports.items()
            if node in state.members
        }
        told = last.version if last is not None else None
        version = version_after(reports, outcome, lineage, settings.exact, told)
        held = dict(holdings(live, outcome, version, lineage))
    usable = _usable(state)
    try:
        if len(usable) < settings.min_nodes:
            raise TooFewNodes(
                f"cluster.min_nodes is {settings.min_nodes}, {len(usable)} are here",
                needed=settings.min_nodes,
                present=len(usable),
            )
        found = _found(state, usable, held)
        if found.missing and outcome is not None and _may_be_void(reports, outcome, last):
            # The vote has passed, but a layer's gradients are lost with their holder. Nobody has applied or announced
            # the step: rather do it again than start from a snapshot.
            void = Outcome(outcome.step, None, 0)
            before = version_after(reports, void, lineage, settings.exact, last.version if last is not None else None)
            again = holdings(live, void, before, lineage)
            if not (other := _found(state, usable, again)).missing:
                outcome, version, found = void, before, other
    except TooFewNodes as error:
        if left_out := sorted(state.quarantined.keys() & state.members.keys()):
            state, more = _over(state, left_out, "it is needed")
            return _decide(state, now, [*effects, *more])
        if len(usable) < len(state.members) and _enough(state):
            refused = Record("drain_refused", {"nodes": sorted(state.draining), "reason": error.message})
            return _decide(replace(state, draining=frozenset()), now, [*effects, refused])
        return _wait(state, error.message, effects)
    except PlanError as error:
        return _finish_failed(state, error, "", effects)
    if found.missing and state.published is not None and not state.starting_over:
        holders = [at for at in state.unproven.values() if now - at < settings.rollback_after_s]
        if holders:
            names = ", ".join(settings.layers[layer] for layer in found.missing)
            return _wait(state, f"no live node holds {names}; waiting for one that may come back", effects)
    if outcome is None or found.missing or state.starting_over:
        return _start_over(state, found, outcome, unformed, now, effects)
    publish = Publish(
        epoch=_next_epoch(state),
        plan=found.plan,
        # A drained node carries the outcome out too: it holds its layers until the epoch has formed.
        members=_involved(state, found.plan, found.transfers) | _of(state, state.draining),
        outcome=outcome,
        version=version,
        lineage=lineage,
        base=None,
        sources=_sources(found.transfers),
        switch_from=None,
        form_s=_form_s(state),
        reason=_reason(state, found.reason),
    )
    return _published(state, publish, now, effects)


def _start_over(
    state: State, found: Reconfiguration, outcome: Outcome | None, unformed: bool, now: float, effects: list[Effect]
) -> Result:
    """The plan that starts from a checkpoint or the seeds, once the store has said from which.

    Every one claims a lineage of its own: a plan before it may have formed and begun, whatever has been heard of it.
    """
    state = replace(state, starting_over=True)
    base = state.base
    if base is None:
        if state.claiming or now < state.claim_after:
            return replace(state, phase="waiting"), effects
        claim = Claim(state.damaged, first=state.published is None)
        return replace(state, phase="waiting", claiming=True), [*effects, claim]
    last = state.switching or state.published
    where = {"lineage": base.lineage, "manifest": base.manifest}
    lost = 0
    if outcome is not None or state.current > 0:
        lost = max(0, max(state.step, outcome.after if outcome else 0) - base.step)
        again = unformed and last is not None and last.base is not None  # that one has told already
        if lost or not again:
            effects = [*effects, Record("rollback", {**where, "to_step": base.step, "lost_steps": lost})]
    elif base.manifest:
        effects = [*effects, Record("resumed", {**where, "step": base.step})]
    publish = Publish(
        epoch=_next_epoch(state),
        plan=found.plan,
        members=_involved(state, found.plan, ()) | _of(state, state.draining),
        outcome=None,
        version=(base.lineage, base.step, 0),
        lineage=base.lineage,
        base=base,
        sources={},
        switch_from=None,
        form_s=_form_s(state),
        reason=_reason(
            state, f"{found.reason}; from the checkpoint of step {base.step}" if base.manifest else found.reason
        ),
    )
    state = replace(
        state,
        step=base.step,
        starting_over=False,
        base=None,
        saves={},
        unsaved={},
        committing=None,
        lost_steps=state.lost_steps + lost,
    )
    return _published(state, publish, now, effects)


def _next_epoch(state: State) -> int:
    """A number that was opened by a freeze is used by the plan it leads to, however long that takes."""
    last = state.switching or state.published
    return max(state.epoch, (last.epoch if last is not None else 0) + 1)


def _form_s(state: State) -> float:
    return min(60.0, state.settings.form_s * 2.0**state.unformed_in_a_row)


def _published(state: State, publish: Publish, now: float, effects: list[Effect]) -> Result:
    state = replace(
        state,
        phase="forming",
        epoch=publish.epoch,
        lineage=publish.lineage,
        published=publish,
        switching=None,
        formed=frozenset(),
        ends={},
        evidence={},
        published_at=now,
        progressed_at=now,
        looking_since=None,
        transfer_s=0.0,
        waiting_for="",
    )
    return state, [*effects, publish]


def _not_based(state: State, reason: str, now: float) -> Result:
    note: list[Effect] = [Record("waiting", {"reason": reason})] if reason != state.waiting_for else []
    return replace(state, claiming=False, claim_after=now + CLAIM_AGAIN_S, waiting_for=reason), note


def _unreadable(state: State, event: Unreadable, now: float) -> Result:
    """Starts over from another checkpoint; the store's answer names the next older one."""
    published = state.published
    base = published.base if published is not None else None
    if published is None or base is None or event.epoch != published.epoch or base.manifest != event.manifest:
        return state, []
    if state.phase != "forming" or event.manifest in state.damaged:
        return state, []
    note = Record("checkpoint_rejected", {"step": base.step, "manifest": base.manifest, "reason": event.reason})
    state, effects = _open(replace(state, damaged=state.damaged | {event.manifest}), now)
    return _progress(replace(state, unformed_in_a_row=0), now, [note, *effects])


def _found(state: State, usable: list[Node], held: Mapping[str, frozenset[int]]) -> Reconfiguration:
    settings = state.settings
    return reconfigure(
        settings.profile,
        usable,
        held,
        microbatches=settings.microbatches,
        fault_tolerance=settings.fault_tolerance,
        device_bytes=settings.device_bytes,
        previous=state.published.plan if state.published else None,
    )


def _may_be_void(reports: Iterable[Report], outcome: Outcome, last: Publish | None) -> bool:
    """Whether nobody who lives has carried the decided step out, and no plan has told it."""
    before = last.outcome if last is not None else None
    told = before is not None and before.verdict is not None and before.step == outcome.step
    beyond = any(report.voter and report.step > outcome.step for report in reports)
    return outcome.verdict is not None and not told and not beyond


def _enough(state: State) -> bool:
    """Whether the nodes here would do if none of them were drained."""
    if len(state.members) < state.settings.min_nodes:
        return False
    try:
        _found(state, [Node(node) for node in sorted(state.members)], {})
    except PlanError:
        return False
    return True


def _voters(state: State) -> frozenset[str]:
    """The incarnations whose steps and votes count.

    Others were voters of an epoch long gone: one that was excluded and is back, or a spare that has not entered the
    newest plan yet. What they knew is in the outcome of a plan since. Nor does the step of another lineage count.
    """
    last = state.switching or state.published
    told = last.outcome if last is not None and state.current != last.epoch else None
    out = set()
    for incarnation, report in state.evidence.items():
        epoch = report.epoch
        stale = epoch is not None and epoch < state.current
        if epoch is not None and told is not None and last is not None and epoch < last.epoch:
            stale = stale or report.step not in (told.step, told.after)
        here = any(version[0] == state.lineage for version in report.holds.values())
        if report.voter and here and not stale:
            out.add(incarnation)
    return frozenset(out)


def _wait(state: State, reason: str, effects: list[Effect]) -> Result:
    """Nothing can run now. Survivors keep what they hold, and their reports stay good."""
    if state.stop:
        return _finish_stopped(state, effects)
    if reason != state.waiting_for:
        effects = [*effects, Record("waiting", {"reason": reason})]
    return replace(state, phase="waiting", waiting_for=reason), effects


def _involved(state: State, plan: Plan, transfers: Iterable[Transfer]) -> dict[str, Member]:
    """Whom the plan concerns: ranks, spares, and those that only hand layers over."""
    names = {stage.node for pipeline in plan.pipelines for stage in pipeline.stages} | set(plan.spares)
    names |= {source for transfer in transfers for source in transfer.sources}
    return _of(state, names)


def _of(state: State, nodes: Iterable[str]) -> dict[str, Member]:
    return {node: state.members[node] for node in sorted(nodes) if node in state.members}


def _sources(transfers: Iterable[Transfer]) -> Mapping[str, Mapping[int, tuple[str, ...]]]:
    out: dict[str, dict[int, tuple[str, ...]]] = {}
    for transfer in transfers:
        out.setdefault(transfer.node, {})[transfer.layer] = transfer.sources
    return out


def _reason(state: State, planner: str) -> str:
    if state.losses:
        causes = [f"{loss.node} raised" if loss.cause == "error" else f"{loss.node} lost" for loss in state.losses]
        return f"{', '.join(dict.fromkeys(causes))}; {planner}"
    if state.published is None:
        return f"{len(state.members)} of {state.expected or len(state.members)} nodes are here"
    return planner


# Joins and drains: the next plan is written before its flag enters a vote, and the switch needs no controller.


def _switch(state: State, now: float, effects: list[Effect]) -> Result:
    published = state.published
    assert published is not None
    joiners = sorted(
        node
        for node, member in state.members.items()
        if node not in state.draining and node not in state.quarantined and published.members.get(node, None) != member
    )
    leaving = sorted(state.draining & ranked(published))
    if not joiners and not leaving:
        return _release(state, effects)
    complete = state.expected is not None and len(state.members) >= state.expected
    if joiners and not leaving and not complete and now - state.changed_at < state.settings.join_settle_s:
        return state, effects
    settings = state.settings
    held = {
        stage.node: frozenset(range(stage.start, stage.stop))
        for pipeline in published.plan.pipelines
        for stage in pipeline.stages
    }
    usable = _usable(state)
    try:
        found = reconfigure(
            settings.profile,
            usable,
            held,
            microbatches=settings.microbatches,
            fault_tolerance=settings.fault_tolerance,
            device_bytes=settings.device_bytes,
            previous=published.plan,
        )
        if len(usable) < settings.min_nodes:
            raise TooFewNodes(
                f"cluster.min_nodes is {settings.min_nodes}", needed=settings.min_nodes, present=len(usable)
            )
    except PlanError as error:
        refused = Record("drain_refused", {"nodes": leaving, "reason": error.message})
        return replace(state, draining=state.draining - set(leaving)), [*effects, refused]
    if found.plan.pipelines == published.plan.pipelines:  # the new ones are spares: nothing has to change
        members = {**published.members, **{node: state.members[node] for node in joiners}}
        spare = replace(published, members=members)
        notes = [Record("spare", {"node": node}) for node in joiners]
        return replace(state, published=spare), [*effects, *notes]
    parts = []
    if joiners:
        parts.append(f"{', '.join(joiners)} joined")
    if leaving:
        parts.append(f"{', '.join(leaving)} drained")
    epoch = state.epoch + 1
    members = {**_involved(state, found.plan, found.transfers)}
    members |= {node: state.members[node] for node in ranked(published) if node in state.members}
    publish = Publish(
        epoch=epoch,
        plan=found.plan,
        members=members,
        outcome=None,
        version=None,
        lineage=state.lineage,
        base=None,
        sources=_sources(found.transfers),
        switch_from=published.epoch,
        form_s=settings.form_s,
        reason=f"{'; '.join(parts)}; {found.reason}",
    )
    state = replace(state, epoch=epoch, switching=publish, formed=frozenset(), published_at=now, evidence={})
    return state, [*effects, publish]


def _release(state: State, effects: list[Effect]) -> Result:
    """Drained nodes that are in no plan any more may go; their departure is no loss."""
    published = state.published
    assert published is not None
    gone = sorted(node for node in state.draining if node in state.members)
    for node in gone:
        members = {name: member for name, member in state.members.items() if name != node}
        in_plan = {name: member for name, member in published.members.items() if name != node}
        published = replace(published, members=in_plan)
        state = replace(
            state,
            members=members,
            published=published,
            draining=state.draining - {node},
            suspects=_without(state.suspects, node),
        )
        effects = [*effects, Record("node_released", {"node": node}), Release(node)]
    return state, effects


def _drain_requested(state: State, node: str, now: float) -> Result:
    if node in state.draining or node not in state.members:
        return state, []
    state = replace(state, draining=state.draining | {node})
    return _progress(state, now, [Record("draining", {"node": node})])


def _size_requested(state: State, nodes: int, now: float) -> Result:
    state, effects = _trim(replace(state, expected=nodes, size=nodes))
    # Nodes on their way out do not count, and are still there.
    leaving = len([node for node in state.draining if node in state.members])
    return _progress(state, now, [Record("size_requested", {"nodes": nodes}), *effects, Resize(nodes + leaving)])


def _trim(state: State) -> Result:
    """Drains the nodes with the highest numbers while there are more than were asked for."""
    effects: list[Effect] = []
    names = sorted((node for node in state.members if node not in state.draining), key=_by_number)
    for node in names[state.size :] if state.size is not None else ():
        state = replace(state, draining=state.draining | {node})
        effects.append(Record("draining", {"node": node}))
    return state, effects


def _by_number(node: str) -> tuple[int, str]:
    """``node-10`` after ``node-9``."""
    return (len(node), node)


# Forming and running.


def _formed(state: State, node: str, epoch: int, transfer_s: float, now: float) -> Result:
    newest = state.switching or state.published
    if newest is None or epoch != newest.epoch or node not in ranked(newest):
        return state, []
    formed = state.formed | {node}
    state = replace(state, formed=formed, transfer_s=max(state.transfer_s, transfer_s))
    return _all_formed(state, now) if formed >= ranked(newest) else (state, [])


def _all_formed(state: State, now: float) -> Result:
    newest = state.switching or state.published
    assert newest is not None
    if state.phase not in ("forming", "running") or state.current == newest.epoch:
        return state, []
    switched = state.switching is not None
    state = replace(
        state,
        phase="running",
        current=newest.epoch,
        published=newest,
        switching=None,
        formed_at=now,
        progressed_at=now,
        looking_since=None,
        reports={},
        evidence={},
        unproven={},
    )
    return state, [Current(newest.epoch), Record("formed", {"epoch": newest.epoch, "switched": switched})]


def _voted(state: State, event: Voted, now: float) -> Result:
    """Everybody has formed, and training has resumed."""
    epoch = event.epoch
    newest = state.switching or state.published
    effects: list[Effect] = []
    if newest is None or newest.epoch != epoch or state.phase not in ("forming", "running"):
        return state, []
    if state.current != epoch:
        state, effects = _all_formed(replace(state, formed=ranked(newest)), now)
    if newest.switch_from is not None and event.pause_s is not None and state.measured != epoch:
        steps = event.pause_s / event.step_s if event.step_s else None
        pause = {"epoch": epoch, "cause": newest.reason, "pause_s": event.pause_s, "pause_steps": steps}
        effects.append(Record("reconfigured", pause))
        state = replace(state, measured=epoch)
    state = replace(state, broken_in_a_row=0, unformed_in_a_row=0)
    if state.losses:
        effects.append(Record("recovered", _recovery(state, event, now)))
        state = replace(state, losses=(), lost_steps=0)
    return _progress(state, now, effects)


def _recovery(state: State, event: Voted, now: float) -> Mapping[str, Any]:
    first = min(loss.at for loss in state.losses)
    decided = state.decided_at or state.published_at
    formed = max(state.formed_at, state.published_at)
    phases = {
        "detect": state.opened_at - first,
        "quiesce": decided - state.opened_at,
        "plan": state.published_at - decided,
        "form": max(0.0, formed - state.published_at - state.transfer_s),
        "transfer": state.transfer_s,
        "first_step": now - formed,
    }
    losses = [
        {
            "cause": loss.cause,
            "node": loss.node,
            "incarnation": loss.incarnation,
            "detect_s": max(0.0, state.opened_at - loss.at),
        }
        for loss in state.losses
        if loss.cause in ("worker", "node", "hang")
    ]
    return {
        "epoch": event.epoch,
        "losses": losses,
        "resumed_at": event.at,
        "total_s": now - first,
        "lost_steps": state.lost_steps,
        "phases": {name: max(0.0, seconds) for name, seconds in phases.items()},
    }


# No progress although all agents are well: somebody hangs, and the others wait for it.


def _progressed(state: State, step: int, now: float) -> Result:
    pace_s = state.pace_s
    if state.step < step and state.phase == "running":
        pace_s = max((now - state.progressed_at) / (step - state.step), 0.95 * pace_s)
    return replace(state, step=max(state.step, step), progressed_at=now, pace_s=pace_s, looking_since=None), []


def _training(state: State) -> frozenset[str]:
    """The ranks that have not ended."""
    return ranked(state.published) - state.ends.keys()


def _deadline_s(state: State) -> float:
    if state.phase == "forming":  # which may take as long as layers take to come
        return FORMING_S
    if state.settings.progress_s is not None:
        return state.settings.progress_s
    return SLACK_S + SLACK * state.pace_s if state.pace_s else UNKNOWN_S


def _look(state: State, now: float) -> Result:
    if state.looking_since is None:
        number = state.look + 1
        return replace(state, look=number, looking_since=now, looked={}), [Look(number)]
    return _judge(state, now) if now - state.looking_since > ANSWER_S else (state, [])


def _looked(state: State, event: Looked, now: float) -> Result:
    member = state.members.get(event.node)
    if member is None or member.incarnation != event.incarnation or event.number != state.look:
        return state, []
    if state.looking_since is None or state.phase not in ("forming", "running"):
        return state, []
    state = replace(state, looked={**state.looked, event.node: event})
    return _judge(state, now) if state.looked.keys() >= _training(state) else (state, [])


def _judge(state: State, now: float) -> Result:
    """Only who does not wait for another is to blame. If all wait, they form again, all of them.

    While an epoch forms, layers are built and come from the store or from peers, within deadlines of their own: there
    only a process that does not run is to blame.
    """
    seen = {node: one for node, one in state.looked.items() if node in _training(state)}
    since, long_s, running = state.progressed_at, _deadline_s(state) / 2, state.phase == "running"
    blamed = [
        one
        for _, one in sorted(seen.items())
        if not one.runs or (running and one.kind == "computing" and one.still_s > long_s)
    ]
    state = replace(state, looking_since=None, looked_at=now)
    if blamed:
        effects: list[Effect] = []
        for one in blamed:
            what = one.what or one.kind
            data = {"node": one.node, "incarnation": one.incarnation, "what": what, "for_s": now - since}
            effects += [Record("hung", {**data, "runs": one.runs}), Kill(one.node, one.incarnation)]
        return replace(state, hung={**state.hung, **{one.incarnation: since for one in blamed}}), effects
    if not running or any(one.kind != "waiting" for one in seen.values()) or not seen:
        return state, []  # it is slow, and moves
    if state.broken_in_a_row >= MAX_BROKEN:
        error = NodeLost(f"{MAX_BROKEN} epochs in a row came to a standstill although no node died")
        return _finish_failed(state, error, "")
    state, effects = _open(replace(state, broken_in_a_row=state.broken_in_a_row + 1), now)
    return _progress(state, now, [Record("standstill", {"for_s": now - since}), *effects])


def _rank_ended(state: State, end: RankEnded) -> Result:
    if state.published is None or end.epoch != state.published.epoch or end.node not in ranked(state.published):
        return state, []
    if state.phase not in ("forming", "running"):
        return state, []
    ends = {**state.ends, end.node: end}
    state = replace(state, ends=ends)
    if ends.keys() < ranked(state.published):
        return state, []
    if end.kind == "non_finite":
        error = NonFinite(
            f"step {end.step + 1}: {end.reason}", "train.non_finite: skip goes on without such steps; lower the rate?"
        )
        return _finish_failed(state, error, end.node)
    digests: dict[str, str] = {}
    for rank in ends.values():
        for layer, digest in rank.digests.items():
            if digests.setdefault(layer, digest) != digest:
                return _finish_failed(
                    state,
                    ElasticError(
                        f"replicas of layer {layer!r} disagree",
                        "memory or a processor is at fault; --resume goes back to a checkpoint",
                    ),
                    rank.node,
                )
    result = {
        "state": end.kind,
        "step": end.step,
        "loss": end.loss,
        "params_digest": combined_digest([(layer, digests[layer]) for layer in state.settings.layers]),
        **end.ledger,
    }
    if state.committed is not None and state.committed[1] == end.step:
        return _finish(state, [], result)
    state = replace(state, result=result)
    # Every rank has told of its part before it ended.
    return _unsaved(state, state.unsaved[end.step], []) if end.step in state.unsaved else (state, [])


# Checkpoints: workers write their parts on their own; the controller makes them count.


def _saved(state: State, writer: str, version: Version, part: Mapping[str, Any]) -> Result:
    """Collects the parts of a version; when they hold all layers, it is committed, one at a time."""
    done = state.committed is not None and version[:2] <= state.committed[:2]
    if done or version[0] != state.lineage or version[1] in state.unsaved:
        return state, []
    effects: list[Effect] = []
    if version not in state.saves and not any(version[:2] == other[:2] for other in state.saves):
        effects.append(Record("checkpoint_started", {"step": version[1]}))
    parts = {**state.saves.get(version, {}), writer: part}
    state = replace(state, saves={**state.saves, version: parts})
    return _commit(state, effects)


def _commit(state: State, effects: list[Effect]) -> Result:
    if state.committing is not None:
        return state, effects
    every = set(range(len(state.settings.layers)))
    for version, parts in sorted(state.saves.items()):
        if {layer for part in parts.values() for layer in part["layers"]} >= every:
            return replace(state, committing=version), [*effects, Commit(version, parts)]
    return state, effects


def _committed(state: State, version: Version, manifest: str) -> Result:
    if version != state.committing:
        return state, []  # of a lineage before
    parts = state.saves[version].values()
    data = {
        "step": version[1],
        "version": list(version),
        "manifest": manifest,
        "bytes": sum(part["bytes"] for part in parts),
        "stall_s": max(part["stall_s"] for part in parts),
        "upload_s": max(part["upload_s"] for part in parts),
    }
    effects: list[Effect] = [Record("checkpoint_saved", data)]
    for other in sorted(state.saves):
        if other[:2] < version[:2]:
            reason = "a node that had a part of it was lost before it had written it"
            effects.append(Record("checkpoint_failed", {"step": other[1], "reason": reason}))
    newer = {other: parts for other, parts in state.saves.items() if other[:2] > version[:2]}
    state, effects = _commit(replace(state, committing=None, committed=version, saves=newer), effects)
    if state.result is not None and version[1] == state.result["step"]:
        return _finish(state, effects, state.result)
    return state, effects


def _not_saved(state: State, version: Version, reason: str) -> Result:
    """Training goes on; only at the end is a checkpoint that failed a failure of the job."""
    if version[0] != state.lineage:
        return state, []
    effects: list[Effect] = [Record("checkpoint_failed", {"step": version[1], "reason": reason})]
    saves = {other: parts for other, parts in state.saves.items() if other != version}
    committing = None if state.committing == version else state.committing
    state, effects = _commit(replace(state, saves=saves, committing=committing), effects)
    if state.result is not None and version[1] == state.result["step"]:
        return _unsaved(state, reason, effects)
    return replace(state, unsaved={**state.unsaved, version[1]: reason}), effects


def _unsaved(state: State, reason: str, effects: list[Effect]) -> Result:
    assert state.result is not None
    error = StoreUnreachable(
        f"all steps are done, but the last checkpoint could not be written: {reason}",
        "its weights are lost; repair the store and run the same command to train on from the checkpoint before",
    )
    return _finish(state, effects, {**state.result, "state": "failed", "error": error.as_json()})


def _stop_requested(state: State) -> Result:
    if state.stop:
        return state, []
    effects: list[Effect] = [Record("stop_requested", {})]
    state = replace(state, stop=True)
    if state.phase == "waiting":
        return _finish_stopped(state, effects)
    return state, effects  # workers carry the request into their next vote


def _finish_stopped(state: State, effects: list[Effect]) -> Result:
    return _finish(state, effects, {"state": "stopped", "step": state.step, "loss": None, "params_digest": None})


def _finish_failed(state: State, error: ElasticError, node: str, effects: list[Effect] | None = None) -> Result:
    result = {
        "state": "failed",
        "step": state.step,
        "loss": None,
        "params_digest": None,
        "error": error.as_json(),
        "node": node,
    }
    return _finish(state, effects or [], result)


def _finish(state: State, effects: list[Effect], result: Mapping[str, Any]) -> Result:
    return replace(state, phase="ended"), [*effects, Record("ended", result), Finish(result)]
