"""A model of everything around the state machine: workers that behave as ``engine/session.py`` does, their agents, and
a network that delays, reorders between nodes, and loses what a dead node still had to send.

Bits are symbolic: those of a layer are the exact sequence of decided steps that was applied to it, so a wrong commit,
a step done twice, or a mix of two worlds shows. With exact reduction a step done again gives the same bits; with fast
reduction it has the epoch of its vote in it.

The world is moved by actions, tuples such as ``("work", "node-1")``; `World.actions` lists those that are possible.
One that is not possible any more does nothing, so that any part of a list of actions can be played (see `shrink`).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
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
    Progressed,
    Publish,
    RankEnded,
    Record,
    Release,
    Saved,
    SizeRequested,
    StopRequested,
    Tick,
    Unreadable,
    Voted,
    WorkerExited,
)
from elastic.control.outcome import Report, Version
from elastic.control.state import State, advance, ranked
from tests.control.machine import LAYERS, settings

Action = tuple[Any, ...]
Bits = tuple[Any, ...]
MEET_S = 20.0
FREEZE_S = 5.0  # the agent ends a worker that has not frozen by then
USER_ERROR = {"code": "user_code", "message": "raised", "hint": ""}


class Violation(AssertionError):
    """A promise of the protocol is broken."""


@dataclass(frozen=True)
class Shape:
    """What does not change in a world.

    Attributes:
        redo, skip: steps whose first vote says so.
        errors: how often the user's code raises, all together.
    """

    nodes: int = 3
    steps: int = 6
    device_bytes: int | None = None
    fault_tolerance: int = 0
    min_nodes: int = 1
    exact: bool = True
    redo: frozenset[int] = frozenset()
    skip: frozenset[int] = frozenset()
    errors: int = 2
    quarantine: bool = False
    every: int = 2  # steps from checkpoint to checkpoint

    def settings(self) -> Any:
        return settings(
            device_bytes=self.device_bytes,
            fault_tolerance=self.fault_tolerance,
            min_nodes=self.min_nodes,
            exact=self.exact,
            progress_s=8.0,
            quarantine=self.quarantine,
        )


@dataclass(frozen=True)
class Held:
    """A layer as a worker holds it."""

    version: Version
    bits: Bits


@dataclass(frozen=True)
class Progress:
    """``done`` has every decided step once: how it was decided and, with fast reduction, in which epoch."""

    step: int = 0
    scale: int = -1  # the committed step that the exponents come from
    done: Bits = ()


@dataclass
class Open:
    """``engine.step.Epoch``: one rank's part in one plan."""

    epoch: int
    lineage: int
    own: range
    prepared: int | None = None
    last_vote: tuple[int, Mapping[str, Any]] | None = None
    redone: int | None = None  # the step whose scale was changed here
    announce: bool = False  # the last decided step is not announced yet


@dataclass
class Run:
    """Where the training thread is in an epoch: ``meet``, ``compute``, ``reduce``, ``see`` or ``follow``."""

    publish: Publish
    started: float
    todo: list[int]  # layers to fetch
    built: dict[int, Held]  # put in place together, when all are there
    progress: Progress | None = None  # as told with the layers
    at: str = "meet"
    vote: int = 0  # number of the vote within the epoch
    closing: str = ""  # the kind of end that the vote under way leads to


@dataclass
class Ballots:
    cast: dict[str, Mapping[str, bool]] = field(default_factory=dict)  # by incarnation
    verdict: dict[str, Any] | None = None


