"""One agent per node: keeps the node's lease, owns its worker process, and carries plans to it and reports back.

The agent is one loop over one inbox; other threads only put into it. It reads its orders from etcd alone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tenacity import Retrying, retry_if_exception, retry_if_exception_type, stop_after_delay, wait_fixed

from checkpoint.store import Store, StoreError
from elastic.control.probe import ProbeServer
from elastic.engine.launch import WorkerProcess
from elastic.errors import EtcdUnreachable
from elastic.rendezvous import Etcd, Keys, Lease, LeaseGone, Put, Watch, absent, value_is, watch_prefix

Json = dict[str, Any]
PROBE = "probe"  # object that the supervisor writes into the checkpoint store and every node must see there
PROGRESS_EVERY_S = 0.1
PROGRESS_KEPT = 256  # steps told with each write, so that a reader that misses writes still sees every step
FREEZE_S = 5.0  # a worker that has not frozen by then is ended
LOOK_S = 1.0  # between two looks at what a worker does
RESTART_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0)  # pauses before a worker is started again, by how often it died young
YOUNG_S = 30.0


@dataclass(frozen=True)
class AgentSpec:
    """
    Attributes:
        endpoints: of etcd, ``host:port``.
        host: the address other nodes reach this one by.
        folder: where the job's code is on this node.
        log_dir: where the worker's output goes.
    """

    endpoints: tuple[str, ...]
    job: str
    node: str
    host: str
    folder: str
    log_dir: str


class Agent:
    """Call `run` from a thread that lives as long as the process: workers die with it."""

    def __init__(
        self, spec: AgentSpec, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._spec, self._clock, self._wall = spec, clock, wall
        self._keys = Keys(spec.job)
        self._inbox: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._etcd = Etcd(spec.endpoints)
        self._probe = ProbeServer(spec.host)
        self._log = Path(spec.log_dir) / f"{spec.node}.log"
        self._job: Json = {}
        self._stop = False
        self._worker: WorkerProcess | None = None
        self._incarnation = ""  # of the worker: a replacement is another one
        self._member: bytes | None = None  # the value of our member key
        self._epoch = 0  # the newest that our worker has formed
        self._frozen = 0  # the newest that our worker was asked to freeze for
        self._answered = 0  # the newest that it has reported for
        self._steps: list[Json] = []
        self._told_at = 0.0
        self._untold = False
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._started_at = 0.0
        self._young_deaths = 0

    def drain(self) -> None:
        """Asks for this node's work to be handed over; `run` returns when it has been. From any thread."""
        self._inbox.put(("drain", None))

    def run(self) -> None:
        """Returns when the job has ended or the node was released; the worker is gone then, and the node's keys."""
        end_previous(self._etcd, self._keys.host(self._spec.node))
        self._etcd.put(self._keys.host(self._spec.node), json.dumps(process_record()).encode())
        self._job = self._read_job()
        lease = Lease(
            self._etcd, self._job["config"]["detection"]["lease_s"], on_lost=lambda: self._inbox.put(("lease", None))
        )
        listed, watch = watch_prefix(self._etcd, self._keys.root)
        try:
            refused = self._store_is_shared()
            if refused:
                self._report({"ev": "refused", "reason": refused})
            else:
                self._start_worker()
            threading.Thread(target=self._follow, args=(watch,), name="follow", daemon=True).start()
            for kv in listed:
                self._inbox.put(("etcd", kv))
            self._loop(lease)
        finally:
            if self._worker is not None:
                self._worker.close()
            watch.close()
            lease.close()
            try:
                self._etcd.delete(self._keys.host(self._spec.node))
            except EtcdUnreachable:
                pass  # the run is over; an embedded etcd may have ended first
            self._etcd.close()

    def _read_job(self) -> Json:
        kv = self._etcd.get(self._keys.spec)
        if kv is None:  # written before the controller that starts agents
            raise EtcdUnreachable(f"job {self._spec.job} has no spec in etcd", "it may have ended already")
        out: Json = json.loads(kv.value)
        return out

    def _store_is_shared(self) -> str:
        """Why this node must not join: it cannot read what the run's supervisor wrote to the checkpoint store."""
        url = self._job["checkpoint_url"]
        try:
            probe = Store(url, self._job["config"]["checkpoint"]["storage_options"]).read(PROBE)
        except StoreError as error:
            return str(error)
        return "" if probe == self._spec.job.encode() else f"checkpoint.url {url} is not shared with this node"

    def _start_worker(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._incarnation = incarnation = uuid.uuid4().hex[:12]
        self._started_at = self._clock()
        self._worker = WorkerProcess(
            self._spec.host, self._log, lambda message: self._inbox.put(("worker", (incarnation, message)))
        )
        init = {key: self._job[key] for key in ("config", "boundaries", "secret", "checkpoint_url", "generation")}
        init |= {"folder": self._spec.folder, "host": self._spec.host, "writer": f"{self._spec.node}-{incarnation}"}
        self._worker.send({"op": "init", **init})
        if self._stop:
            self._worker.send({"op": "stop"})

    def _follow(self, watch: Watch) -> None:
        while not watch.closed:
            for event in watch.get(timeout_s=1.0):
                if event.kind == "put":
                    self._inbox.put(("etcd", event.kv))

    def _loop(self, lease: Lease) -> None:
        while True:
            due = [at for at, _ in self._timers]
            if self._untold:
                due.append(self._told_at + PROGRESS_EVERY_S)
            wait = min(due) - self._clock() if due else 1.0
            try:
                kind, item = self._inbox.get(timeout=min(1.0, max(0.0, wait)))
            except queue.Empty:
                kind, item = "", None
            if kind == "worker":
                self._from_worker(item[0], item[1], lease)
            elif kind == "etcd" and self._from_etcd(item):
                return
            elif kind == "lease":
                self._join_again(lease)
            elif kind == "drain":
                self._put(self._keys.request(f"drain.{self._spec.node}"), b"{}")
            if self._untold and self._clock() - self._told_at >= PROGRESS_EVERY_S:
                self._tell_progress()
            for at, act in [timer for timer in self._timers if timer[0] <= self._clock()]:
                self._timers.remove((at, act))
                act()

    def _from_etcd(self, kv: Any) -> bool:
        """Carries out what was written; whether this agent's work has ended."""
        parsed = self._keys.parse(kv.key)
        if parsed.kind == "result":
            return True
        if parsed.kind == "epoch":
            self._freeze(int(kv.value))
        elif parsed.kind == "plan":
            record = json.loads(kv.value)
            self._frozen, fresh = max(self._frozen, record["epoch"]), record["epoch"] >= self._frozen
            mine = record["members"].get(self._spec.node)
            if record["base"] is not None:
                self._steps, self._untold = [], False  # they are undone
            if fresh and mine is not None and mine["incarnation"] == self._incarnation:
                self._send({"op": "form", **record, "node": self._spec.node})
        elif parsed.kind == "look":
            self._look(int(kv.value))
        elif parsed.kind == "request" and parsed.name == f"kill.{self._spec.node}":
            if kv.value.decode() == self._incarnation and self._worker is not None:
                self._worker.process.kill()
        elif parsed.kind == "request" and parsed.name == "stop":
            self._stop = True
            self._send({"op": "stop"})
        elif parsed.kind == "request" and parsed.name == f"release.{self._spec.node}":
            return bool(kv.value.decode() == self._incarnation)
        return False

    def _freeze(self, epoch: int) -> None:
        """A newer epoch has begun; the plan of an epoch that counts already is no reason to freeze."""
        if epoch <= self._frozen:
            return
        self._frozen = epoch
        self._send({"op": "freeze", "epoch": epoch, "timeout_s": FREEZE_S})
        incarnation, asked = self._incarnation, self._member is not None

        def overdue() -> None:
            if asked and self._incarnation == incarnation and self._answered < epoch and self._worker is not None:
                self._worker.process.kill()

        self._timers.append((self._clock() + FREEZE_S, overdue))

    def _look(self, number: int) -> None:
        """Says what our worker does, as its page shows it, after two looks."""
        incarnation, worker = self._incarnation, self._worker
        if worker is None or self._member is None:
            return
        first = worker.page.read()

        def again() -> None:
            if self._incarnation != incarnation or self._worker is not worker:
                return  # its exit is told
            doing = worker.page.read()
            seen = {
                "number": number,
                "incarnation": incarnation,
                "kind": doing.kind,
                "what": doing.what,
                "still_s": max(0.0, self._clock() - doing.since),
                "runs": doing.beats != first.beats,
            }
            self._put(self._keys.looked(self._spec.node), json.dumps(seen).encode())

        self._timers.append((self._clock() + LOOK_S, again))

    def _from_worker(self, incarnation: str, message: Json, lease: Lease) -> None:
        kind = message["ev"]
        if incarnation != self._incarnation:
            return
        if kind == "ready":
            member = {
                "node": self._spec.node,
                "incarnation": self._incarnation,
                "agent": self._probe.address,
                "store": message["store"],
                "layers": message["layers"],
                "agent_pid": os.getpid(),
                "worker_pid": message["pid"],
                "fingerprint": message["fingerprint"],
            }
            self._member = json.dumps(member).encode()
            try:
                self._put(self._keys.member(self._spec.node), self._member, lease.id)
            except LeaseGone:
                self._inbox.put(("lease", None))
        elif kind == "step":
            self._steps = [*self._steps[-(PROGRESS_KEPT - 1) :], message]
            self._untold = True
        elif kind == "exit":
            self._exited(message)
        elif kind in ("saved", "unsaved"):
            self._put(self._keys.save(message["version"], message["writer"]), json.dumps(message).encode())
        else:
            if kind == "end":
                self._tell_progress()  # the end never overtakes the steps before it
            if kind == "formed":
                self._epoch = self._answered = message["epoch"]
            if kind == "frozen":
                self._answered = message["epoch"]
            self._report(message)

    def _report(self, message: Json) -> None:
        """Writes what the worker says, under the epoch that it says it of."""
        epoch = message.get("epoch", 0)
        value = json.dumps({**message, "incarnation": self._incarnation}).encode()
        self._put(self._keys.report(epoch, self._spec.node), value)

    def _put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Writes, also after an outage of etcd: training goes on meanwhile, and what it says must not get lost.

        Raises:
            LeaseGone: nothing was written.
            EtcdUnreachable: no answer for ``detection.orphan_s`` seconds.
        """
        for attempt in Retrying(
            retry=retry_if_exception(lambda e: isinstance(e, EtcdUnreachable) and not isinstance(e, LeaseGone)),
            stop=stop_after_delay(self._job["config"]["detection"]["orphan_s"]),
            wait=wait_fixed(0.1),
            reraise=True,
        ):
            with attempt:
                self._etcd.put(key, value, lease)

    def _exited(self, message: Json) -> None:
        self._member = None
        if self._worker is not None:
            self._worker.close()
        died = {"ev": "exit", "code": message["code"], "log": str(self._log), "at": self._wall()}
        value = json.dumps({**died, "incarnation": self._incarnation}).encode()
        self._put(self._keys.exit(self._spec.node), value)
        young = self._clock() - self._started_at < YOUNG_S
        self._young_deaths = self._young_deaths + 1 if young else 0
        pause = RESTART_S[min(self._young_deaths, len(RESTART_S) - 1)]
        self._timers.append((self._clock() + pause, self._start_worker))

    def _join_again(self, lease: Lease) -> None:
        """After a lost lease: a new one, and our key back, unless another incarnation of the node is there."""
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(EtcdUnreachable),
                stop=stop_after_delay(self._job["config"]["detection"]["orphan_s"]),
                wait=wait_fixed(0.5),
                reraise=True,
            ):
                with attempt:
                    lease.renew()
        except EtcdUnreachable:
            self._inbox.put(("lease", None))
            return
        if self._member is None:
            return
        key = self._keys.member(self._spec.node)
        put = Put(key, self._member, lease.id)
        try:
            if not self._etcd.txn([absent(key)], [put]).succeeded:
                self._etcd.txn([value_is(key, self._member)], [put])
        except EtcdUnreachable:
            self._inbox.put(("lease", None))  # whether it was written shows at the next try

    def _tell_progress(self) -> None:
        """Writes the announced steps, if this agent's worker is of the epoch that counts."""
        if not self._untold:
            return
        self._told_at = self._clock()
        value = json.dumps({"epoch": self._epoch, "steps": self._steps}).encode()
        counts = value_is(self._keys.epoch, str(self._epoch).encode())
        # Right after a switch the epoch does not count yet, and etcd may be away: try again.
        try:
            self._untold = not self._etcd.txn([counts], [Put(self._keys.progress, value)]).succeeded
        except EtcdUnreachable:
            self._untold = True

    def _send(self, message: Json) -> None:
        if self._worker is not None:
            self._worker.send(message)  # a worker that is gone is reported by its exit


def process_record() -> Json:
    """Names this process so that a successor can end it and nothing else: id, process group, start time."""
    process = psutil.Process()
    return {"pid": process.pid, "pgid": os.getpgid(0), "started": process.create_time(), "boot": psutil.boot_time()}


def end_previous(etcd: Etcd, key: str) -> None:
    """Ends the process group of the node's previous incarnation, if it still runs on this host."""
    kv = etcd.get(key)
    if kv is None:
        return
    record = json.loads(kv.value)
    if abs(record["boot"] - psutil.boot_time()) > 1 or record["pgid"] == os.getpgid(0):
        return
    for process in psutil.process_iter():
        try:
            member = os.getpgid(process.pid) == record["pgid"]
            # A recycled group id belongs to processes that started without our agent; its leader's start time tells.
            if process.pid == record["pid"] and abs(process.create_time() - record["started"]) > 0.01:
                return
            if member and process.create_time() >= record["started"] - 0.01:
                os.kill(process.pid, signal.SIGKILL)
        except (psutil.Error, ProcessLookupError):
            continue  # it ended meanwhile
