"""The controller's state machine. Pure: ``(state, event, now) → (state, effects)``; every effect carries its reason.

The same function is driven by the controller against etcd, by tests, and by a simulator in virtual time. It sees
events, not clocks: ``now`` is seconds on any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.digest import combined_digest
from elastic.errors import ConfigError, ElasticError, NodeLost, NonFinite, PlanError, from_json
from elastic.planning import ModelProfile, Node, Plan, TooFewNodes, make_plan

Json = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What does not change during a run.

    Attributes:
        min_nodes: below this many nodes nothing starts.
        settle_s: when not all expected nodes came, start with those there after this long without a new one.
        layers: names, in order; what digests are combined over.
    """

    profile: ModelProfile
    layers: tuple[str, ...]
    microbatches: int
    fault_tolerance: int
    device_bytes: int | None
    min_nodes: int
    exact: bool
    settle_s: float = 10.0


@dataclass(frozen=True)
class Member:
    """One incarnation of a node, ready to be planned in. ``store`` is ``host:port`` of its worker's c10d store."""

    node: str
    incarnation: str
    store: str
    agent_pid: int
    worker_pid: int
    fingerprint: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Joined:
    member: Member


@dataclass(frozen=True)
class Refused:
    """The node found that it cannot take part, for example because it does not see the checkpoint store."""

    node: str
    reason: str


@dataclass(frozen=True)
class Left:
    """The member key of this incarnation is gone: its lease ran out, or it was taken back."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class Expected:
    """How many nodes will come as far as is known (agents started)."""

    nodes: int


@dataclass(frozen=True)
class Formed:
    node: str
    epoch: int


@dataclass(frozen=True)
class RankEnded:
    """A rank's training returned: ``kind`` is ``done``, ``stopped`` or ``non_finite``; ``digests`` by layer name."""

    node: str
    epoch: int
    kind: str
    step: int
    reason: str
    loss: float | None
    digests: Mapping[str, str]
    ledger: Mapping[str, int]


@dataclass(frozen=True)
class Failed:
    """The user's code, or a refusal by name; ``error`` as of ``ElasticError.as_json``. Epoch 0 is before any plan."""

    node: str
    epoch: int
    error: Mapping[str, str]


@dataclass(frozen=True)
class Broken:
    """A collective failed on this node."""

    node: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class WorkerExited:
    """A worker process ended although nobody told it to; ``log`` names the file that may say why."""

    node: str
    incarnation: str
    code: int
    log: str


@dataclass(frozen=True)
class StopRequested:
    pass


@dataclass(frozen=True)
class Tick:
    pass


Event = Joined | Refused | Left | Expected | Formed | RankEnded | Failed | Broken | WorkerExited | StopRequested | Tick


@dataclass(frozen=True)
class Publish:
    """Write this plan as the next epoch, in one fenced transaction with the record of why."""

    epoch: int
    plan: Plan
    members: Mapping[str, Member]
    step: int
    reason: str


@dataclass(frozen=True)
class Record:
    """Append to the job's history."""

    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Finish:
    """The job has ended; ``result`` is what ``elastic run --json`` is made of."""

    result: Mapping[str, Any]


Effect = Publish | Record | Finish


@dataclass(frozen=True)
class State:
    """
    Attributes:
        phase: ``waiting`` (no epoch runs), ``forming``, ``running`` or ``ended``.
        members: live incarnations by node.
        changed_at: when the membership last changed, for `Settings.settle_s`.
        plan, in_plan: of the current epoch; ``in_plan`` holds the incarnations planned in.
        formed, ends: what the epoch's nodes reported.
        waiting_for: why nothing runs, as last recorded.
    """

    settings: Settings
    phase: str = "waiting"
    members: Mapping[str, Member] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    expected: int | None = None
    changed_at: float = 0.0
    epoch: int = 0
    step: int = 0
    plan: Plan | None = None
    in_plan: Mapping[str, Member] = field(default_factory=dict)
    formed: frozenset[str] = frozenset()
    ends: Mapping[str, RankEnded] = field(default_factory=dict)
    stop: bool = False
    waiting_for: str = ""


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
        case Expected(nodes):
            return _maybe_start(replace(state, expected=nodes), now, [])
        case Formed(node, epoch):
            return _formed(state, node, epoch)
        case RankEnded():
            return _rank_ended(state, event)
        case Failed(node, epoch, error):
            if epoch in (0, state.epoch):
                return _finish_failed(state, from_json(dict(error)), node)
        case Broken(node, epoch, reason):
            if epoch == state.epoch:
                return _finish_failed(state, NodeLost(f"a collective failed on {node}: {reason}"), node)
        case WorkerExited(node, incarnation, code, log):
            return _worker_exited(state, node, incarnation, code, log)
        case StopRequested():
            return _stop_requested(state)
        case Tick():
            return _maybe_start(state, now, [])
    return state, []


def _joined(state: State, member: Member, now: float) -> Result:
    refused = _refusal(state, member)
    if refused:
        return state, [Record("node_refused", {"node": member.node, "reason": refused})]
    known = state.members.get(member.node)
    if known is not None and known.incarnation == member.incarnation:
        return state, []
    state = replace(state, members={**state.members, member.node: member}, changed_at=now)
    data = {"node": member.node, "incarnation": member.incarnation}
    return _maybe_start(state, now, [Record("node_joined", data)])


