"""Runs plans over real worker processes, with the test in the agents' and the controller's place: no etcd, no Ray."""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path

from elastic.config import config_from
from elastic.control.controller import record_of, report_of
from elastic.control.messages import Base, Member, Publish
from elastic.control.outcome import decide, holdings, version_after
from elastic.digest import combined_digest
from elastic.engine.inspection import inspect_job
from elastic.engine.launch import Mailbox, WorkerProcess
from elastic.job import load_job
from elastic.planning import Node, make_plan, reconfigure

HERE = str(Path(__file__).parent)


def small_config(params=None, **train):
    defaults = {"steps": 6, "global_batch": 16, "microbatch": 2, "seed": 3}
    return config_from(
        {"name": "small", "job": "small_job:job", "params": params or {}, "train": {**defaults, **train}}, folder=HERE
    )


def load(config):
    return load_job(config.job, config.params, config.train.seed, config.folder)


def train_on(config, nodes, tmp_path, stages=None, timeout_s=120):
    """Trains over ``nodes`` worker processes and returns ``(digest, messages by rank)``.

    Args:
        stages: how many nodes one copy of the model needs; sets the device memory accordingly.
    """
    inspection = inspect_job(load(config), config.train)
    device_bytes = None if stages is None else memory_for(inspection.profile, stages)
    plan = make_plan(
        inspection.profile,
        [Node(f"node-{i}") for i in range(nodes)],
        microbatches=config.train.microbatches,
        fault_tolerance=0,
        device_bytes=device_bytes,
    )
    ranks = {place.node: place.rank for place in plan.ranks()}
    messages = {rank: [] for rank in ranks.values()}
    cluster = Cluster(config, inspection, tmp_path, device_bytes)
    deadline = time.monotonic() + timeout_s
    try:
        for node in ranks:
            cluster.launch(node)
        for node, rank in ranks.items():
            refusal = cluster.await_ready(node, timeout_s)
            if refusal is not None:
                return None, {rank: [refusal]}
        cluster.publish(plan)
        waiting = set(ranks)
        while waiting and time.monotonic() < deadline:
            for node in list(waiting):
                message = cluster.hear(node, 0.05)
                if message is None:
                    continue
                messages[ranks[node]].append(message)
                if message["ev"] in ("end", "error", "broken", "exit"):
                    waiting.discard(node)
            if any(m["ev"] in ("error", "exit") for got in messages.values() for m in got):
                break  # the others wait for a rank that has stopped
    finally:
        cluster.close()
    return cluster.digest([m for got in messages.values() for m in got]), messages


