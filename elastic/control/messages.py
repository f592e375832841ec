"""What goes into the controller's state machine, and what comes out: its settings, events and effects. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.control.outcome import Outcome, Report, Version
from elastic.planning import ModelProfile, Plan


@dataclass(frozen=True)
class Settings:
    """What does not change during a run.

    Attributes:
        layers: names, in order; what digests are combined over.
        min_nodes: below this many nodes nothing runs.
        settle_s: at the start, go without the missing nodes after this long without a new one.
        join_settle_s: later, take several joiners in one plan if they come within this time.
        freeze_s: a member that has not reported this long after a freeze is excluded.
        form_s: bound for connecting, once all ranks have met; doubled after each epoch that did not form.
        rollback_after_s: how long holders that may still live are waited for.
        suspect_s: a member whose lease has expired is excluded after this long without an announced step.
        quarantine: whether a node that fails again and again is left out for a while.
        progress_s: without an announced step for so long, all workers are looked at; ``None`` learns it from the steps.
    """

    profile: ModelProfile
    layers: tuple[str, ...]
    microbatches: int
    fault_tolerance: int
    device_bytes: int | None
    min_nodes: int
    exact: bool
    settle_s: float = 10.0
    join_settle_s: float = 0.5
    freeze_s: float = 10.0
    form_s: float = 1.0
    rollback_after_s: float = 15.0
    suspect_s: float = 5.0
    progress_s: float | None = None
    quarantine: bool = False


@dataclass(frozen=True)
class Member:
    """One incarnation of a node's worker, ready to be planned in.

    Attributes:
        agent: address of the agent's probe server; all incarnations of one agent process share it.
        store, layers: addresses of the worker's c10d store and layer server.
    """

    node: str
    incarnation: str
    agent: str
    store: str
    layers: str
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
    """The member key of this incarnation is gone: its lease ran out. Proves nothing about the process."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class AgentGone:
    """The process of the agent has ended, and its workers with it; proven."""

    agent: str


@dataclass(frozen=True)
class WorkerExited:
    """A worker process ended although nobody told it to; ``log`` names the file that may say why; ``age_s`` ago."""

    node: str
    incarnation: str
    code: int
    log: str
    age_s: float = 0.0


@dataclass(frozen=True)
class Expected:
    """How many nodes will come as far as is known (agents started)."""

    nodes: int


@dataclass(frozen=True)
class Frozen:
    node: str
    incarnation: str
    epoch: int
    report: Report


@dataclass(frozen=True)
class Formed:
    node: str
    epoch: int
    form_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Voted:
    """The first vote of an epoch has passed; every rank has formed, then.

    ``pause_s`` is the time since this rank's last vote before, ``step_s`` what a step took then; ``None`` for a joiner.
    """

    node: str
    epoch: int
    pause_s: float | None = None
    step_s: float | None = None
    at: float | None = None  # wall-clock seconds, only passed on


@dataclass(frozen=True)
class Progressed:
    """Announced steps have reached ``step``: votes pass."""

    step: int


@dataclass(frozen=True)
class Looked:
    """What a worker was found doing, by its agent; the answer to the `Look` of that number.

    Attributes:
        kind: ``waiting`` for peers, ``computing``, or ``storing``, at the checkpoint store.
        still_s: for how long it has been at just that.
        runs: its interpreter does; a process that is stopped, or is stuck in foreign code, does not.
    """

    node: str
    incarnation: str
    number: int
    kind: str
    what: str
    still_s: float
    runs: bool


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
    step: int
    error: Mapping[str, str]
    age_s: float = 0.0


@dataclass(frozen=True)
class Broken:
    """A collective or a transfer failed on this node: a peer is gone, or the network."""

    node: str
    epoch: int
    reason: str
    age_s: float = 0.0


@dataclass(frozen=True)
class Base:
    """Where training starts over: a committed checkpoint, or the seeds, which are step 0 and have no ``manifest``.

    ``lineage`` was claimed for what follows: checkpoints of lineages before it that are newer never count again.
    """

    lineage: int
    step: int = 0
    manifest: str = ""


