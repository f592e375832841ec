"""Metric callbacks, ready to be given to ``Job(on_metrics=…)``.

They run in the worker that has rank 0 at the time. A relative path starts where the command of a local run was started;
on a cluster, give an absolute one where every node can write. After a failure the last steps may be told again, and
after a rollback or a resume earlier ones: of one step the last line counts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from elastic.errors import JobError

if TYPE_CHECKING:
    from elastic.job import Metrics


def jsonl(path: str | Path) -> Callable[[Metrics], None]:
    """Appends one JSON line per step: step, loss, lr, grad_norm, samples, eval_loss; what is not finite is null."""
    target = Path(path)

    def write(metrics: Metrics) -> None:
        record = {
            key: value if value is None or math.isfinite(value) else None for key, value in asdict(metrics).items()
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab+") as file:  # opened each time: another worker may write the next
            if file.tell() and not _ends_a_line(file):
                file.write(b"\n")  # a writer before us was cut off, and its step is told again
            file.write(json.dumps(record).encode() + b"\n")

    return write


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def tensorboard(folder: str | Path) -> Callable[[Metrics], None]:
    """Scalars for TensorBoard; where steps are told again, what was drawn from the first of them on is replaced.

    Raises:
        JobError: the package ``tensorboard`` is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise JobError("elastic.metrics.tensorboard needs TensorBoard", "pip install tensorboard") from error
    writer: Any = None  # made in the worker that writes, not in all that load the job
    last = 0

    def write(metrics: Metrics) -> None:
        nonlocal writer, last
        if writer is None or metrics.step <= last:
            if writer is not None:
                writer.close()
            writer = SummaryWriter(str(folder), purge_step=metrics.step)
        last = metrics.step
        for key, value in asdict(metrics).items():
            if value is not None and key != "step":
                writer.add_scalar(key, value, metrics.step)
        writer.flush()

    return write