class Cluster:
    """Worker processes that are kept from epoch to epoch, and what an agent and the controller do for them.

    Attributes:
        workers, members: by node; of those that live.
        heard: by node, all that was taken from its mailbox.
        record: the newest plan, as it would stand in etcd.
    """

    def __init__(self, config, inspection, tmp_path, device_bytes=None):
        self.config, self.inspection, self._folder, self._device_bytes = config, inspection, tmp_path, device_bytes
        self.workers, self.members, self.heard, self._boxes = {}, {}, {}, {}
        self.record = self._plan = self._outcome = None
        self._epoch = 0
        self._lineage = 0
        self._formed = False

    def launch(self, node):
        """Starts the node's worker; `await_ready` waits for it."""
        self._boxes[node] = Mailbox()
        self.workers[node] = WorkerProcess("127.0.0.1", self._folder / f"{node}.log", self._boxes[node])
        self.workers[node].send(
            {
                "op": "init",
                "config": self.config.to_dict(),
                "folder": self.config.folder,
                "boundaries": self.inspection.boundaries,
                "host": "127.0.0.1",
                "secret": "test",
                "checkpoint_url": str(self._folder / "checkpoints"),
                "generation": 1,
                "writer": node,
            }
        )

    def await_ready(self, node, timeout_s=60.0):
        """What the worker said instead of that it is ready."""
        ready = self._boxes[node].get(timeout_s)
        if ready["ev"] != "ready":
            return ready
        pid = self.workers[node].pid
        self.members[node] = Member(
            node, f"{node}.{pid}", "127.0.0.1:1", ready["store"], ready["layers"], pid, pid, ready["fingerprint"]
        )
        return None

    def hear(self, node, timeout_s=60.0):
        """The next message of a node, or ``None``."""
        try:
            message = self._boxes[node].get(timeout_s)
        except queue.Empty:
            return None
        self.heard.setdefault(node, []).append(message)
        return message

    def await_event(self, node, *kinds, timeout_s=60.0):
        """The next message of one of these kinds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            message = self.hear(node, max(0.0, deadline - time.monotonic()))
            if message is not None and message["ev"] in kinds:
                return message
            assert message is None or message["ev"] not in ("error", "exit", "broken"), (node, message)
        raise AssertionError(f"{node} did not say any of {kinds}")

    def kill(self, node):
        self.workers.pop(node).close()
        del self.members[node]
        while (message := self.hear(node, 5.0)) is not None and message["ev"] != "exit":
            pass

    def freeze(self):
        """Opens the next epoch; the reports of all that live, as the controller reads them, by node."""
        self._epoch += 1
        for worker in self.workers.values():
            worker.send({"op": "freeze", "epoch": self._epoch, "timeout_s": 10.0})
        return {node: report_of(self._frozen(node)) for node in self.members}

    def _frozen(self, node):
        while True:
            message = self.await_event(node, "frozen", "broken")
            if message["ev"] == "frozen" and message["epoch"] == self._epoch:
                return message

    def recover(self, reports, dead=()):
        """Decides on reports, of the living and the dead, and publishes the plan that follows; its reconfiguration."""
        live = {node: report for node, report in reports.items() if node in self.members}
        outcome = decide([*reports.values(), *dead], None if self._formed else self._outcome)
        assert outcome is not None
        exact = self.config.train.reduction == "exact"
        version = version_after([*reports.values(), *dead], outcome, self._lineage, exact)
        found = reconfigure(
            self.inspection.profile,
            [Node(node) for node in sorted(self.members)],
            holdings(live, outcome, version, self._lineage),
            microbatches=self.config.train.microbatches,
            fault_tolerance=0,
            device_bytes=self._device_bytes,
            previous=self._plan,
        )
        assert found.missing == (), "no live node holds these layers"
        sources = {}
        for transfer in found.transfers:
            sources.setdefault(transfer.node, {})[transfer.layer] = transfer.sources
        self.publish(found.plan, outcome, version, sources)
        return outcome, found

    def publish(self, plan, outcome=None, version=(0, 0, 0), sources=None):
        """Tells every member of a plan to form; without an outcome it starts from the seeds."""
        self._epoch = max(1, self._epoch)
        self._plan, self._outcome, self._formed = plan, outcome, False
        publish = Publish(
            epoch=self._epoch,
            plan=plan,
            members=self.members,
            outcome=outcome,
            version=version,
            lineage=self._lineage,
            base=Base(self._lineage) if outcome is None else None,
            sources=sources or {},
            switch_from=None,
            form_s=20.0,
            reason="",
        )
        self.record = json.loads(json.dumps(record_of(publish, fence=1)))
        for node in self.members:
            self.workers[node].send({"op": "form", **self.record, "node": node})

    def ends(self, timeout_s=120.0):
        """The ``end`` of every rank of the newest plan."""
        self.formed()
        deadline = time.monotonic() + timeout_s
        return [
            self.await_event(node, "end", timeout_s=max(0.1, deadline - time.monotonic()))
            for node in self.record["ranks"]
        ]

    def formed(self):
        """To be called once the newest plan has formed: then its outcome has been carried out by all."""
        self._formed = True

    def digest(self, messages):
        """The digest of the model from the ends among ``messages``; replicas must agree."""
        digests = {}
        for message in messages:
            if message["ev"] == "end":
                for layer, digest in message["digests"].items():
                    assert digests.setdefault(layer, digest) == digest, f"replicas of {layer} differ"
        names = [layer.name for layer in self.inspection.profile.layers]
        return combined_digest([(n, digests[n]) for n in names]) if set(names) <= set(digests) else None

    def close(self):
        for worker in self.workers.values():
            worker.close()


def memory_for(profile, stages):
    """The least device memory with which one copy needs exactly ``stages`` devices."""
    from elastic.errors import PlanError
    from elastic.planning import smallest_size

    low, high = 1, sum(layer.state_bytes + 64 * layer.activation_bytes for layer in profile.layers)
    while low < high:
        middle = (low + high) // 2
        try:
            fits = smallest_size(profile, middle) <= stages
        except PlanError:
            fits = False
        low, high = (low, middle) if fits else (middle + 1, high)
    assert smallest_size(profile, low) == stages
    return low