def _refused(state: State, node: str, reason: str) -> Result:
    refused = state.refused | {node}
    effects: list[Effect] = [Record("node_refused", {"node": node, "reason": reason})]
    state = replace(state, refused=refused)
    if state.expected is not None and len(refused) >= state.expected:
        return _finish_failed(state, ConfigError(f"every node was refused; {node}: {reason}"), node, effects)
    return state, effects


def _refusal(state: State, member: Member) -> str:
    """Why the member cannot be in an exact job: its bits would differ from those of the members before it."""
    if not state.settings.exact:
        return ""
    for other in state.members.values():
        theirs, mine = other.fingerprint, member.fingerprint
        keys = sorted(key for key in theirs.keys() | mine.keys() if theirs.get(key) != mine.get(key))
        if keys:
            facts = ", ".join(f"{key} is {mine.get(key)}, {other.node} has {theirs.get(key)}" for key in keys)
            return f"reduction 'exact' needs equal numerics on all nodes: {facts}"
    return ""


def _left(state: State, node: str, incarnation: str, now: float) -> Result:
    member = state.members.get(node)
    if member is None or member.incarnation != incarnation:
        return state, []
    members = {name: other for name, other in state.members.items() if name != node}
    state = replace(state, members=members, changed_at=now)
    effects: list[Effect] = [Record("node_left", {"node": node, "incarnation": incarnation})]
    if state.phase in ("forming", "running") and _planned(state, node, incarnation) and node not in state.ends:
        state, more = _finish_failed(state, NodeLost(f"{node} was lost in epoch {state.epoch}"), node)
        return state, effects + more
    return state, effects


def _planned(state: State, node: str, incarnation: str) -> bool:
    member = state.in_plan.get(node)
    return member is not None and member.incarnation == incarnation


def _maybe_start(state: State, now: float, effects: list[Effect]) -> Result:
    """Plans the first epoch when all expected nodes are there, or enough of them and no more come."""
    if state.phase != "waiting":
        return state, effects
    settings, here = state.settings, len(state.members)
    complete = state.expected is not None and here >= state.expected
    settled = here > 0 and now - state.changed_at >= settings.settle_s
    if not (complete or settled):
        return state, effects
    nodes = [Node(name) for name in sorted(state.members)]
    try:
        if here < settings.min_nodes:
            raise TooFewNodes(
                f"cluster.min_nodes is {settings.min_nodes}, {here} are here", needed=settings.min_nodes, present=here
            )
        plan = make_plan(
            settings.profile,
            nodes,
            microbatches=settings.microbatches,
            fault_tolerance=settings.fault_tolerance,
            device_bytes=settings.device_bytes,
        )
    except TooFewNodes as error:
        if error.message != state.waiting_for:
            effects = [*effects, Record("waiting", {"reason": error.message})]
        return replace(state, waiting_for=error.message), effects
    except PlanError as error:
        return _finish_failed(state, error, "", effects)
    epoch = state.epoch + 1
    used = {stage.node for pipeline in plan.pipelines for stage in pipeline.stages}
    in_plan = {name: state.members[name] for name in sorted(used)}
    state = replace(
        state, phase="forming", epoch=epoch, plan=plan, in_plan=in_plan, formed=frozenset(), ends={}, waiting_for=""
    )
    reason = f"{here} of {state.expected or here} nodes are here"
    return state, [*effects, Publish(epoch, plan, in_plan, state.step, reason)]


def _formed(state: State, node: str, epoch: int) -> Result:
    if epoch != state.epoch or state.phase != "forming" or node not in state.in_plan:
        return state, []
    formed = state.formed | {node}
    if formed >= set(state.in_plan):
        return replace(state, formed=formed, phase="running"), [Record("formed", {"epoch": epoch})]
    return replace(state, formed=formed), []


def _rank_ended(state: State, end: RankEnded) -> Result:
    if end.epoch != state.epoch or end.node not in state.in_plan:
        return state, []
    ends = {**state.ends, end.node: end}
    state = replace(state, ends=ends, step=end.step)
    if ends.keys() < state.in_plan.keys():
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
                return _finish_failed(state, ElasticError(f"replicas of layer {layer!r} disagree"), rank.node)
    result = {
        "state": end.kind,
        "step": end.step,
        "loss": end.loss,
        "params_digest": combined_digest([(layer, digests[layer]) for layer in state.settings.layers]),
        **end.ledger,
    }
    return _finish(state, [], result)


def _worker_exited(state: State, node: str, incarnation: str, code: int, log: str) -> Result:
    started = state.phase in ("forming", "running")
    if (started and not _planned(state, node, incarnation)) or node in state.ends:
        return state, []
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    error = NodeLost(f"the worker of {node} ended {how}", f"its log is {log}")
    return _finish_failed(state, error, node)


def _stop_requested(state: State) -> Result:
    if state.stop:
        return state, []
    effects: list[Effect] = [Record("stop_requested", {})]
    state = replace(state, stop=True)
    if state.phase == "waiting":
        result = {"state": "stopped", "step": state.step, "loss": None, "params_digest": None}
        return _finish(state, effects, result)
    return state, effects  # workers carry the request into their next vote


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
