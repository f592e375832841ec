"""The controller: reads etcd, asks the state machine, and writes what it decides in fenced transactions.

It keeps nothing that is not in etcd: a restarted controller lists the job's keys and goes on.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from elastic.config import Config
from elastic.control import messages as ms
from elastic.control import state as st
from elastic.control.checkpoints import Checkpoints
from elastic.control.outcome import Outcome, Report, Version
from elastic.control.probe import Prober
from elastic.errors import EtcdUnreachable
from elastic.planning import ModelProfile, Plan
from elastic.rendezvous import KV, Delete, Etcd, Keys, Leadership, Lease, LeaseGone, Op, Put, Watch, watch_prefix

Json = dict[str, Any]
TICK_S = 1.0


class Fleet(Protocol):
    """Whoever starts agents."""

    def ensure(self) -> int:
        """Starts an agent on every node that has none; returns how many nodes there are. Called once a second."""
        ...

    def resize(self, nodes: int) -> None:
        """A local run is to have at least this many agents; those that are too many leave by `release`."""
        ...

    def release(self, node: str) -> None:
        """The node has handed over its work: its agent is not wanted any more."""
        ...


class Controller:
    """
    Args:
        endpoints: of etcd, ``host:port``.
        fleet: starts the agents.
        identity: of this process incarnation.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        job: str,
        fleet: Fleet,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._keys = Keys(job)
        self._fleet, self._identity, self._clock, self._wall = fleet, identity, clock, wall
        self._etcd = Etcd(endpoints)
        self._inbox: queue.Queue[Sequence[ms.Event] | Exception] = queue.Queue()
        self._members: dict[str, str] = {}  # incarnation by node, as read from etcd
        self._sequence = 0
        self._done = threading.Event()
        self._lease_id = 0
        self._checkpoints: Checkpoints
        self._prober = Prober(self._agent_gone)

    def run(self) -> None:
        """Leads until the job has ended; then its result is in etcd."""
        spec_kv = self._etcd.get(self._keys.spec)
        if spec_kv is None:
            return  # the job is over and its keys are gone
        spec = json.loads(spec_kv.value)
        config = Config.from_dict(spec["config"])
        lease = Lease(self._etcd, config.detection.lease_s)
        self._lease_id = lease.id
        leadership = Leadership(self._etcd, self._keys.leader, lease, self._identity)
        self._checkpoints = Checkpoints(config, spec, lambda event: self._inbox.put([event]), self._wall)
        try:
            if not leadership.campaign(timeout_s=config.detection.orphan_s):
                return
            self._lead(settings_of(config, spec), leadership)
        finally:
            self._done.set()
            self._prober.close()
            self._checkpoints.close()
            leadership.resign()
            lease.close()
            self._etcd.close()

    def _lead(self, settings: ms.Settings, leadership: Leadership) -> None:
        listed, watch = watch_prefix(self._etcd, self._keys.root)
        with watch:
            state = self._restore(settings, listed)
            for kv in listed:
                for event in self._events_of(kv):
                    state = self._step(state, event, leadership)
            threading.Thread(target=self._follow, args=(watch,), name="follow", daemon=True).start()
            threading.Thread(target=self._call_fleet, name="fleet", daemon=True).start()
            while state.phase != "ended":
                try:
                    events = self._inbox.get(timeout=TICK_S)
                except queue.Empty:
                    events = (ms.Tick(),)
                if isinstance(events, Exception):
                    raise events
                for event in events:
                    state = self._step(state, event, leadership)

    def _step(self, state: st.State, event: ms.Event, leadership: Leadership) -> st.State:
        """One decision, and all its effects in one fenced transaction."""
        state, effects = st.advance(state, event, self._clock())
        if effects:
            leadership.fenced([op for effect in effects for op in self._ops(effect, leadership.fence)])
            for effect in effects:
                if isinstance(effect, ms.Claim | ms.Commit):
                    self._checkpoints.ask(effect)
                elif isinstance(effect, ms.Release):
                    self._fleet.release(effect.node)
                elif isinstance(effect, ms.Resize):
                    self._fleet.resize(effect.nodes)
        return state

    def _restore(self, settings: ms.Settings, listed: Iterable[KV]) -> st.State:
        """The state after the last plan; reports and members that are listed are applied on top of it as events."""
        newest, plans, step, starting_over, committed = 0, [], 0, False, None
        for kv in listed:
            parsed = self._keys.parse(kv.key)
            if parsed.kind == "event":
                self._sequence = max(self._sequence, (parsed.number or 0) + 1)
                record = json.loads(kv.value)
                if record["kind"] == "checkpoint_saved":
                    committed = version_of(record["version"])
            elif parsed.kind == "plan":
                plans.append(publish_of(json.loads(kv.value)))
            elif parsed.kind == "starting_over":
                starting_over = True
            elif parsed.kind == "epoch":
                newest = int(kv.value)
            elif parsed.kind == "progress":
                step = max((record["step"] for record in json.loads(kv.value)["steps"]), default=0)
        state = st.State(
            settings, changed_at=self._clock(), step=step, progressed_at=self._clock(), committed=committed,
            starting_over=starting_over,
        )  # fmt: skip
        if not plans:
            return state
        last = plans[-1]
        state = replace(
            state, phase="forming", epoch=max(newest, last.epoch), lineage=last.lineage, published=last,
            opened_at=self._clock(), published_at=self._clock(), members=dict(last.members),
        )  # fmt: skip
        self._members = {name: member.incarnation for name, member in last.members.items()}
        if newest > last.epoch:
            return replace(state, phase="freezing")
        before = next((plan for plan in plans if plan.epoch == last.switch_from), None)
        if before is not None and newest < last.epoch:
            state = replace(state, phase="running", published=before, switching=last, current=before.epoch)
        return state

    def _follow(self, watch: Watch) -> None:
        try:
            while not watch.closed:
                for event in watch.get(timeout_s=1.0):
                    found = self._events_of(event.kv) if event.kind == "put" else self._gone(event.kv.key)
                    self._inbox.put(list(found))
        except Exception as error:  # noqa: BLE001 - a controller that hears nothing must not go on to lead
            self._inbox.put(error)

    def _call_fleet(self) -> None:
        while not self._done.is_set():
            self._inbox.put([ms.Expected(self._fleet.ensure())])
            self._done.wait(TICK_S)

    def _events_of(self, kv: KV) -> Iterable[ms.Event]:
        """What a written key means to the state machine."""
        parsed = self._keys.parse(kv.key)
        node = parsed.name or ""
        match parsed.kind:
            case "member":
                member = ms.Member(**json.loads(kv.value))
                self._members[member.node] = member.incarnation
                self._prober.watch(member.agent)
                yield ms.Joined(member)
            case "exit":
                record = json.loads(kv.value)
                age = self._age(record)
                yield ms.WorkerExited(node, record["incarnation"], record["code"], record["log"], age)
            case "progress":
                steps = json.loads(kv.value)["steps"]
                if steps:
                    yield ms.Progressed(steps[-1]["step"])
            case "report":
                yield from self._reported(node, json.loads(kv.value))
            case "looked":
                yield ms.Looked(node, **json.loads(kv.value))
            case "save":
                yield _saved_of(json.loads(kv.value))
            case "request":
                yield from self._requested(node, kv.value)

    def _agent_gone(self, agent: str) -> None:
        """Marks the end of an agent behind everything it wrote: the probe may be faster than the watch, and what the
        agent said before must be heard before its death."""
        try:
            self._etcd.put(self._keys.request(f"gone.{agent}"), b"", self._lease_id)
        except LeaseGone:
            pass  # another controller leads, and probes by itself
        except EtcdUnreachable:
            self._inbox.put([ms.AgentGone(agent)])

    def _requested(self, name: str, value: bytes) -> Iterable[ms.Event]:
        kind, _, node = name.partition(".")
        if kind == "stop":
            yield ms.StopRequested()
        elif kind == "drain":
            yield ms.DrainRequested(node)
        elif kind == "unquarantine":
            yield ms.ReleaseRequested(node)
        elif kind == "nodes":
            yield ms.SizeRequested(int(value))
        elif kind == "gone":
            yield ms.AgentGone(node)

    def _reported(self, node: str, report: Json) -> Iterable[ms.Event]:
        epoch = report.get("epoch", 0)
        match report["ev"]:
            case "refused":
                yield ms.Refused(node, report["reason"])
            case "frozen":
                yield ms.Frozen(node, report["incarnation"], epoch, report_of(report))
            case "formed":
                yield ms.Formed(node, epoch, report["form_s"], report["transfer_s"])
            case "voted":
                yield ms.Voted(node, epoch, report["pause_s"], report["step_s"], report["at"])
            case "end":
                yield ms.RankEnded(
                    node, epoch, report["kind"], report["step"], report["reason"], report["loss"],
                    report["digests"], report["ledger"],
                )  # fmt: skip
            case "error":
                yield ms.Failed(node, epoch, report["step"], report["error"], self._age(report))
            case "broken":
                yield ms.Broken(node, epoch, report["reason"], self._age(report))
            case "unreadable":
                yield ms.Unreadable(node, epoch, report["manifest"], report["reason"])

    def _age(self, record: Json) -> float:
        return max(0.0, self._wall() - float(record["at"]))

    def _gone(self, key: str) -> Iterable[ms.Event]:
        parsed = self._keys.parse(key)
        if parsed.kind == "member" and parsed.name in self._members:
            yield ms.Left(parsed.name, self._members.pop(parsed.name))

    def _ops(self, effect: ms.Effect, fence: int) -> Iterable[Op]:
        match effect:
            case ms.Freeze(epoch) | ms.Current(epoch):
                yield Put(self._keys.epoch, str(epoch).encode())
            case ms.Claim():
                yield Put(self._keys.starting_over, b"")
            case ms.Commit(version, parts):  # from here on this leader alone may commit it
                yield Put(self._keys.intent, json.dumps({"version": version, "writers": sorted(parts)}).encode())
            case ms.Record(kind, data):
                yield self._event(kind, data)
            case ms.Publish(epoch, plan, reason=reason):
                yield Put(self._keys.plan(epoch), json.dumps(record_of(effect, fence)).encode())
                if effect.base is not None:
                    yield Delete(self._keys.starting_over)
                pipelines = [[stage.node for stage in pipeline.stages] for pipeline in plan.pipelines]
                yield self._event(
                    "plan", {"epoch": epoch, "pipelines": pipelines, "spares": list(plan.spares), "reason": reason}
                )
            case ms.Look(number):
                yield Put(self._keys.look, str(number).encode())
            case ms.Kill(node, incarnation):
                yield Put(self._keys.request(f"kill.{node}"), incarnation.encode())
            case ms.Release(node):
                yield Put(self._keys.request(f"release.{node}"), self._members.get(node, "").encode())
                yield Delete(self._keys.request(f"drain.{node}"))
            case ms.Finish(result):
                yield Put(self._keys.result, json.dumps(result).encode())

    def _event(self, kind: str, data: Any) -> Put:
        record = {"seq": self._sequence, "time": self._wall(), "kind": kind, **data}
        self._sequence += 1
        return Put(self._keys.event(record["seq"]), json.dumps(record).encode())


