"""``elastic bench recovery``: from SIGKILL to the next committed step of the survivors, on the bench model.

A local run of four nodes is started once; a worker or a whole node (the process group of its agent) is killed again and
again, each time after all four have trained together for a while. The clock starts before the signal is sent and ends
when the first survivor's next vote returns.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic.config import config_from
from elastic.errors import ElasticError
from elastic.runfiles import RunFiles
from elastic.runner import execute, read_status, request_stop

Json = dict[str, Any]
NODES = 4
CALM_STEPS = 15  # trained by all nodes before the next kill
TRIAL_TIMEOUT_S = 120.0
CAUSES = ("worker", "node")


def bench_job() -> Json:
    """The bench model: 4 layers, 128 wide, context 64, four sequences per node."""
    return {
        "name": "bench-recovery",
        "job": "elastic.recipes.byte_gpt:job",
        "params": {"layers": 4, "width": 128, "heads": 4, "context": 64, "dropout": 0.0},
        "train": {"steps": 10**8, "global_batch": 4 * NODES, "microbatch": 4},
        "cluster": {"nodes": NODES},
        "detection": {"quarantine": False},  # the same nodes are killed again and again
    }


def run_recovery(causes: Sequence[str], trials: int, seed: int, say: Callable[[str], None]) -> Json:
    """``{"causes": {CAUSE: {trials, median_s, p90_s, max_s, lost_steps, phases}}}``, seconds.

    Raises:
        ElasticError: an unknown cause, or a trial that did not recover in time.
    """
    for cause in causes:
        if cause not in CAUSES:
            raise ElasticError(f"unknown cause {cause!r}", f"known causes: {', '.join(CAUSES)}")
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        killer = Killer(RunFiles(Path(folder) / "run"), [(c, i) for c in causes for i in range(trials)], seed, say)
        execute(config_from(bench_job()), run_dir=killer.files.path, watcher=killer)
    if killer.failure:
        raise ElasticError(killer.failure, "is the machine very busy? try again")
    return {"causes": {cause: summary([r for r in killer.results if r["cause"] == cause]) for cause in causes}}


def summary(results: Sequence[Json]) -> Json:
    """Of the trials of one cause."""
    totals = sorted(result["total_s"] for result in results)
    names = results[0]["phases"].keys()
    return {
        "trials": len(results),
        "median_s": statistics.median(totals),
        "p90_s": totals[min(len(totals) - 1, round(0.9 * (len(totals) - 1)))],
        "max_s": totals[-1],
        "lost_steps": sum(result["lost_steps"] for result in results),
        "phases": {name: statistics.median(result["phases"][name] for result in results) for name in names},
    }


class Killer:
    """Watches a run and kills one victim per trial."""

    def __init__(
        self, files: RunFiles, trials: Sequence[tuple[str, int]], seed: int, say: Callable[[str], None]
    ) -> None:
        self.files, self._trials, self._say = files, list(trials), say
        self._random = random.Random(seed)
        self.results: list[Json] = []
        self.failure = ""
        self._nodes = 0  # that compute in the newest formed plan
        self._planned = 0
        self._calm = 0
        self._killed_at: float | None = None
        self._deadline = time.monotonic() + TRIAL_TIMEOUT_S
        self._stopping = False

    def note(self, text: str) -> None:
        self._say(text)

    def event(self, record: Json) -> None:
        match record["kind"]:
            case "plan":
                self._planned = sum(len(pipeline) for pipeline in record["pipelines"])
            case "formed":
                self._nodes, self._calm = self._planned, 0
            case "recovered":
                self._recovered(record)

    def step(self, record: Json) -> None:
        self._calm += 1

    def tick(self) -> None:
        if self._stopping:
            return
        if not self._trials and self._killed_at is None:
            self._stop()
        elif time.monotonic() > self._deadline:
            self.failure = "a trial did not recover, or the node did not come back in time"
            self._stop()
        elif self._killed_at is None and self._nodes == NODES and self._calm >= CALM_STEPS:
            self._kill()

    def _kill(self) -> None:
        nodes = [node for node in read_status(self.files)["nodes"] if node["workers"]]
        if len(nodes) < NODES:
            return
        victim = self._random.choice(nodes)
        self._deadline = time.monotonic() + TRIAL_TIMEOUT_S
        self._killed_at = time.time()
        if self._trials[0][0] == "worker":
            os.kill(victim["workers"][0]["pid"], signal.SIGKILL)
        else:
            os.killpg(victim["agent_pid"], signal.SIGKILL)

    def _recovered(self, record: Json) -> None:
        if self._killed_at is None:
            return
        cause, number = self._trials.pop(0)
        total = record["resumed_at"] - self._killed_at
        phases = dict(record["phases"])
        phases["detect"] = max(0.0, total - sum(seconds for name, seconds in phases.items() if name != "detect"))
        self.results.append({"cause": cause, "total_s": total, "lost_steps": record["lost_steps"], "phases": phases})
        self._killed_at = None
        self._say(f"{cause} {number + 1}: {total:.3f} s")

    def _stop(self) -> None:
        self._stopping = True
        threading.Thread(target=request_stop, args=(self.files, 60.0), daemon=True).start()
