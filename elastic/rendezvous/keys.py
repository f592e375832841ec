"""Where a job's state lies in etcd. Everything is under ``/elastic/jobs/<job>/``.

    key                         written by          what it holds
    ``spec``                    first controller    the job as it was submitted
    ``leader``                  controllers         who leads; its create revision is the fence
    ``generation``              leader              the current fresh start
    ``epoch``                   leader              the newest allocated epoch
    ``plans/%010d``             leader              one epoch's plan
    ``members/<node>``          that node           its incarnation; on a lease
    ``exits/<node>``            that node           how its last worker ended
    ``hosts/<node>``            that node           its process group, so that its next incarnation can end it
    ``reports/%010d/<node>``    that node           what a frozen node holds, for one attempt; on no lease
    ``saves/<version>/<writer>``  that node         a part of a checkpoint that is in the store; on no lease
    ``look``                    leader              that all agents are to say what their workers do; counts up
    ``looks/<node>``            that node           what its worker does
    ``intent``                  leader              the checkpoint that it has the right to commit
    ``starting_over``           leader              that it claims a lineage: the next plan starts from there
    ``progress``                rank 0's node       the last announced steps
    ``events/%010d``            leader              the decisions, in order
    ``requests/<name>``         commands            what users ask for, such as ``stop``
    ``attempts/%020d``          leader              marker of the leader's transactions, by fence; on its lease
    ``result``                  leader              how the job ended

Numbers are padded so that keys sort like what they number. No prefix here is a prefix of another's keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ROOT = "/elastic/jobs/"
_SINGLE = frozenset({"spec", "leader", "generation", "epoch", "progress", "result", "intent", "look", "starting_over"})
_PATTERNS = {
    "plan": re.compile(r"plans/(?P<number>\d{10})"),
    "member": re.compile(r"members/(?P<name>[^/]+)"),
    "exit": re.compile(r"exits/(?P<name>[^/]+)"),
    "host": re.compile(r"hosts/(?P<name>[^/]+)"),
    "report": re.compile(r"reports/(?P<number>\d{10})/(?P<name>[^/]+)"),
    "save": re.compile(r"saves/(?P<name>[^/]+/[^/]+)"),
    "looked": re.compile(r"looks/(?P<name>[^/]+)"),
    "event": re.compile(r"events/(?P<number>\d{10})"),
    "request": re.compile(r"requests/(?P<name>[^/]+)"),
    "attempt": re.compile(r"attempts/(?P<number>\d{20})"),
}


@dataclass(frozen=True)
class Parsed:
    """A key read back: `kind` is the method of `Keys` that makes it.

    `number` is the epoch, sequence or fence, `name` the node or request; None where the kind has none.
    """

    kind: str
    number: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class Keys:
    """The keys of one job, whose name was validated where it entered."""

    job: str

    @property
    def root(self) -> str:
        return f"{_ROOT}{self.job}/"

    @property
    def spec(self) -> str:
        return self.root + "spec"

    @property
    def leader(self) -> str:
        return self.root + "leader"

    @property
    def generation(self) -> str:
        return self.root + "generation"

    @property
    def epoch(self) -> str:
        return self.root + "epoch"

    @property
    def progress(self) -> str:
        return self.root + "progress"

    @property
    def result(self) -> str:
        return self.root + "result"

    @property
    def look(self) -> str:
        return self.root + "look"

    def looked(self, node: str) -> str:
        return self.root + "looks/" + _segment(node)

    @property
    def intent(self) -> str:
        return self.root + "intent"

    @property
    def starting_over(self) -> str:
        return self.root + "starting_over"

    @property
    def plans(self) -> str:
        return self.root + "plans/"

    @property
    def members(self) -> str:
        return self.root + "members/"

    @property
    def events(self) -> str:
        return self.root + "events/"

    @property
    def requests(self) -> str:
        return self.root + "requests/"

    @property
    def attempts(self) -> str:
        return self.root + "attempts/"

    def reports(self, epoch: int | None = None) -> str:
        """The prefix of one epoch's reports, or of all."""
        return self.root + "reports/" + ("" if epoch is None else _padded(epoch, 10) + "/")

    def plan(self, epoch: int) -> str:
        return self.plans + _padded(epoch, 10)

    def member(self, node: str) -> str:
        return self.members + _segment(node)

    def exit(self, node: str) -> str:
        return self.root + "exits/" + _segment(node)

    def host(self, node: str) -> str:
        return self.root + "hosts/" + _segment(node)

    def report(self, epoch: int, node: str) -> str:
        return self.reports(epoch) + _segment(node)

    def saves(self, version: Sequence[int]) -> str:
        """The prefix of the parts of one checkpoint."""
        return self.root + "saves/" + "-".join(map(str, version)) + "/"

    def save(self, version: Sequence[int], writer: str) -> str:
        return self.saves(version) + _segment(writer)

    def event(self, seq: int) -> str:
        return self.events + _padded(seq, 10)

    def request(self, name: str) -> str:
        return self.requests + _segment(name)

    def attempt(self, fence: int) -> str:
        return self.attempts + _padded(fence, 20)

    def parse(self, key: str) -> Parsed:
        """What a key of this job stands for.

        Raises:
            ValueError: not a key of this job, or of no known kind.
        """
        tail = key.removeprefix(self.root)
        if tail != key:
            if tail in _SINGLE:
                return Parsed(tail)
            for kind, pattern in _PATTERNS.items():
                if match := pattern.fullmatch(tail):
                    found = match.groupdict()
                    return Parsed(kind, int(found["number"]) if "number" in found else None, found.get("name"))
        raise ValueError(f"not a key of job {self.job}: {key!r}")


def _padded(number: int, width: int) -> str:
    if not 0 <= number < 10**width:
        raise ValueError(f"{number} does not fit into {width} digits")
    return f"{number:0{width}d}"


def _segment(name: str) -> str:
    if not name or "/" in name:
        raise ValueError(f"a name in a key must be non-empty and without a slash, got {name!r}")
    return name
