"""The outcome of the open step, decided once from the reports of frozen workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Version = tuple[int, int, int]  # lineage, committed steps, epoch of the deciding vote (0 with exact reduction)


@dataclass(frozen=True)
class Report:
    """What a frozen worker says, for one attempt.

    Attributes:
        voter: it took part in votes: its step says how far the epoch was. A joiner or spare holds at most layers.
        step: committed steps applied here.
        prepared: the step whose summed gradients are complete here.
        vote: the newest vote seen, as ``(step, epoch, verdict)``.
        holds: version of each layer held, by index.
    """

    voter: bool
    step: int
    prepared: int | None = None
    vote: tuple[int, int, Mapping[str, Any]] | None = None
    holds: Mapping[int, Version] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """``verdict`` is what the vote on ``step`` decided, ``None`` where it is void and the step is done again.

    ``epoch`` is that of the vote; ``after`` is the number of committed steps once the outcome is carried out.
    """

    step: int
    verdict: Mapping[str, Any] | None
    epoch: int

    @property
    def after(self) -> int:
        return self.step + 1 if self.verdict is not None and self.verdict["kind"] in ("commit", "skip") else self.step


def decide(reports: Iterable[Report], published: Outcome | None) -> Outcome | None:
    """The open step is the lowest one not applied by all; its outcome is the verdict of that vote if any report saw it
    or is beyond it, or an earlier plan that has not formed says so; else it is void.

    Args:
        reports: of every member of the last plan that reported, dead or alive since.
        published: the outcome in the last plan.

    Returns:
        ``None`` when nobody has voted yet.
    """
    voters = [report for report in reports if report.voter]
    if not voters:
        return published
    newest = max(report.step for report in voters)
    # A vote needs every member, and a member applies a step before it votes on the next: they differ by one at most.
    current = [report for report in voters if report.step >= newest - 1]
    open_step = min(report.step for report in current)
    votes = [report.vote for report in current if report.vote is not None and report.vote[0] == open_step]
    if votes:
        # Of two votes of one epoch on a step the first said redo.
        _, epoch, verdict = max(votes, key=lambda vote: (vote[1], vote[2]["kind"] != "redo"))
        return Outcome(open_step, verdict, epoch)
    if published is not None and published.step == open_step:
        return published
    return Outcome(open_step, None, 0)


def version_after(reports: Iterable[Report], outcome: Outcome, lineage: int, exact: bool) -> Version:
    """The version of every layer once the outcome is carried out."""
    if outcome.after > outcome.step:
        return (lineage, outcome.after, 0 if exact else outcome.epoch)
    for report in reports:
        if report.voter and report.step == outcome.step:
            for version in report.holds.values():
                if version[:2] == (lineage, outcome.step):
                    return version
    return (lineage, outcome.step, 0)


def holdings(
    reports: Mapping[str, Report], outcome: Outcome, lineage: int, exact: bool
) -> Mapping[str, frozenset[int]]:
    """Which layers each live node holds at the version that the outcome leads to, by node.

    A voter that has the step prepared holds what it is about to apply.
    """
    wanted = version_after(reports.values(), outcome, lineage, exact)
    out = {}
    for node, report in reports.items():
        due = report.voter and report.step == outcome.step and outcome.after > outcome.step
        due = due and (report.prepared == outcome.step or (outcome.verdict or {}).get("kind") == "skip")
        held = set()
        for layer, version in report.holds.items():
            if version == wanted or (due and version[:2] == (lineage, outcome.step)):
                held.add(layer)
        out[node] = frozenset(held)
    return out
