"""A run as it goes: `LiveView` draws on a terminal, `PlainView` writes lines. Both are watchers of a run."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from elastic.observe.nodes import LABEL, node_map
from elastic.observe.picture import Picture
from elastic.observe.sentences import sentence
from elastic.observe.text import clock_time, duration, number, one_line, rate, short_time, shorten, size, sparkline

Record = Mapping[str, Any]

REFRESH_S = 1 / 8
EVENT_ROWS = 7
MAP_ROWS = 8
NARROWEST = 60  # columns; below that, lines read better than a drawing
_PHASES = {
    "running": "green",
    "done": "green",
    "failed": "red",
    "interrupted": "red",
}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveView:
    """Redraws a block of constant height: progress, loss, rates, the nodes, the last events. One line until the first.

    Args:
        console: a terminal.
        job: name of the job.
        total_steps: where the run ends.
        clock: monotonic seconds.
    """

    def __init__(
        self, console: Console, job: str, total_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._job, self._clock = console, job, clock
        self._picture = Picture(total_steps)
        self._started = self._drawn = clock()
        self._frame = 0
        self._map_rows = 1
        # Drawn from the calls below, not from a thread: there is nothing to lock.
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw()
        self._live.transient = not self._picture.events  # of a run that never began nothing is worth keeping
        self._live.stop()

    def event(self, record: Record) -> None:
        self._picture.add_event(record)
        self.tick()

    def step(self, record: Record) -> None:
        self._picture.add_step(record)
        self.tick()

    def note(self, text: str) -> None:
        self._picture.note = text
        self._draw()  # what it announces may take long, without a tick

    def tick(self) -> None:
        if self._clock() - self._drawn >= REFRESH_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = self._clock()
        self._frame += 1
        self._live.update(self.render(), refresh=True)

    def render(self) -> Group:
        """The block as it is now, as wide as the console."""
        width, picture = self._console.width, self._picture
        if not picture.events:
            return Group(self._head(width))
        # Grows when the plan does and never shrinks, so that nothing below it jumps.
        nodes = node_map(picture, width, min(MAP_ROWS, max(2, self._console.height - EVENT_ROWS - 9)))
        self._map_rows = max(self._map_rows, len(nodes))
        nodes += [Text()] * (self._map_rows - len(nodes))
        lines = [self._head(width), self._bar(width), self._loss(width), self._rates(), self._saved()]
        lines += [Text(), *nodes, Text(), *self._events(width)]
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return Group(*lines)

    def _head(self, width: int) -> Text:
        picture = self._picture
        busy = picture.phase in ("starting", "waiting", "forming", "stopping")
        mark = _SPINNER[self._frame % len(_SPINNER)] if busy else "●"
        words = picture.note if picture.phase == "starting" and picture.note else picture.phase
        state = Text.assemble((f"{mark} {shorten(one_line(words), 24)}", _PHASES.get(picture.phase, "yellow")))
        if picture.epoch:
            state.append(f"  epoch {picture.epoch}")
        times = duration(self._clock() - self._started)
        left = (picture.total_steps - picture.step) * picture.seconds_per_step
        if left and picture.phase == "running":
            times += f", {duration(left)} left"
        room = width - state.cell_len - len(times) - 4
        head = Text.assemble((f"{shorten(self._job, max(8, room))}  ", "bold"))
        head.append_text(state)
        head.append(" " * max(2, width - head.cell_len - len(times)))
        return head.append(times)

    def _bar(self, width: int) -> Text:
        step, total = self._picture.step, self._picture.total_steps
        part = min(1.0, step / total)
        label = f"  {step:>{len(str(total))}}/{total}  {math.floor(part * 100):>3} %"
        room = width - len(label)
        done = round(part * room)
        return Text.assemble(("━" * done, "green"), ("─" * (room - done), "dim"), label)

    def _loss(self, width: int) -> Text:
        picture = self._picture
        line = Text.assemble((f"{'loss':{LABEL}}", "dim"))
        if not picture.last:
            return line.append("–")
        line.append(f"{number(_float(picture.last.get('loss'))):<10}", "bold")
        curve = sparkline(list(picture.losses), width - line.cell_len)
        return line.append(curve, "magenta")

    def _rates(self) -> Text:
        picture = self._picture
        line = Text.assemble((f"{'rate':{LABEL}}", "dim"))
        if not picture.recent:
            return line.append("–")
        cells = [f"{rate(picture.samples_per_s)} samples/s"]
        if not picture.weight_is_samples:
            cells.insert(0, f"{rate(picture.weight_per_s)} tokens/s")
        for key, label in (("lr", "lr"), ("grad_norm", "gradient"), ("eval_loss", "evaluation")):
            if picture.last.get(key) is not None:
                cells.append(f"{label} {number(_float(picture.last[key]))}")
        # What does not fit is left out, from the least telling on.
        while len(cells) > 1 and line.cell_len + len("   ".join(cells)) > self._console.width:
            cells.pop()
        return line.append("   ".join(cells))

    def _saved(self) -> Text:
        picture = self._picture
        line = Text.assemble((f"{'checkpoint':{LABEL}}", "dim"))
        last = picture.saved
        if last.get("kind") == "checkpoint_failed":
            line.append(f"that of step {last.get('step')} failed", "red")
        elif last:
            line.append(f"step {last.get('step', last.get('to_step'))}")
            if last.get("bytes"):
                line.append(f", {size(float(last['bytes']))}")
            if last.get("kind") == "checkpoint_saved" and picture.saving is None:
                line.append(f" in {short_time(last.get('upload_s') or 0.0)}")
                line.append(f", stalled for {short_time(last.get('stall_s') or 0.0)}")
        elif picture.saving is None:
            line.append("–")
        if picture.saving is not None:
            line.append(f"{'   ' if last else ''}writing that of step {picture.saving}", "yellow")
        return line

    def _events(self, width: int) -> list[Text]:
        """The last events, as many as the rows hold whole; long ones go over several rows."""
        rows: list[Text] = []
        for event in reversed(self._picture.events):
            folded = textwrap.wrap(sentence(event), width - LABEL, max_lines=EVENT_ROWS, placeholder=" …") or [""]
            if len(rows) + len(folded) > EVENT_ROWS:
                break
            style = "red" if event.get("error") else ""
            first = Text.assemble((f"{clock_time(event.get('time')):{LABEL}}", "dim"), (folded[0], style))
            rows = [first, *(Text.assemble(" " * LABEL, (more, style)) for more in folded[1:]), *rows]
        return rows + [Text()] * (EVENT_ROWS - len(rows))


class PlainView:
    """A line per event and, at most once a second or at every tenth of the run, one for a step.

    Args:
        stream: written and flushed line by line.
        total_steps: where the run ends.
        clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._picture = Picture(total_steps)
        self._told = -math.inf

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass  # every line is out

    def event(self, record: Record) -> None:
        self._picture.add_event(record)
        self._write(f"{clock_time(record.get('time'))}  {sentence(record)}")

    def step(self, record: Record) -> None:
        picture, before = self._picture, self._picture.step
        picture.add_step(record)
        tenth = before * 10 // picture.total_steps != picture.step * 10 // picture.total_steps
        if tenth or self._clock() - self._told >= 1.0:
            self._told = self._clock()
            self._write(self._step_line(record))

    def note(self, text: str) -> None:
        self._write(one_line(text))

    def tick(self) -> None:
        pass

    def _step_line(self, record: Record) -> str:
        picture = self._picture
        line = f"step {picture.step}/{picture.total_steps}  loss {number(_float(record.get('loss')))}"
        if record.get("eval_loss") is not None:
            line += f"  evaluation {number(_float(record['eval_loss']))}"
        if not picture.recent:
            return line
        if picture.weight_is_samples:
            return f"{line}  {rate(picture.samples_per_s)} samples/s"
        return f"{line}  {rate(picture.weight_per_s)} tokens/s  {rate(picture.samples_per_s)} samples/s"

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


View = LiveView | PlainView


def view_for(console: Console, job: str, total_steps: int) -> View:
    """The view that suits the console."""
    if console.is_terminal and not console.is_dumb_terminal and console.width >= NARROWEST:
        return LiveView(console, job, total_steps)
    return PlainView(console.file, total_steps)  # type: ignore[arg-type] # rich types its file as IO


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