class Worker:
    """The session of one incarnation.

    It does what the session must do for the promises to hold: the newest vote is told also when its epoch has
    been left, until another one passes or a plan says otherwise; a plan to switch to is not entered but by the voted
    switch; progress comes with fetched layers, also where the step is the same; a torn layer is dropped; a commit is
    carried out only where it is prepared; what a voided redo did to the exponents is undone.
    """

    def __init__(self, world: World, member: Member) -> None:
        self.world, self.member = world, member
        self.node, self.incarnation = member.node, member.incarnation
        self.alive = True
        self.hung = False
        self.stop = False
        self.newest = self.entered = self.trained = 0
        self.next: Publish | None = None
        self.layers: dict[int, Held] = {}
        self.progress = Progress()
        self.voter = False
        self.open: Open | None = None
        self.vote: tuple[int, int, Mapping[str, Any]] | None = None  # the newest seen, also in an epoch left behind
        self.commands: list[Publish] = []
        self.run: Run | None = None

    def send(self, event: Event) -> None:
        self.world.queues[self.node].append(event)

    # The listening thread.

    def offer(self, publish: Publish) -> None:
        formed = self.run is not None and self.run.at != "meet"
        if publish.switch_from is not None and publish.switch_from == self.newest and formed:
            self.next = publish
        elif publish.switch_from is not None and self.open is not None and self.open.epoch == publish.switch_from:
            pass  # its epoch broke here before the switch: the step that is open must stay so
        else:
            self.commands.append(publish)

    def freeze(self, epoch: int) -> None:
        if epoch <= self.newest:
            return
        self.newest, self.next, self.run = epoch, None, None
        if self.hung:
            return
        self.send(Frozen(self.node, self.incarnation, epoch, self.report()))

    def report(self) -> Report:
        prepared = self.open.prepared if self.open is not None else None
        holds = {index: held.version for index, held in self.layers.items()}
        report = Report(self.voter, self.progress.step, prepared, self.vote, holds)
        if "due" in Report.__dataclass_fields__:
            due = frozenset(self.open.own if self.open is not None else ())
            report = replace(report, due=due, epoch=self.trained)
        return report

    # The training thread.

    def can_work(self) -> bool:
        if not self.alive or self.hung:
            return False
        if self.run is None:
            return bool(self.commands)
        run, world = self.run, self.world
        match run.at:
            case "meet":
                return self._fetchable() is not None or self._all_here() or self._overdue()
            case "reduce":
                computed = world.computed.get((run.publish.epoch, run.vote), set())
                return world.ranks(run.publish) <= computed
            case "see":
                ballots = world.ballots[run.publish.epoch, run.vote]
                return world.ranks(run.publish) <= ballots.cast.keys()
        return True

    def work(self) -> None:
        if self.run is None:
            self._begin(self.commands.pop(0))
            return
        getattr(self, "_" + self.run.at)(self.run)

    def _begin(self, publish: Publish) -> None:
        if publish.epoch < self.newest:
            return
        self.newest, self.next = publish.epoch, None
        self._settle(publish)
        self.entered = publish.epoch
        if self.node not in ranked(publish):
            return  # still a voter: it alone may know how far the epoch was that it leaves
        mine, built = own(publish, self.node), {}
        if publish.base is not None:
            manifest = publish.base.manifest
            if manifest in self.world.damaged:
                self.send(Unreadable(self.node, publish.epoch, manifest, "a hash differs"))
                return
            kept = self.world.store[manifest]
            built = {index: Held(publish.version, kept.bits[index]) for index in mine}
            self.progress = kept.progress
        todo = sorted(publish.sources.get(self.node, {}))
        self.run = Run(publish, self.world.now, todo, built)
        lacking = [i for i in mine if i not in self.layers and i not in todo and i not in built]
        self.world.demand(not lacking, f"{self.node} gets layers {lacking} of plan {publish.epoch} nowhere")
        self.world.here.setdefault(publish.epoch, set()).add(self.incarnation)

    def _settle(self, publish: Publish) -> None:
        outcome, open_ = publish.outcome, self.open
        self.open = None
        if publish.base is not None:
            self.layers, self.progress, self.vote = {}, Progress(), None
        elif open_ is not None and outcome is not None and outcome.verdict is not None:
            kind, here = outcome.verdict["kind"], self.progress.step == outcome.step
            # One that was given up and is back may not have it prepared: then its layers are out of date.
            if here and (kind != "commit" or open_.prepared == outcome.step):
                self._apply(open_, outcome.verdict)
        if outcome is not None:  # what a plan says of a step counts more than what was heard before
            self.vote = None if outcome.verdict is None else (outcome.step, outcome.epoch, outcome.verdict)
        if publish.switch_from is not None and (open_ is None or open_.epoch != publish.switch_from):
            self.layers, self.voter, self.vote = {}, False, None
        if publish.version is not None:
            self.layers = {i: held for i, held in self.layers.items() if held.version == publish.version}

    def _fetchable(self) -> int | None:
        """A layer whose holders all have it, or one of them is gone."""
        run = self.run
        assert run is not None
        for index in run.todo:
            found = [self._source(index, source) for source in run.publish.sources[self.node][index]]
            if "gone" in found or all(isinstance(held, Held) for held in found):
                return index
        return None

    def _source(self, index: int, node: str) -> Held | str:
        run = self.run
        assert run is not None
        publish = run.publish
        holder = self.world.workers.get(publish.members[node].incarnation)
        if holder is None or not holder.alive:
            return "gone"
        if holder.entered < publish.epoch:
            return "later"
        held = holder.layers.get(index)
        if holder.newest == publish.epoch:
            good = held is not None and publish.version in (None, held.version)
            self.world.demand(good, f"plan {publish.epoch}: {node} is to give layer {index}, and has {held}")
        return held if held is not None and publish.version in (None, held.version) else "later"

    def _all_here(self) -> bool:
        run = self.run
        assert run is not None
        epoch = run.publish.epoch
        return (
            not run.todo
            and self.world.ranks(run.publish) <= self.world.here[epoch]
            and (epoch in self.world.met or all(self.world.inside(i, epoch) for i in self.world.ranks(run.publish)))
        )

    def _overdue(self) -> bool:
        run = self.run
        assert run is not None
        return run.publish.switch_from is None and self.world.now - run.started > MEET_S

    def _meet(self, run: Run) -> None:
        publish, index = run.publish, self._fetchable()
        if index is not None:
            found = [self._source(index, source) for source in publish.sources[self.node][index]]
            holders = [held for held in found if isinstance(held, Held)]
            if len(holders) < len(found):
                self.fail("a holder is gone")
                return
            self.world.demand(len(set(holders)) == 1, f"holders of layer {index} disagree: {found}")
            run.built[index] = holders[0]
            run.todo.remove(index)
            giver = self.world.workers[publish.members[publish.sources[self.node][index][0]].incarnation]
            run.progress = giver.progress
        elif self._all_here():
            self.world.met.add(publish.epoch)
            self.layers |= run.built
            # Also when the step is the same: the exponents may not be.
            self.progress = run.progress or self.progress
            self.open = Open(publish.epoch, publish.lineage, own(publish, self.node), announce=self.progress.step > 0)
            self.voter, self.trained = True, publish.epoch
            self.send(Formed(self.node, publish.epoch))
            run.at = "compute"
        else:
            self.fail("ranks did not come")

    def _compute(self, run: Run) -> None:
        assert self.open is not None
        if not run.closing:
            self.open.prepared = None
            if self.progress.step >= self.world.shape.steps:
                run.closing = "done"
        if run.closing:
            self._cast(run)
            return
        self.world.computed.setdefault((run.publish.epoch, run.vote), set()).add(self.incarnation)
        run.at = "reduce"

    def _reduce(self, run: Run) -> None:
        assert self.open is not None
        self.open.prepared = self.progress.step
        self._cast(run)

    def _cast(self, run: Run) -> None:
        flags = {"stop": self.stop, "switch": self.next is not None}
        ballots = self.world.ballots.setdefault((run.publish.epoch, run.vote), Ballots())
        ballots.cast[self.incarnation] = flags
        run.at = "see"

    def _see(self, run: Run) -> None:
        assert self.open is not None
        verdict = self.world.verdict(run)
        if run.vote == 0:
            mine = own(run.publish, self.node)
            self.layers = {index: held for index, held in self.layers.items() if index in mine}
            self.send(Voted(self.node, run.publish.epoch, 0.1, 0.05))
        run.vote += 1
        if self.open.announce and self.node == run.publish.plan.ranks()[0].node:
            self.world.announce(self, run.publish)
        self.open.announce = False
        if run.closing:
            self._end(run, run.closing)
            return
        self.open.last_vote = (self.progress.step, verdict)
        self.vote = (self.progress.step, run.publish.epoch, verdict)
        run.at = "follow"

    def _follow(self, run: Run) -> None:
        assert self.open is not None
        assert self.open.last_vote is not None
        verdict = self.open.last_vote[1]
        self._apply(self.open, verdict)
        self.open.announce = self.open.announce or verdict["kind"] != "redo"
        run.at = "compute"
        if verdict["kind"] != "redo" and self.progress.step % self.world.shape.every == 0:
            self.save(self.open)
        if verdict["kind"] == "redo" or self.progress.step >= self.world.shape.steps:
            return
        if verdict["stop"]:
            run.closing = "stopped"
        elif verdict["switch"]:
            self.world.ended.add((self.incarnation, run.publish.epoch))
            self.run = None
            if self.next is not None:
                self._begin(self.next)

    def _apply(self, open_: Open, verdict: Mapping[str, Any], torn: int | None = None) -> None:
        """Carries out a verdict; an optimizer that raises at its layer number ``torn`` leaves those up to it torn."""
        exact, step = self.world.shape.exact, self.progress.step
        if torn is not None:
            for index in list(open_.own)[: torn + 1]:
                self.layers.pop(index, None)
            return
        if verdict["kind"] in ("commit", "skip"):
            # The vote's values go with gradients of the same epoch only.
            token = step if exact else (step, verdict["epoch"], open_.epoch)
            version = (open_.lineage, step + 1, 0 if exact else verdict["epoch"])
            for index in open_.own:
                held = self.layers.get(index)
                if held is None:
                    continue  # torn
                bits = (*held.bits, token) if verdict["kind"] == "commit" else held.bits
                self.layers[index] = Held(version, bits)
            entry = (step, verdict["kind"], None if exact else verdict["epoch"])
            self.progress = replace(self.progress, step=step + 1, done=(*self.progress.done, entry))
        if exact and verdict["kind"] == "commit":
            self.progress = replace(self.progress, scale=step)
        open_.redone = step if verdict["kind"] == "redo" else None
        open_.prepared = None

    def save(self, open_: Open) -> None:
        """Writes this rank's layers to the store; the part counts once the controller has heard of it."""
        (version,) = {self.layers[index].version for index in open_.own}
        kept = self.world.written.setdefault(version, Kept({}, self.progress))
        self.world.demand(kept.progress == self.progress, f"ranks save {version} with different progress")
        for index in open_.own:
            bits = self.layers[index].bits
            same = kept.bits.setdefault(index, bits) == bits
            self.world.demand(same, f"layer {index} of {version} is saved with different bits")
        part = {"layers": list(open_.own), "bytes": 1, "stall_s": 0.0, "upload_s": 0.0}
        self.send(Saved(f"{self.incarnation}-{open_.epoch}", version, part))

    def _end(self, run: Run, kind: str) -> None:
        epoch = run.publish.epoch
        assert self.open is not None
        self.save(self.open)
        self.world.ended.add((self.incarnation, epoch))
        self.run = None
        digests = {LAYERS[i]: digest(self.layers[i].bits) for i in own(run.publish, self.node)}
        ledger = {"samples": len(self.progress.done), "lost": 0, "repeated": 0}
        self.send(RankEnded(self.node, epoch, kind, self.progress.step, "", 1.0, digests, ledger))

    def fail(self, reason: str) -> None:
        """A collective or a transfer raised: no further one of this epoch is started."""
        assert self.run is not None
        epoch, self.run = self.run.publish.epoch, None
        self.send(Broken(self.node, epoch, reason))

    def raises(self, torn: int | None) -> None:
        """The user's code raises, in the forward pass or in the optimizer of a layer."""
        assert self.run is not None
        assert self.open is not None
        if torn is not None and self.open.last_vote is not None:
            self._apply(self.open, self.open.last_vote[1], torn)
        epoch, self.run = self.run.publish.epoch, None
        self.send(Failed(self.node, epoch, self.progress.step, USER_ERROR))


