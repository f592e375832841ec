"""The controller: reads etcd, asks the state machine, and writes what it decides in fenced transactions.

It keeps nothing that is not in etcd: a restarted controller lists the job's keys and goes on.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from elastic.config import Config
from elastic.control.state import (
    Broken,
    Effect,
    Event,
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
from elastic.planning import ModelProfile, Plan
from elastic.rendezvous import KV, Etcd, Keys, Leadership, Lease, Put, watch_prefix
from elastic.rendezvous.watch import Watch

Json = dict[str, Any]
TICK_S = 1.0


class Fleet(Protocol):
    """Whoever starts agents. Called once a second."""

    def ensure(self) -> int:
        """Starts an agent on every node that has none; returns how many nodes there are."""
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
        self._inbox: queue.Queue[list[Event]] = queue.Queue()
        self._members: dict[str, str] = {}  # incarnation by node, as read from etcd
        self._sequence = 0
        self._done = threading.Event()

    def run(self) -> None:
        """Leads until the job has ended; then its result is in etcd."""
        spec_kv = self._etcd.get(self._keys.spec)
        if spec_kv is None:
            return  # the job is over and its keys are gone
        spec = json.loads(spec_kv.value)
        config = Config.from_dict(spec["config"])
        lease = Lease(self._etcd, config.detection.lease_s)
        leadership = Leadership(self._etcd, self._keys.leader, lease, self._identity)
        try:
            if not leadership.campaign(timeout_s=config.detection.orphan_s):
                return
            self._lead(settings_of(config, spec), leadership)
        finally:
            self._done.set()
            leadership.resign()
            lease.close()
            self._etcd.close()

    def _lead(self, settings: Settings, leadership: Leadership) -> None:
        listed, watch = watch_prefix(self._etcd, self._keys.root)
        state = self._restore(settings, listed)
        threading.Thread(target=self._follow, args=(watch,), name="follow", daemon=True).start()
        threading.Thread(target=self._call_fleet, name="fleet", daemon=True).start()
        for kv in listed:
            for event in self._events_of(kv):
                state = self._carry_out(*advance(state, event, self._clock()), leadership)
        while state.phase != "ended":
            try:
                events = self._inbox.get(timeout=TICK_S)
            except queue.Empty:
                events = [Tick()]
            for event in events:
                state = self._carry_out(*advance(state, event, self._clock()), leadership)
        watch.close()

    def _restore(self, settings: Settings, listed: Iterable[KV]) -> State:
        """The state after the last plan; reports and members that are listed are applied on top of it as events."""
        state = State(settings, changed_at=self._clock())
        for kv in listed:
            parsed = self._keys.parse(kv.key)
            if parsed.kind == "event":
                self._sequence = max(self._sequence, (parsed.number or 0) + 1)
            elif parsed.kind == "plan":
                record = json.loads(kv.value)
                members = {name: Member(**member) for name, member in record["members"].items()}
                state = State(
                    settings,
                    phase="forming",
                    changed_at=self._clock(),
                    epoch=record["epoch"],
                    step=record["step"],
                    plan=Plan.from_json(record["plan"]),
                    in_plan=members,
                )
        return state

    def _follow(self, watch: Watch) -> None:
        while not self._done.is_set():
            for event in watch.get(timeout_s=1.0):
                if event.kind == "put":
                    self._inbox.put(list(self._events_of(event.kv)))
                else:
                    self._inbox.put(list(self._gone(event.kv.key)))

    def _call_fleet(self) -> None:
        while not self._done.is_set():
            self._inbox.put([Expected(self._fleet.ensure())])
            self._done.wait(TICK_S)

    def _events_of(self, kv: KV) -> Iterable[Event]:
        """What a written key means to the state machine."""
        parsed = self._keys.parse(kv.key)
        if parsed.kind == "member":
            member = Member(**json.loads(kv.value))
            self._members[member.node] = member.incarnation
            yield Joined(member)
        elif parsed.kind == "request" and parsed.name == "stop":
            yield StopRequested()
        elif parsed.kind == "report":
            report = json.loads(kv.value)
            node, epoch = parsed.name or "", report.get("epoch", parsed.number or 0)
            match report["ev"]:
                case "formed":
                    yield Formed(node, epoch)
                case "end":
                    yield RankEnded(
                        node, epoch, report["kind"], report["step"], report["reason"], report["loss"],
                        report["digests"], report["ledger"],
                    )  # fmt: skip
                case "error":
                    yield Failed(node, epoch, report["error"])
                case "refused":
                    yield Refused(node, report["reason"])
                case "broken":
                    yield Broken(node, epoch, report["reason"])
                case "exit":
                    yield WorkerExited(node, report["incarnation"], report["code"], report["log"])

    def _gone(self, key: str) -> Iterable[Event]:
        parsed = self._keys.parse(key)
        if parsed.kind == "member" and parsed.name in self._members:
            yield Left(parsed.name, self._members.pop(parsed.name))

    def _carry_out(self, state: State, effects: Sequence[Effect], leadership: Leadership) -> State:
        """Writes all effects of one decision in one fenced transaction."""
        if effects:
            leadership.fenced([put for effect in effects for put in self._puts(effect, leadership.fence)])
        return state

    def _puts(self, effect: Effect, fence: int) -> Iterable[Put]:
        match effect:
            case Record(kind, data):
                yield self._event(kind, data)
            case Publish(epoch, plan, members, step, reason):
                nodes = {place.rank: place.node for place in plan.ranks()}
                record = {
                    "epoch": epoch,
                    "token": fence,
                    "plan": plan.to_json(),
                    "members": {name: member.__dict__ for name, member in members.items()},
                    "ranks": {node: rank for rank, node in nodes.items()},
                    "store": members[nodes[0]].store,
                    "step": step,
                    "reason": reason,
                }
                yield Put(self._keys.epoch, str(epoch).encode())
                yield Put(self._keys.plan(epoch), json.dumps(record).encode())
                pipelines = [[stage.node for stage in pipeline.stages] for pipeline in plan.pipelines]
                yield self._event(
                    "plan", {"epoch": epoch, "pipelines": pipelines, "spares": list(plan.spares), "reason": reason}
                )
            case Finish(result):
                yield Put(self._keys.result, json.dumps(result).encode())

    def _event(self, kind: str, data: Any) -> Put:
        record = {"seq": self._sequence, "time": self._wall(), "kind": kind, **data}
        self._sequence += 1
        return Put(self._keys.event(record["seq"]), json.dumps(record).encode())


def settings_of(config: Config, spec: Json) -> Settings:
    """The state machine's settings from the job's config and what the inspection found."""
    profile = ModelProfile.from_json(spec["profile"])
    return Settings(
        profile=profile,
        layers=tuple(layer.name for layer in profile.layers),
        microbatches=config.train.microbatches,
        fault_tolerance=config.cluster.fault_tolerance,
        device_bytes=config.cluster.device_memory,
        min_nodes=config.cluster.min_nodes,
        exact=config.train.reduction == "exact",
    )
