"""``elastic bench throughput``: our training step against plain torch doing the same work, in alternating windows.

Cases: one process (``single``), two data-parallel processes against `DistributedDataParallel` (``ddp-2``), and one
pipeline of two stages against torch's own schedule (``pipeline-2``); each also with ``reduction: exact``. The
processes of a case hold both contenders and take turns, so that noise of the machine hits both.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.config import Config, config_from
from elastic.errors import ElasticError

Json = dict[str, Any]
CASES = {"single": (1, 1), "ddp-2": (2, 1), "pipeline-2": (2, 2)}  # processes, stages of one pipeline
WINDOW_STEPS = 4
CASE_TIMEOUT_S = 900.0


def bench_config() -> Config:
    """The gpt-bytes job."""
    return config_from(
        {
            "name": "bench",
            "job": "elastic.recipes.byte_gpt:job",
            "params": {"layers": 6, "width": 144, "heads": 6, "context": 128, "dropout": 0.1},
            "train": {"steps": 10**9, "global_batch": 32, "microbatch": 4},
        }
    )


def run_throughput(trials: int, say: Callable[[str], None]) -> Json:
    """``{"cases": {CASE: {"ours", "peer", "ratio", "unit"}}}``; ``ratio`` is the median of the windows' ratios."""
    cases: Json = {}
    for name, (processes, stages) in CASES.items():
        say(f"{name}: {trials} windows of {WINDOW_STEPS} steps each for ours fast, ours exact and plain torch")
        windows = _run_case(processes, stages, trials)
        samples = WINDOW_STEPS * bench_config().train.global_batch
        for suffix, ours in (("", "fast"), ("-exact", "exact")):
            ratios = [peer / own for peer, own in zip(windows["peer"], windows[ours], strict=True)]
            cases[name + suffix] = {
                "ours": samples / statistics.median(windows[ours]),
                "peer": samples / statistics.median(windows["peer"]),
                "ratio": statistics.median(ratios),
                "unit": "samples/s",
            }
    return {"cases": cases}


def _run_case(processes: int, stages: int, trials: int) -> dict[str, list[float]]:
    """Seconds of each window, by contender, as the first process saw them."""
    from elastic.engine.comm import serve_store

    _store, address = serve_store("127.0.0.1")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder, contextlib.ExitStack() as ends:
        log = Path(folder, "log")
        errors = ends.enter_context(log.open("wb"))
        arguments = [str(n) for n in (processes, stages, trials)]
        children = []
        for rank in range(processes):
            child = subprocess.Popen(
                [sys.executable, "-m", "elastic.bench.contenders", str(rank), *arguments, address],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
                env=env,
            )
            ends.callback(child.wait)
            ends.callback(child.kill)
            children.append(child)
        try:
            out, _ = children[0].communicate(timeout=CASE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ElasticError(
                f"the benchmark did not finish within {CASE_TIMEOUT_S:.0f} s", "is the machine very busy? try again"
            ) from None
        if children[0].returncode != 0:
            raise ElasticError("a benchmark process failed", detail=log.read_text(errors="replace"))
    windows: dict[str, list[float]] = json.loads(out)
    return windows