def own(publish: Publish, node: str) -> range:
    place = next((place for place in publish.plan.ranks() if place.node == node), None)
    return range(place.start, place.stop) if place is not None else range(0)


def digest(bits: Bits) -> str:
    return hashlib.md5(repr(bits).encode()).hexdigest()


@dataclass(frozen=True)
class Kept:
    """A checkpoint, or the parts of one."""

    bits: dict[int, Bits]
    progress: Progress


@dataclass
class Agent:
    """One incarnation of a node's agent."""

    node: str
    address: str
    alive: bool = True
    frozen: int = 0
    worker: Worker | None = None
    joined: bool = False
    cut: bool = False  # off from etcd, not from its peers
    expired: bool = False
    overdue: tuple[float, Worker, int] | None = None


class World:
    """
    Attributes:
        queues: what each node has sent and the controller has not seen; ``orders`` the other way.
        gone: agents whose end the controller's probe has yet to tell.
        leases: of dead agents, that have yet to run out.
        here, computed, ballots, met: the collectives of every epoch.
    """

    def __init__(self, shape: Shape, step: Callable[[State, Event, float], Any] = advance) -> None:
        self.shape, self._advance = shape, step
        self.now = 0.0
        self.state = State(shape.settings())
        self.names = [f"node-{i}" for i in range(shape.nodes)]
        self.queues: dict[str, list[Event]] = {name: [] for name in self.names}
        self.orders: dict[str, list[tuple[str, Any]]] = {name: [] for name in self.names}
        self.agents: dict[str, Agent] = {}
        self.workers: dict[str, Worker] = {}
        self.gone: list[str] = []
        self.leases: list[tuple[str, str]] = []
        self.last: dict[str, Event] = {}
        self.seen: dict[str, str] = {}  # incarnation of each node that the controller has read
        self.here: dict[int, set[str]] = {}
        self.met: set[int] = set()
        self.ended: set[tuple[str, int]] = set()
        self.computed: dict[tuple[int, int], set[str]] = {}
        self.ballots: dict[tuple[int, int], Ballots] = {}
        self.passed: set[tuple[int, int]] = set()  # votes that decided, by epoch and step
        self.written: dict[Version, Kept] = {}  # what workers have written, by version
        self.store = {"": Kept(dict.fromkeys(range(len(LAYERS)), ()), Progress())}  # checkpoints that are committed
        self.versions: dict[str, Version] = {}
        self.claims: list[tuple[int, int] | None] = []  # lineage and step of the base, by lineage
        self.damaged: set[str] = set()
        self.asked: list[Claim | Commit] = []  # what the store has not answered
        self.etcd_epoch = 0
        self.published: list[Publish] = []
        self.excluded: set[str] = set()  # incarnations that a plan was made without: back, they hold nothing
        self.announced: dict[int, Bits] = {}
        self.bits: dict[tuple[int, Version], Bits] = {}
        self.result: Mapping[str, Any] | None = None
        self.stop = False
        self.released: set[str] = set()
        self.errors = 0
        self.count = 0
        self.log: list[str] = []
        self.feed(Expected(shape.nodes))
        for name in self.names:
            self.start(name)

    # The controller.

    def feed(self, event: Event) -> None:
        before = self.state
        self.log.append(f"{self.now:7.2f}  {short(event)}")
        if isinstance(event, Joined):
            self.seen[event.member.node] = event.member.incarnation
        self.state, effects = self._advance(before, event, self.now)
        for effect in effects:
            self.log.append(f"{'':9}  → {short(effect)}")
            match effect:
                case Freeze(epoch) | Current(epoch):
                    self.demand(epoch >= self.etcd_epoch, f"the epoch goes back from {self.etcd_epoch} to {epoch}")
                    self.etcd_epoch = epoch
                    self.order("epoch", epoch)
                case Publish():
                    self.check(before, effect)
                    self.published.append(effect)
                    live = {member.incarnation for member in self.state.members.values()}
                    self.excluded |= self.workers.keys() - live
                    self.order("plan", effect)
                case Look(number):
                    self.order("look", number)
                case Kill(node, incarnation):
                    if self.agents[node].alive:
                        self.orders[node].append(("kill", incarnation))
                case Release(node):
                    self.orders[node].append(("release", self.seen[node]))
                case Claim():
                    if self.published and not before.starting_over and not before.damaged - self.state.damaged:
                        self.check_rollback(before, before.lineage)
                    self.asked.append(effect)
                case Commit():
                    self.asked.append(effect)
                case Finish(result):
                    self.result = result
                    self.check_result(result)

    def answer(self) -> None:
        """The store does what it was asked first."""
        asked = self.asked.pop(0)
        if isinstance(asked, Commit):
            name = "m{}-{}-{}".format(*asked.version)
            kept = self.written[asked.version]
            self.demand(kept.bits.keys() == set(range(len(LAYERS))), f"{name} is committed without all layers")
            self.store[name], self.versions[name] = kept, asked.version
            self.feed(Committed(asked.version, name))
            return
        lineage, bound, found = len(self.claims) - 1, None, ""
        while lineage >= 0 and not found:  # down the chain of bases
            ours = [
                (version, name)
                for name, version in self.versions.items()
                if version[0] == lineage and (bound is None or version[1] <= bound) and name not in asked.damaged
            ]
            found = max(ours, default=((), ""))[1]
            lineage, bound = self.claims[lineage] or (-1, 0)
        self.claims.append(self.versions[found][:2] if found else None)
        self.feed(Based(Base(len(self.claims) - 1, self.store[found].progress.step, found)))

    def order(self, kind: str, what: Any) -> None:
        for name, agent in self.agents.items():
            if agent.alive:
                self.orders[name].append((kind, what))

    # What is demanded.

    def demand(self, condition: bool, message: str) -> None:
        if not condition:
            raise Violation(message)

    def check(self, before: State, publish: Publish) -> None:
        state, shape = self.state, self.shape
        publish.plan.check(state.settings.profile, shape.device_bytes)
        last = self.published[-1] if self.published else None
        self.demand(last is None or publish.epoch > last.epoch, f"epoch {publish.epoch} is not new")
        for node, member in publish.members.items():
            self.demand(state.members.get(node) == member, f"{node} is planned and not live as {member.incarnation}")
        ranks = ranked(publish)
        self.demand(ranks <= publish.members.keys(), "a rank is no member")
        self.demand(not ranks & state.draining, "a drained node is planned in")
        self.demand(publish.lineage >= (last.lineage if last else 0), "the lineage goes back")
        told = len(self.announced.get(publish.lineage, ()))
        if publish.version is not None:
            step = publish.version[1]
            self.demand(step >= told, f"plan {publish.epoch} starts at step {step}, {told} is announced")
        outcome = publish.outcome
        if outcome is not None and outcome.verdict is None:
            for node, report in state.reports.items():
                worker = self.workers[state.members[node].incarnation]
                if worker.incarnation in self.excluded:
                    continue
                ahead = report.step > outcome.step and worker.alive and report.voter
                reached = any(version[:2] > (publish.lineage, outcome.step) for version in report.holds.values())
                self.demand(not (ahead and reached), f"step {outcome.step} is void, but {node} has applied it")

    def check_rollback(self, before: State, lineage: int) -> None:
        """Only when no version, at or after what was announced, has all its layers with live members."""
        covered: dict[Version, set[int]] = {}
        # A drained node hands over until the next epoch has formed, and may have gone after that.
        handed_over = before.draining - ranked(before.published) - ranked(before.switching)
        for node, member in self.state.members.items():
            if node in handed_over and before.current == (before.published.epoch if before.published else 0):
                continue
            worker, agent = self.workers[member.incarnation], self.agents[node]
            if not worker.alive or worker.hung or agent.cut or member.incarnation in self.excluded:
                continue
            for index, held in worker.layers.items():
                covered.setdefault(held.version, set()).add(index)
                open_, step = worker.open, held.version[1]
                if open_ is not None and open_.prepared == step and index in open_.own:
                    # It can apply the step, if that was decided and somebody knows.
                    passed = (open_.epoch, step) in self.passed
                    if passed:
                        version = (open_.lineage, step + 1, 0 if self.shape.exact else open_.epoch)
                        covered.setdefault(version, set()).add(index)
        for version, layers in covered.items():
            told = len(self.announced.get(lineage, ()))
            if version[0] == lineage and version[1] >= max(told, 1):
                self.demand(len(layers) < len(LAYERS), f"rollback, though live members hold all layers at {version}")

    def check_layers(self) -> None:
        """A version names bits."""
        for worker in self.workers.values():
            if not worker.alive:
                continue
            self.demand(len(worker.progress.done) == worker.progress.step, f"{worker.node} counts samples wrongly")
            for index, held in worker.layers.items():
                known = self.bits.setdefault((index, held.version), held.bits)
                same = known == held.bits
                self.demand(same, f"layer {index} at {held.version}: {known} and, on {worker.node}, {held.bits}")
                if self.shape.exact:
                    want = tuple(s for s in range(held.version[1]) if s not in self.shape.skip)
                    self.demand(held.bits == want, f"{worker.node}: layer {index} at {held.version} is {held.bits}")
                else:
                    mixed = [token for token in held.bits if token[1] != token[2]]
                    self.demand(not mixed, f"{worker.node}: gradients of another epoch than the vote's in {mixed}")

    def check_result(self, result: Mapping[str, Any]) -> None:
        if result["state"] == "failed":
            raise Violation(f"the job failed: {result['error']['message']}")
        if result["state"] == "done":
            self.demand(result["step"] == self.shape.steps, f"done at step {result['step']}")
            self.demand(result["samples"] == self.shape.steps, f"{result['samples']} samples")

    def verdict(self, run: Run) -> Mapping[str, Any]:
        """Of a vote that every rank has cast; made once, the same for all."""
        publish = run.publish
        ballots = self.ballots[publish.epoch, run.vote]
        if ballots.verdict is None:
            voters = [self.workers[incarnation] for incarnation in sorted(self.ranks(publish))]
            there = [w for w in voters if self.inside(w.incarnation, publish.epoch)]
            alike = {(w.progress.step, w.progress.scale, w.progress.done, w.open.redone) for w in there if w.open}
            self.demand(len(alike) == 1, f"ranks of epoch {publish.epoch} do not agree how far they are: {alike}")
            (step, _, _, redone) = alike.pop()
            for index in range(len(LAYERS)) if len(there) == len(voters) else ():
                copies = {w.layers.get(index) for w in there if index in own(publish, w.node)}
                self.demand(None not in copies and len(copies) == 1, f"copies of layer {index} differ: {copies}")
            kind = "skip" if step in self.shape.skip else "commit"
            if step in self.shape.redo and self.shape.exact and redone != step:
                kind = "redo"
            flags = list(ballots.cast.values())
            if kind != "redo":
                self.passed.add((publish.epoch, step))
            ballots.verdict = {
                "kind": kind,
                "epoch": publish.epoch,
                "stop": any(f["stop"] for f in flags),
                "switch": all(f["switch"] for f in flags),
            }
        return ballots.verdict

    def announce(self, worker: Worker, publish: Publish) -> None:
        """Rank 0's agent writes it if its epoch is the one that counts."""
        agent = self.agents[worker.node]
        if self.etcd_epoch != publish.epoch or agent.cut:
            return
        done, told = worker.progress.done, self.announced.get(publish.lineage, ())
        self.demand(
            publish.lineage == max(self.announced, default=0) or not self.announced.get(publish.lineage + 1), ""
        )
        self.demand(done[: len(told)] == told, f"announced were {told}, now {done}")
        self.announced[publish.lineage] = done
        worker.send(Progressed(worker.progress.step))

    # Nodes.

    def ranks(self, publish: Publish) -> set[str]:
        return {publish.members[node].incarnation for node in ranked(publish)}

    def inside(self, incarnation: str, epoch: int) -> bool:
        worker = self.workers[incarnation]
        return worker.alive and worker.run is not None and worker.run.publish.epoch == epoch

    def start(self, name: str) -> None:
        """A worker where there is none; an agent for it first where that is gone too."""
        agent = self.agents.get(name)
        self.count += 1
        if agent is None or not agent.alive:
            agent = self.agents[name] = Agent(name, f"{name}:{self.count}")
            self.queues.setdefault(name, [])
            self.orders[name] = [("epoch", self.etcd_epoch)] if self.etcd_epoch else []
            self.leases = [lease for lease in self.leases if lease[0] != name]  # its key is overwritten
        incarnation = f"{name}.{self.count}"
        member = Member(name, incarnation, agent.address, incarnation, incarnation, 1, 1)
        agent.worker = self.workers[incarnation] = Worker(self, member)
        agent.worker.stop = self.stop
        agent.joined = True
        agent.overdue = None
        agent.expired = False
        self.queues[name].append(Joined(member))

    def end_worker(self, agent: Agent, code: int = -9) -> None:
        worker = agent.worker
        assert worker is not None
        worker.alive, worker.run, agent.worker, agent.joined = False, None, None, False
        self.queues[agent.node].append(WorkerExited(agent.node, worker.incarnation, code, "log"))

    def end_agent(self, agent: Agent) -> None:
        agent.alive = False
        if agent.worker is not None:
            agent.worker.alive, agent.worker.run = False, None
            self.leases.append((agent.node, agent.worker.incarnation))
        self.orders[agent.node] = []

    def obey(self, agent: Agent) -> None:
        kind, what = self.orders[agent.node].pop(0)
        worker = agent.worker
        if kind == "epoch" and what > agent.frozen:
            agent.frozen = what
            if worker is not None:
                worker.freeze(what)
                agent.overdue = (self.now + FREEZE_S, worker, what) if worker.hung else None
        elif kind == "plan":
            fresh = what.epoch >= agent.frozen
            agent.frozen = max(agent.frozen, what.epoch)
            mine = what.members.get(agent.node)
            if fresh and worker is not None and mine is not None and mine.incarnation == worker.incarnation:
                worker.offer(what)
        elif kind == "stop" and worker is not None:
            worker.stop = True
        elif kind == "look" and worker is not None:
            kind = "computing" if worker.run is not None and worker.run.at == "compute" else "waiting"
            seen = Looked(agent.node, worker.incarnation, what, kind, "", 0.0, not worker.hung)
            self.queues[agent.node].append(seen)
        elif kind == "kill" and worker is not None and worker.incarnation == what:
            self.end_worker(agent)
        elif kind == "release" and worker is not None and worker.incarnation == what:
            self.released.add(agent.node)
            self.end_agent(agent)
            self.gone.append(agent.address)

    # Actions.

    def actions(self) -> list[Action]:
        """Everything that happens without a fault."""
        out: list[Action] = [("tick",)]
        if self.asked:
            out.append(("store",))
        for name, queue in self.queues.items():
            agent = self.agents[name]
            if queue and not agent.cut:
                out.append(("deliver", name))
            if agent.alive and self.orders[name] and not agent.cut:
                out.append(("obey", name))
            if agent.worker is not None and agent.worker.can_work():
                out.append(("work", name))
            if self.can_break(agent):
                out.append(("break", name))
            if name not in self.released and (not agent.alive or agent.worker is None):
                out.append(("start", name))
        # A death is not told before what its node had announced: that is in etcd, and read first.
        out += [("probe", address) for address in self.gone if not self.unread(address.split(":")[0])]
        out += [("expire", name) for name, _ in self.leases if not self.unread(name)]
        return out

    def faults(self) -> list[Action]:
        out: list[Action] = []
        for name in self.names:
            agent = self.agents[name]
            if not agent.alive:
                continue
            out += [("kill_node", name, kept) for kept in (True, False)] + [("drain", name)]
            if agent.cut:
                out += [("heal", name, first) for first in (True, False)]
                may_expire = agent.joined and not agent.expired and not self.unread(name)
                out += [("lose_lease", name)] * 3 if may_expire else []
            else:
                out.append(("cut", name))
            if name in self.last and self.state.epoch > 0:  # before, ends of workers are counted
                out.append(("again", name))
            worker = agent.worker
            if worker is None:
                continue
            out += [("kill_worker", name), ("hang", name)]
            if self.errors < self.shape.errors and worker.run is not None:
                if worker.run.at == "compute" and not worker.run.closing:
                    out.append(("raise", name, None))
                if worker.run.at == "follow" and worker.open and worker.open.last_vote[1]["kind"] == "commit":
                    out += [("raise", name, torn) for torn in range(len(worker.open.own))]
        out += [("size", nodes) for nodes in range(max(self.shape.min_nodes, 2), self.shape.nodes + 1)]
        out.append(("stop",))
        newest = max(self.versions, key=lambda name: self.versions[name], default="")
        if newest and not self.damaged:
            out.append(("damage", newest))
        return out

    def unread(self, name: str) -> bool:
        return any(isinstance(event, Progressed) for event in self.queues[name])

    def can_break(self, agent: Agent) -> bool:
        """A collective raises where a peer of it has gone."""
        worker = agent.worker
        if worker is None or worker.hung or worker.run is None or worker.run.at not in ("reduce", "see"):
            return False
        epoch = worker.run.publish.epoch
        return any(
            not self.inside(incarnation, epoch) and (incarnation, epoch) not in self.ended
            for incarnation in self.ranks(worker.run.publish)
        )

    def do(self, action: Action) -> bool:
        """Carries an action out, if it is possible; whether it was."""
        if self.result is not None:
            return False
        if action not in self.actions() and action not in self.faults():
            return False
        self.now += 0.02
        kind, name = action[0], action[1] if len(action) > 1 else ""
        agent = self.agents.get(name)
        if kind not in ("deliver", "probe", "expire", "tick", "lose_lease", "stop", "again"):
            self.log.append(f"{self.now:7.2f}  {' '.join(map(str, action))}")
        match kind:
            case "store":
                self.answer()
            case "damage":
                self.damaged.add(name)
            case "tick":
                self.now += 1.0
                for other in list(self.agents.values()):
                    if other.overdue is not None and self.now >= other.overdue[0]:
                        if other.worker is other.overdue[1]:
                            self.end_worker(other)
                        other.overdue = None
                self.feed(Tick())
            case "deliver":
                event = self.queues[name].pop(0)
                self.last[name] = event
                self.feed(event)
            case "again":
                self.feed(self.last[name])
            case "probe":
                self.gone.remove(name)
                self.feed(AgentGone(name))
            case "expire":
                lease = next(lease for lease in self.leases if lease[0] == name)
                self.leases.remove(lease)
                self.feed(Left(*lease))
            case "stop":
                self.stop = True
                self.order("stop", None)
                self.feed(StopRequested())
            case "size":
                self.feed(SizeRequested(action[1]))
            case "drain":
                self.feed(DrainRequested(name))
            case "start":
                self.start(name)
            case _:
                assert agent is not None
                self._do_to(agent, action)
        self.check_layers()
        return True

    def _do_to(self, agent: Agent, action: Action) -> None:
        kind, name, worker = action[0], agent.node, agent.worker
        match kind:
            case "obey":
                self.obey(agent)
            case "kill_node":
                self.end_agent(agent)
                while not action[2] and self.queues[name] and not isinstance(self.queues[name][-1], Progressed):
                    self.queues[name].pop()  # what is announced is in etcd, and so is what came before it
                agent.cut = False
                self.gone.append(agent.address)
            case "cut":
                agent.cut = True
            case "lose_lease":
                agent.expired = True
                if worker is not None:
                    self.feed(Left(name, worker.incarnation))
            case "heal":
                agent.cut = False
                if (
                    agent.expired
                    and worker is not None
                    and agent.joined
                    and Joined(worker.member) not in self.queues[name]
                ):
                    self.queues[name].insert(0 if action[2] else len(self.queues[name]), Joined(worker.member))
                agent.expired = False
            case _:
                assert worker is not None
                if kind == "work":
                    worker.work()
                elif kind == "break":
                    worker.fail("a peer is gone")
                elif kind == "kill_worker":
                    self.end_worker(agent)
                elif kind == "hang":
                    worker.hung = True
                elif kind == "raise":
                    self.errors += 1
                    worker.raises(action[2])

    def settle(self, rounds: int = 400) -> None:
        """No more faults: all that is cut off comes back, all that died is started again, and the job must end."""
        for agent in list(self.agents.values()):
            if agent.alive and agent.cut:
                self.do(("heal", agent.node, True))
        if self.released:
            names, self.released = sorted(self.released), set()
            self.log.append(f"           started again: {names}")
        self.do(("size", self.shape.nodes))
        for _ in range(rounds):
            if self.result is not None:
                return
            busy = [action for action in self.actions() if action[0] != "tick"]
            for action in busy:
                self.do(action)
            if not busy:
                self.do(("tick",))
                for name in sorted(self.state.draining) if self.state.phase == "waiting" else ():
                    self.do(("kill_node", name, True))  # a machine that is drained is taken away at last
        if self.result is None:
            raise Violation(f"the job does not end; it is {self.state.phase} at step {self.state.step}")


