"""The document that ``elastic run --json`` prints, from a run's history. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import elastic.planning  # noqa: F401 - declares errors, which `from_json` knows only when they are declared
from elastic.errors import Interrupted, from_json

Json = dict[str, Any]


def summarize(
    job: str,
    events: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None,
    generation: int = 1,
) -> Json:
    """Everything a script wants to know of a run.

    Args:
        events: the history, in order.
        steps: the committed steps, in order.
        result: what the controller wrote at the end; without one the run is still going.
        generation: the fresh start of the job that this run is of.
    """
    # The last: a checkpoint that turned out to be damaged was resumed from first.
    resumed = next((event["step"] for event in reversed(events) if event["kind"] == "resumed"), None)
    trained_from = min([resumed or 0, *[event["to_step"] for event in events if event["kind"] == "rollback"]])
    last = steps[-1] if steps else {}
    given = result or {}
    # The result of a failed run knows the step of its last plan only.
    step = max(given.get("step", 0), last.get("step", 0))
    loss = given.get("loss")
    document: Json = {
        "job": job,
        "state": given.get("state", "running"),
        "step": step,
        "loss": last.get("loss") if loss is None else loss,
        "params_digest": given.get("params_digest"),
        "generation": generation,
        "resumed_from": {"generation": generation, "step": resumed} if resumed is not None else None,
        "steps_trained": step - trained_from,
        "samples": given.get("samples", last.get("samples", 0)),
        "samples_lost": given.get("lost", last.get("lost", 0)),
        "samples_repeated": given.get("repeated", last.get("repeated", 0)),
        "epoch": max((event["epoch"] for event in events if event["kind"] == "formed"), default=0),
        "recoveries": [recovery for event in events if event["kind"] == "recovered" for recovery in _recoveries(event)],
        "reconfigurations": [
            {key: event[key] for key in ("cause", "epoch", "pause_s", "pause_steps")}
            for event in events
            if event["kind"] == "reconfigured"
        ],
        "checkpoints": [
            {key: event[key] for key in ("step", "manifest", "bytes", "stall_s", "upload_s")}
            for event in events
            if event["kind"] == "checkpoint_saved"
        ],
        "plans": [
            {key: event[key] for key in ("epoch", "pipelines", "reason")} for event in events if event["kind"] == "plan"
        ],
    }
    if given.get("error"):
        document["error"] = given["error"]
    return {key: finite(value) for key, value in document.items()}


def _recoveries(event: Mapping[str, Any]) -> list[Json]:
    """One entry per lost worker or node; those of one recovery share its epoch and its time."""
    shared = {key: event[key] for key in ("epoch", "total_s", "lost_steps")}
    return [{**loss, **shared} for loss in event["losses"]]


def finite(value: Any) -> Any:
    """A copy in which numbers that JSON does not have (NaN, infinities) are null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def exit_code(document: Mapping[str, Any]) -> int:
    """How a command that prints this document ends: a stop on request is a success, as is a run that goes on."""
    if document.get("state") == "interrupted":
        return Interrupted.exit_code
    if document.get("state") == "failed":
        return from_json(document.get("error") or {}).exit_code
    return 0
