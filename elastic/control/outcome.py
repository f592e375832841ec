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
        due: the layers that ``prepared`` covers; others are held on behalf of an epoch that has not voted yet. ``None``
            is all of them.
        epoch: the last that it formed; what it says of steps is as of that one.
    """

    voter: bool
    step: int
    prepared: int | None = None
    vote: tuple[int, int, Mapping[str, Any]] | None = None
    holds: Mapping[int, Version] = field(default_factory=dict)
    due: frozenset[int] | None = None
    epoch: int | None = None


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


def decide(reports: Iterable[Report], published: Outcome | None, since: int = 0) -> Outcome | None:
    """The open step is the lowest one not applied by all; its outcome is the verdict of that vote if any report saw it
    or is beyond it, or an earlier plan that has not formed says so; else it is void.

    Args:
        reports: of every member of the last plan that reported, dead or alive since.
        published: the outcome in the last plan, if that has not formed.
        since: the epoch of that plan. What it says of a step counts more than votes of the epochs before, which only
            one that did not report in time can still have seen.

    Returns:
        ``None`` when nobody has voted yet.
    """
    voters = [report for report in reports if report.voter]
    if not voters:
        return published
    newest = max(report.step for report in voters)
    # A vote needs every member, and a member applies a step before it votes on the next: they differ by one at most.
    current = [report for report in voters if report.step >= newest - 1]
    for step in sorted({report.step for report in current}):
        told = published is not None and published.step == step
        votes = [
            report.vote
            for report in current
            if report.vote is not None and report.vote[0] == step and (not told or report.vote[1] >= since)
        ]
        if votes:
            # A step may be voted on again in the same epoch, after a redo; the last vote on it is no redo.
            _, epoch, verdict = max(votes, key=lambda vote: (vote[1], vote[2]["kind"] != "redo"))
            return Outcome(step, verdict, epoch)
        if told and published is not None and (published.verdict is not None or step == newest):
            return published
        # Who is beyond a step proves that it was not void: those behind, who cannot know how, hold nothing.
    return Outcome(newest, None, 0)


def version_after(
    reports: Iterable[Report], outcome: Outcome, lineage: int, exact: bool, published: Version | None = None
) -> Version:
    """The version of every layer once the outcome is carried out; ``published`` is that of the last plan."""
    if outcome.after > outcome.step:
        return (lineage, outcome.after, 0 if exact else outcome.epoch)
    for report in reports:
        if report.voter and report.step == outcome.step:
            for version in report.holds.values():
                if version[:2] == (lineage, outcome.step):
                    return version
    # All that hold it now may have fetched it for a plan that they have not begun to train.
    return (
        published if published is not None and published[:2] == (lineage, outcome.step) else (lineage, outcome.step, 0)
    )


def holdings(
    reports: Mapping[str, Report], outcome: Outcome, wanted: Version, lineage: int
) -> Mapping[str, frozenset[int]]:
    """Which layers each live node holds at the version ``wanted``, to which the outcome leads, by node.

    A voter that has the step prepared holds what it is about to apply.
    """
    out = {}
    for node, report in reports.items():
        due = report.voter and report.step == outcome.step and outcome.after > outcome.step
        due = due and (report.prepared == outcome.step or (outcome.verdict or {}).get("kind") == "skip")
        held = set()
        for layer, version in report.holds.items():
            covered = report.due is None or layer in report.due
            if version == wanted or (due and covered and version[:2] == (lineage, outcome.step)):
                held.add(layer)
        out[node] = frozenset(held)
    return out