@dataclass(frozen=True)
class Based:
    """The answer to `Claim`."""

    base: Base


@dataclass(frozen=True)
class NotBased:
    """The checkpoint store did not answer `Claim`."""

    reason: str


@dataclass(frozen=True)
class Unreadable:
    """A worker found that the checkpoint it was to start from is damaged."""

    node: str
    epoch: int
    manifest: str
    reason: str


@dataclass(frozen=True)
class Saved:
    """A worker has written its part of a checkpoint; ``part`` names what, and the ``layers`` in it."""

    writer: str
    version: Version
    part: Mapping[str, Any]


@dataclass(frozen=True)
class NotSaved:
    node: str
    version: Version
    reason: str


@dataclass(frozen=True)
class Committed:
    """The answer to `Commit`: the checkpoint counts."""

    version: Version
    manifest: str


@dataclass(frozen=True)
class NotCommitted:
    version: Version
    reason: str


@dataclass(frozen=True)
class StopRequested:
    pass


@dataclass(frozen=True)
class DrainRequested:
    """The node is to hand over its work and go."""

    node: str


@dataclass(frozen=True)
class ReleaseRequested:
    """The node's quarantine is to end."""

    node: str


@dataclass(frozen=True)
class SizeRequested:
    """A local run is to have this many nodes; those above leave as by a drain, those missing are started elsewhere."""

    nodes: int


@dataclass(frozen=True)
class Tick:
    pass


Event = (
    Joined
    | Refused
    | Left
    | AgentGone
    | WorkerExited
    | Expected
    | Frozen
    | Formed
    | Voted
    | Progressed
    | Looked
    | RankEnded
    | Failed
    | Broken
    | Based
    | NotBased
    | Unreadable
    | Saved
    | NotSaved
    | Committed
    | NotCommitted
    | StopRequested
    | DrainRequested
    | ReleaseRequested
    | SizeRequested
    | Tick
)


@dataclass(frozen=True)
class Freeze:
    """Open this epoch: every worker stops and reports."""

    epoch: int


@dataclass(frozen=True)
class Publish:
    """Write this plan, in one fenced transaction with its reason and the outcome of the open step.

    Attributes:
        version: of every layer at the start; ``None`` for a switch, which decides it by its vote.
        sources: for each node, the layers it must fetch, and the nodes that hold them.
        base: where all members start over, whatever they hold; ``None`` if they go on with what they hold.
        switch_from: the epoch whose members switch at a voted step; ``None`` if they are frozen.
    """

    epoch: int
    plan: Plan
    members: Mapping[str, Member]
    outcome: Outcome | None
    version: Version | None
    lineage: int
    base: Base | None
    sources: Mapping[str, Mapping[int, tuple[str, ...]]]
    switch_from: int | None
    form_s: float
    reason: str


@dataclass(frozen=True)
class Current:
    """The epoch is the one that counts: its members' writes are accepted."""

    epoch: int


@dataclass(frozen=True)
class Release:
    """The node has handed over everything and may go."""

    node: str


@dataclass(frozen=True)
class Look:
    """Have every agent say what its worker does."""

    number: int


@dataclass(frozen=True)
class Kill:
    """Have the agent end its worker, which hangs."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class Resize:
    """Have agents started until there are this many; none is ended by it."""

    nodes: int


@dataclass(frozen=True)
class Claim:
    """Claim the next lineage in the checkpoint store, from the newest checkpoint but those that are ``damaged``.

    ``first`` is that of a run, which may start from an older one that the user named.
    """

    damaged: frozenset[str]
    first: bool


@dataclass(frozen=True)
class Commit:
    """Make a checkpoint of these parts, by writer, count."""

    version: Version
    parts: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Record:
    """Append to the job's history."""

    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Finish:
    """The job has ended; ``result`` is what ``elastic run --json`` is made of."""

    result: Mapping[str, Any]


Effect = Freeze | Publish | Current | Release | Resize | Look | Kill | Claim | Commit | Record | Finish
