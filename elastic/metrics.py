"""Metric callbacks, ready to be given to ``Job(on_metrics=…)``.

They run in the worker that has rank 0 at the time, so a file should lie where every node can write. After a failure the
last steps may be told again, and after a rollback or a resume earlier ones: of one step the last line counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.errors import JobError

if TYPE_CHECKING:
    from elastic.job import Metrics


def jsonl(path: str | Path) -> Callable[[Metrics], None]:
    """Appends one JSON line per step: step, loss, lr, grad_norm, samples, eval_loss."""

    def write(metrics: Metrics) -> None:
        with Path(path).open("a", encoding="utf-8") as file:  # opened each time: another worker may write the next
            file.write(json.dumps(asdict(metrics)) + "\n")

    return write


def tensorboard(folder: str | Path) -> Callable[[Metrics], None]:
    """Scalars for TensorBoard; a step that is told again overwrites itself in the plot.

    Raises:
        JobError: the package ``tensorboard`` is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise JobError("elastic.metrics.tensorboard needs TensorBoard", "pip install tensorboard") from error
    made: list[Any] = []  # in the worker that writes, not in all that load the job

    def write(metrics: Metrics) -> None:
        if not made:
            made.append(SummaryWriter(str(folder)))
        for key, value in asdict(metrics).items():
            if value is not None and key != "step":
                made[0].add_scalar(key, value, metrics.step)
        made[0].flush()

    return write
