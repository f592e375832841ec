"""Runs a plan over real worker processes, with the test in the agents' place: no etcd, no Ray."""

from __future__ import annotations

import queue
import time
from pathlib import Path

from elastic.config import config_from
from elastic.digest import combined_digest
from elastic.engine.inspection import inspect_job
from elastic.engine.launch import Mailbox, WorkerProcess
from elastic.job import load_job
from elastic.planning import Node, make_plan

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
    boxes, workers, stores = {}, {}, {}
    messages = {rank: [] for rank in ranks.values()}
    deadline = time.monotonic() + timeout_s
    try:
        for node, rank in ranks.items():
            boxes[rank] = Mailbox()
            workers[rank] = WorkerProcess("127.0.0.1", tmp_path / f"{node}.log", boxes[rank])
            workers[rank].send(
                {
                    "op": "init",
                    "config": config.to_dict(),
                    "folder": config.folder,
                    "boundaries": inspection.boundaries,
                    "host": "127.0.0.1",
                }
            )
        for rank, box in boxes.items():
            ready = box.get(timeout_s)
            if ready["ev"] != "ready":
                return None, {rank: [ready]}
            stores[rank] = ready["store"]
        for node, rank in ranks.items():
            workers[rank].send(
                {
                    "op": "form", "epoch": 1, "node": node, "ranks": ranks, "plan": plan.to_json(),
                    "store": stores[0], "step": 0,
                }
            )  # fmt: skip
        waiting = set(boxes)
        while waiting and time.monotonic() < deadline:
            for rank in list(waiting):
                try:
                    message = boxes[rank].get(0.05)
                except queue.Empty:
                    continue
                messages[rank].append(message)
                if message["ev"] in ("end", "error", "broken", "exit"):
                    waiting.discard(rank)
            if any(m["ev"] in ("error", "exit") for got in messages.values() for m in got):
                break  # the others wait for a rank that has stopped
    finally:
        for worker in workers.values():
            worker.close()
    digests = {}
    for got in messages.values():
        for message in got:
            if message["ev"] == "end":
                for layer, digest in message["digests"].items():
                    assert digests.setdefault(layer, digest) == digest, f"replicas of {layer} differ"
    names = [layer.name for layer in inspection.profile.layers]
    complete = combined_digest([(n, digests[n]) for n in names]) if set(names) <= set(digests) else None
    return complete, messages


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