def short(thing: Any) -> str:
    """An event or effect on one line."""
    match thing:
        case Joined(member):
            return f"Joined {member.incarnation}"
        case Frozen(_, incarnation, epoch, r):
            vote = f"{r.vote[2]['kind']} of {r.vote[0]} in {r.vote[1]}" if r.vote else None
            return (
                f"Frozen {incarnation} epoch={epoch} voter={r.voter} step={r.step} prepared={r.prepared} vote={vote} "
                f"holds={dict(r.holds)}"
            )
        case Publish():
            stages = [[f"{s.node}[{s.start}:{s.stop}]" for s in p.stages] for p in thing.plan.pipelines]
            outcome = thing.outcome and (thing.outcome.step, (thing.outcome.verdict or {"kind": "void"})["kind"])
            return (
                f"Publish {thing.epoch} {stages} spares={list(thing.plan.spares)} outcome={outcome} "
                f"version={thing.version} sources={ {n: dict(s) for n, s in thing.sources.items()} } "
                f"switch_from={thing.switch_from} lineage={thing.lineage}: {thing.reason}"
            )
        case Record(kind, data):
            return f"Record {kind} {dict(data)}"
        case RankEnded():
            return f"RankEnded {thing.node} epoch={thing.epoch} {thing.kind} step={thing.step}"
    return repr(thing)