def record_of(publish: ms.Publish, fence: int) -> Json:
    """A plan as it stands in etcd, and as workers get it."""
    ranks = {place.node: place.rank for place in publish.plan.ranks()}
    first = min(ranks, key=lambda node: ranks[node])
    return {
        "epoch": publish.epoch,
        "token": fence,
        "plan": publish.plan.to_json(),
        "members": {name: member.__dict__ for name, member in publish.members.items()},
        "ranks": ranks,
        "store": publish.members[first].store,
        "outcome": None if publish.outcome is None else publish.outcome.__dict__,
        "version": publish.version,
        "lineage": publish.lineage,
        "base": None if publish.base is None else publish.base.__dict__,
        "sources": {
            node: {str(layer): [publish.members[source].layers for source in nodes] for layer, nodes in layers.items()}
            for node, layers in publish.sources.items()
        },
        "source_nodes": {
            node: {str(k): list(v) for k, v in layers.items()} for node, layers in publish.sources.items()
        },
        "switch_from": publish.switch_from,
        "form_timeout_s": publish.form_s,
        "reason": publish.reason,
    }


def publish_of(record: Json) -> ms.Publish:
    """The inverse of `record_of`, for a controller that starts again."""
    outcome = record["outcome"]
    return ms.Publish(
        epoch=record["epoch"],
        plan=Plan.from_json(record["plan"]),
        members={name: ms.Member(**member) for name, member in record["members"].items()},
        outcome=None if outcome is None else Outcome(**outcome),
        version=None if record["version"] is None else tuple(record["version"]),
        lineage=record["lineage"],
        base=None if record["base"] is None else ms.Base(**record["base"]),
        sources={
            node: {int(layer): tuple(nodes) for layer, nodes in layers.items()}
            for node, layers in record["source_nodes"].items()
        },
        switch_from=record["switch_from"],
        form_s=record["form_timeout_s"],
        reason=record["reason"],
    )


