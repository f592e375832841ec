"""Stories in plain text: events, and under each the decisions it leads to, with their reasons.

A line that starts in the first column is an event (or a comment, ``#``), what is indented is the answer. Review a
change as a diff: ``GOLDEN=write python -m pytest tests/control/test_golden.py`` rewrites the answers.

    settings KEY=VALUE …              first; see `tests.control.machine.settings`
    at SECONDS                        the time of what follows
    expect N / size N / join N …      nodes by number; ``join 2 b`` is incarnation b of node-2
    exit N / gone N / left N          its worker ended; its agent ended; its lease ran out
    frozen N step=5 prepared=5 vote=commit voter=no holds=none    a report; layers are those of its stage at that step
    formed N … / form                 some ranks; all, and they vote
    progress STEP / broken N / raise N STEP / drain N / end N … / stop / tick
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from elastic.control.messages import (
    AgentGone,
    Broken,
    Current,
    DrainRequested,
    Effect,
    Event,
    Expected,
    Failed,
    Finish,
    Formed,
    Freeze,
    Joined,
    Left,
    Progressed,
    Publish,
    Record,
    Release,
    Resize,
    SizeRequested,
    StopRequested,
    Tick,
    Voted,
    WorkerExited,
)
from elastic.control.outcome import Version
from elastic.control.state import State, advance, ranked
from tests.control.machine import LAYERS, answered, end, frozen, layers_of, member, settings

GOLDEN = Path(__file__).parent / "golden"
ERROR = {"code": "user_code", "message": "ValueError in the loss", "hint": "", "detail": "Traceback …"}


class Story:
    def __init__(self) -> None:
        self.state = State(settings())
        self.now = 0.0

    def answer(self, line: str) -> Iterator[str]:
        """What an event leads to."""
        word, *rest = line.split()
        options = dict(part.split("=", 1) for part in rest if "=" in part)
        words = [part for part in rest if "=" not in part]
        if word == "settings":
            self.state = State(settings(**{key: int(value) for key, value in options.items()}))
        elif word == "at":
            self.now = float(words[0])
        else:
            for event in self.events(word, words, options):
                self.state, effects = advance(self.state, event, self.now)
                self.state, later = answered(self.state, effects, self.now)
                yield from lines_of([*effects, *later])

    def events(self, word: str, words: list[str], options: dict[str, str]) -> Iterable[Event]:
        nodes = [f"node-{number}" for number in words]
        newest = self.state.switching or self.state.published
        match word:
            case "expect":
                return [Expected(int(words[0]))]
            case "size":
                return [SizeRequested(int(words[0]))]
            case "join" if len(words) == 2 and not words[1].isdigit():
                return [Joined(member(int(words[0]), words[1]))]
            case "join":
                return [Joined(member(int(number))) for number in words]
            case "exit":
                return [WorkerExited(node, self.state.members[node].incarnation, -9, f"{node}.log") for node in nodes]
            case "gone":
                return [AgentGone(self.state.members[node].agent) for node in nodes]
            case "left":
                return [Left(node, self.state.members[node].incarnation) for node in nodes]
            case "frozen":
                return [self.report(node, options) for node in nodes]
            case "formed":
                assert newest is not None
                return [Formed(node, newest.epoch) for node in nodes]
            case "form":
                assert newest is not None
                ranks = sorted(ranked(newest))
                formed: list[Event] = [Formed(node, newest.epoch) for node in ranks]
                return [*formed, *[Voted(node, newest.epoch, 0.1, 0.05) for node in ranks]]
            case "progress":
                return [Progressed(int(words[0]))]
            case "broken":
                assert newest is not None
                return [Broken(node, newest.epoch, "connection reset") for node in nodes]
            case "raise":
                assert self.state.published is not None
                return [Failed(nodes[0], self.state.published.epoch, int(words[1]), ERROR)]
            case "drain":
                return [DrainRequested(node) for node in nodes]
            case "end":
                assert self.state.published is not None
                stages = {node: [LAYERS[i] for i in layers_of(self.state, node)] for node in nodes}
                return [end(node, self.state.published.epoch, layers) for node, layers in stages.items()]
            case "stop":
                return [StopRequested()]
            case "tick":
                return [Tick()]
        raise ValueError(f"no event is called {word!r}")

    def report(self, node: str, options: dict[str, str]) -> Event:
        step = int(options.get("step", "0"))
        voted = int(options.get("voted", options.get("prepared", step)))
        epoch = self.state.published.epoch if self.state.published else 0
        vote = (voted, epoch, {"kind": options["vote"]}) if "vote" in options else None
        return frozen(
            self.state,
            node,
            step=step,
            prepared=int(options["prepared"]) if "prepared" in options else None,
            vote=vote,
            voter=options.get("voter", "yes") == "yes",
            holds={} if options.get("holds") == "none" else None,
        )


def lines_of(effects: Iterable[Effect]) -> Iterator[str]:
    for effect in effects:
        match effect:
            case Freeze(epoch):
                yield f"freeze: epoch {epoch} is opened, everybody reports"
            case Current(epoch):
                yield f"epoch {epoch} counts"
            case Release(node):
                yield f"{node} may go"
            case Resize(nodes):
                yield f"agents wanted: {nodes}"
            case Finish(result):
                yield f"result: {facts(result)}"
            case Record("ended", _):
                pass  # the same as the result
            case Record(kind, data):
                yield f"note: {kind} {facts(data)}".rstrip()
            case Publish():
                yield from plan_of(effect)


def plan_of(publish: Publish) -> Iterator[str]:
    start = f"epoch {publish.epoch}" + (f" after {publish.switch_from}" if publish.switch_from is not None else "")
    yield f"plan of {start}: {publish.reason}"
    for pipeline in publish.plan.pipelines:
        stages = " → ".join(f"{stage.node} {stage.start}-{stage.stop - 1}" for stage in pipeline.stages)
        yield f"    {stages}, {len(pipeline.microbatches)} microbatches"
    others = sorted(publish.members.keys() - ranked(publish))
    if others:
        yield f"    no rank: {', '.join(others)}"
    if publish.base is not None:
        yield f"    from {publish.base.manifest or 'the seeds'}, lineage {publish.lineage}"
    elif publish.outcome is not None:
        verdict = publish.outcome.verdict
        decided = "void, it is done again" if verdict is None else f"{verdict['kind']}, for all"
        yield f"    step {publish.outcome.step} is {decided}; starts at {named(publish.version)}"
    else:
        yield "    starts at the voted step that all have this plan at"
    for node, layers in sorted(publish.sources.items()):
        for layer, holders in sorted(layers.items()):
            yield f"    {node} gets layer {layer} from {', '.join(holders)}"
    yield f"    {publish.form_s:g} s to form" if publish.switch_from is None else "    training goes on meanwhile"


def named(version: Version | None) -> str:
    assert version is not None
    lineage, step, epoch = version
    return f"step {step} of lineage {lineage}" + (f", decided in epoch {epoch}" if epoch else "")


def facts(data: object) -> str:
    if isinstance(data, dict):
        return ", ".join(f"{key} {facts(value)}".rstrip() for key, value in data.items() if value not in (None, ""))
    if isinstance(data, list | tuple):
        return "[" + "; ".join(facts(item) for item in data) + "]"
    return f"{data:g}" if isinstance(data, float) else str(data)


def told(text: str) -> str:
    """The story with today's answers."""
    story, out = Story(), []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        out.append(line)
        if line and not line.startswith("#"):
            out += [f"    {answer}" for answer in story.answer(line)]
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_golden_story(path: Path) -> None:
    text = path.read_text()
    if os.environ.get("GOLDEN") == "write":
        path.write_text(told(text))
    assert told(text) == path.read_text()


def test_there_are_stories() -> None:
    assert len(list(GOLDEN.glob("*.txt"))) >= 10
