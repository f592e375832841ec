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

from checkpoint.store import Store, StoreError
from elastic.engine.launch import WorkerProcess
from elastic.errors import EtcdUnreachable
from elastic.rendezvous import Etcd, Keys, Lease, Watch, watch_prefix
from elastic.rendezvous.values import Put, value_is

Json = dict[str, Any]
PROBE = "probe"  # object that the supervisor writes into the checkpoint store and every node must see there
PROGRESS_EVERY_S = 0.1
PROGRESS_KEPT = 256  # steps told with each write, so that a reader that misses writes still sees every step


@dataclass(frozen=True)
class AgentSpec:
    """
    Attributes:
        endpoints: of etcd, ``host:port``.
        node: the node's name; an incarnation id is drawn at start.
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

    def __init__(self, spec: AgentSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._keys = Keys(spec.job)
        self.incarnation = uuid.uuid4().hex[:12]
        self._inbox: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._etcd = Etcd(spec.endpoints)
        self._worker: WorkerProcess | None = None
        self._log = Path(spec.log_dir) / f"{spec.node}.log"
        self._epoch = 0
        self._steps: list[Json] = []
        self._told_at = 0.0
        self._untold = False

    def run(self) -> None:
        """Returns when the job has ended; the worker is gone then, and so are the node's keys."""
        end_previous(self._etcd, self._keys.host(self._spec.node))
        self._etcd.put(self._keys.host(self._spec.node), json.dumps(process_record()).encode())
        spec = self._wait_for_spec()
        lease = Lease(self._etcd, spec["config"]["detection"]["lease_s"])
        listed, watch = watch_prefix(self._etcd, self._keys.root)
        try:
            refused = self._store_is_shared(spec)
            if refused:
                self._report({"ev": "refused", "reason": refused})
            else:
                self._start_worker(spec)
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

    def _wait_for_spec(self) -> Json:
        kv = self._etcd.get(self._keys.spec)
        if kv is None:  # written before the controller that starts agents
            raise EtcdUnreachable(f"job {self._spec.job} has no spec in etcd", "it may have ended already")
        out: Json = json.loads(kv.value)
        return out

    def _store_is_shared(self, spec: Json) -> str:
        """Why this node must not join: it cannot read what the run's supervisor wrote to the checkpoint store."""
        url = spec["checkpoint_url"]
        try:
            probe = Store(url, spec["config"]["checkpoint"]["storage_options"]).read(PROBE)
        except StoreError as error:
            return str(error)
        return "" if probe == self._spec.job.encode() else f"checkpoint.url {url} is not shared with this node"

    def _report(self, message: Json) -> None:
        report = {**message, "incarnation": self.incarnation}
        key = self._keys.report(message.get("epoch", self._epoch), self._spec.node)
        self._etcd.put(key, json.dumps(report).encode())

    def _start_worker(self, spec: Json) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._worker = WorkerProcess(self._spec.host, self._log, lambda message: self._inbox.put(("worker", message)))
        init = {key: spec[key] for key in ("config", "boundaries")}
        self._worker.send({"op": "init", **init, "folder": self._spec.folder, "host": self._spec.host})

    def _follow(self, watch: Watch) -> None:
        while True:
            events = watch.get(timeout_s=1.0)
            for event in events:
                if event.kind == "put":
                    self._inbox.put(("etcd", event.kv))

    def _loop(self, lease: Lease) -> None:
        while True:
            wait = PROGRESS_EVERY_S - (self._clock() - self._told_at) if self._untold else 1.0
            try:
                kind, item = self._inbox.get(timeout=max(0.0, wait))
            except queue.Empty:
                self._tell_progress()
                continue
            if kind == "worker":
                self._from_worker(item, lease)
            elif self._from_etcd(item):
                return
            if self._untold and self._clock() - self._told_at >= PROGRESS_EVERY_S:
                self._tell_progress()

    def _from_etcd(self, kv: Any) -> bool:
        """Carries out what was written; whether the job has ended."""
        parsed = self._keys.parse(kv.key)
        if parsed.kind == "result":
            return True
        if parsed.kind == "plan":
            record = json.loads(kv.value)
            mine = record["members"].get(self._spec.node)
            if record["epoch"] > self._epoch and mine is not None and mine["incarnation"] == self.incarnation:
                self._epoch = record["epoch"]
                self._send({"op": "form", **record, "node": self._spec.node})
        elif parsed.kind == "request" and parsed.name == "stop":
            self._send({"op": "stop"})
        return False

    def _from_worker(self, message: Json, lease: Lease) -> None:
        kind = message["ev"]
        if kind == "ready":
            member = {
                "node": self._spec.node,
                "incarnation": self.incarnation,
                "store": message["store"],
                "agent_pid": os.getpid(),
                "worker_pid": message["pid"],
                "fingerprint": message["fingerprint"],
            }
            self._etcd.put(self._keys.member(self._spec.node), json.dumps(member).encode(), lease.id)
        elif kind == "step":
            self._steps = [*self._steps[-(PROGRESS_KEPT - 1) :], message]
            self._untold = True
        else:
            self._tell_progress()  # reports never overtake the steps before them
            if kind == "exit":
                message = {**message, "log": str(self._log)}
            self._report(message)

    def _tell_progress(self) -> None:
        """Writes the announced steps, if this agent's worker is still of the newest epoch."""
        if not self._untold:
            return
        self._untold = False
        self._told_at = self._clock()
        value = json.dumps({"epoch": self._epoch, "steps": self._steps}).encode()
        newest = value_is(self._keys.epoch, str(self._epoch).encode())
        self._etcd.txn([newest], [Put(self._keys.progress, value)])

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