def _saved_of(message: Json) -> ms.Event:
    version = version_of(message["version"])
    if message["ev"] == "unsaved":
        return ms.NotSaved(message["writer"], version, message["reason"])
    return ms.Saved(message["writer"], version, message)


def version_of(value: Sequence[int]) -> Version:
    return (int(value[0]), int(value[1]), int(value[2]))


def report_of(report: Json) -> Report:
    """What a frozen worker wrote."""
    vote = report["vote"]
    return Report(
        voter=report["voter"],
        step=report["step"],
        prepared=report["prepared"],
        vote=None if vote is None else (vote[0], vote[1], vote[2]),
        due=None if report["due"] is None else frozenset(report["due"]),
        epoch=report["formed"],
        holds={int(layer): (v[0], v[1], v[2]) for layer, v in report["holds"].items()},
    )


def settings_of(config: Config, spec: Json) -> ms.Settings:
    """The state machine's settings from the job's config and what the inspection found."""
    profile = ModelProfile.from_json(spec["profile"])
    return ms.Settings(
        profile=profile,
        layers=tuple(layer.name for layer in profile.layers),
        microbatches=config.train.microbatches,
        fault_tolerance=config.cluster.fault_tolerance,
        device_bytes=config.cluster.device_memory,
        min_nodes=config.cluster.min_nodes,
        exact=config.train.reduction == "exact",
        rollback_after_s=config.detection.rollback_after_s,
        quarantine=config.detection.quarantine,
        progress_s=None if config.detection.progress == "auto" else config.detection.progress,
    )