FAULTS = {
    "kill_worker": 3.0,
    "kill_node": 1.5,
    "cut": 1.0,
    "heal": 3.0,
    "lose_lease": 2.0,
    "hang": 0.4,
    "drain": 0.6,
    "size": 0.3,
    "raise": 2.0,
    "again": 1.0,
    "stop": 0.02,
    "damage": 0.2,
}


def explore(shape: Shape, seed: int, length: int = 250, step: Callable[[State, Event, float], Any] = advance) -> World:
    """A random walk, then the end without faults.

    Raises:
        Violation: with the shortest list of actions that shows it.
    """
    random_ = random.Random(seed)
    world = World(shape, step)
    rate = random_.choice((0.02, 0.05, 0.1, 0.2))
    # Some walks have slow nodes, whose messages are rarely carried.
    slow = {name: random_.choice((1.0, 1.0, 0.1)) for name in world.names}
    done: list[Action] = []
    try:
        for _ in range(length):
            if world.result is not None:
                break
            faulty = random_.random() < rate
            actions = world.faults() if faulty else world.actions()
            if faulty:
                weights = [FAULTS[action[0]] for action in actions]
            else:
                scale = {"tick": 0.15, "start": 0.3, "expire": 0.1, "break": 0.7, "work": 2.0}
                weights = [scale.get(a[0], 1.0) * slow.get(a[1] if len(a) > 1 else "", 1.0) for a in actions]
            action = random_.choices(actions, weights)[0]
            done.append(action)
            world.do(action)
        world.settle()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        actions, log = shrink(shape, done, _kind(error), step)
        text = "\n".join(log)
        raise Violation(f"{message}\nseed {seed}, {shape}\nactions {actions}\n{text}") from error
    return world


def play(
    shape: Shape, actions: Sequence[Action], step: Callable[[State, Event, float], Any] = advance
) -> tuple[World, Exception | None]:
    world = World(shape, step)
    try:
        for action in actions:
            world.do(action)
        world.settle()
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return world, error
    return world, None


def _kind(error: Exception) -> str:
    """An error without what differs from case to case."""
    return re.sub(r"\d+|\(.*\)|\{.*\}", "", f"{type(error).__name__} {error}")[:40]


def shrink(
    shape: Shape, actions: Sequence[Action], kind: str, step: Callable[[State, Event, float], Any] = advance
) -> tuple[list[Action], list[str]]:
    """Leaves out what is not needed for an error of this kind."""
    kept = list(actions)
    world, error = play(shape, kept, step)
    size = max(1, len(kept) // 2)
    while size:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            tried, failed = play(shape, fewer, step)
            if failed is not None and _kind(failed) == kind:
                kept, world, error = fewer, tried, failed
            else:
                at += size
        size //= 2
    return kept, [*world.log, f"{type(error).__name__}: {error}"]
