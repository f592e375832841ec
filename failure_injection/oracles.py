"""What must hold after a run in which things went wrong. Pure; each verdict explains itself from the history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from failure_injection.scenario import Checks, Fault

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    oracle: str
    holds: bool
    why: str


@dataclass(frozen=True)
class Evidence:
    """
    Attributes:
        document, events, steps: of the disturbed run: what it printed, its history, its committed steps as written.
        undisturbed: the document of the same job with nothing going wrong.
        batch: samples per step.
        unfired: faults that did not happen.
        left: what the run left behind, in words.
        damaged: checkpoints that do not verify, with the reason.
    """

    document: Json
    events: Sequence[Json]
    steps: Sequence[Json]
    undisturbed: Json
    batch: int
    unfired: Sequence[Fault]
    left: Sequence[str]
    damaged: Sequence[str]


def judge(evidence: Evidence, checks: Checks) -> list[Verdict]:
    return list(_judge(evidence, checks))


def _judge(e: Evidence, checks: Checks) -> Iterator[Verdict]:
    document = e.document
    if document.get("error"):
        yield Verdict("ended well", False, f"{document['state']}: {document['error']['message']}")
    else:
        yield Verdict("ended well", document["state"] == "done", f"{document['state']} at step {document['step']}")

    missed = ", ".join(map(str, e.unfired))
    yield Verdict("faults fired", not e.unfired, f"{missed} did not happen" if missed else "all of them")

    ours, theirs = document["params_digest"], e.undisturbed["params_digest"]
    yield Verdict("same bits", ours == theirs, f"{ours} after step {document['step']}, undisturbed {theirs}")

    wanted = document["step"] * e.batch
    counted = (document["samples"], document["samples_lost"], document["samples_repeated"])
    yield Verdict(
        "every sample once",
        counted == (wanted, 0, 0),
        "{} trained, {} lost, {} repeated; ".format(*counted) + f"{wanted} are {document['step']} steps",
    )

    recoveries = document["recoveries"]
    lost = sum({one["epoch"]: one["lost_steps"] for one in recoveries}.values())
    yield Verdict("steps lost", lost <= checks.lost_steps, f"{lost}, {checks.lost_steps} may be")

    if checks.recovery_s is not None:
        worst = max(recoveries, key=lambda one: one["total_s"], default=None)
        why = "none" if worst is None else f"at most {worst['total_s']:.2f} s, after {worst['node']} was lost"
        yield Verdict("recoveries in time", worst is None or worst["total_s"] <= checks.recovery_s, why)

    back = _goes_back(e.steps, e.events)
    yield Verdict("steps never go back", back is None, back or f"{len(e.steps)} steps in order")

    epochs = [event["epoch"] for event in e.events if event["kind"] == "plan"]
    yield Verdict(
        "one plan per epoch", len(set(epochs)) == len(epochs) and epochs == sorted(epochs), f"{len(epochs)} plans"
    )

    yield Verdict("every checkpoint restores", not e.damaged, "; ".join(e.damaged) or "all verified")
    yield Verdict("nothing is left", not e.left, ", ".join(e.left) or "no process, no folder")


def _goes_back(steps: Sequence[Json], events: Sequence[Json]) -> str | None:
    """Only a rollback may; it says to which step."""
    allowed = {event["to_step"] + 1 for event in events if event["kind"] == "rollback"}
    for before, after in pairwise(steps):
        if after["step"] != before["step"] + 1 and after["step"] not in allowed:
            return f"step {after['step']} came after step {before['step']}"
    return None
