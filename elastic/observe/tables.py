"""The human form of documents: the end of a run, its status. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic.observe.text import duration, number, one_line, plural

_STATES = {
    "active": "green",
    "spare": "cyan",
    "joining": "yellow",
    "draining": "yellow",
    "quarantined": "red",
    "running": "green",
    "done": "green",
    "failed": "red",
    "interrupted": "red",
}


def table(*columns: str, right: Iterable[int] = ()) -> Table:
    """A table without a frame, the same for all commands."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, header_style="bold")
    for index, column in enumerate(columns):
        out.add_column(column, justify="right" if index in set(right) else "left", overflow="fold")
    return out


def span(items: Sequence[object]) -> str:
    """``embed``, ``block.0 … head (6)``, ``0 … 2 (3)``."""
    names = [one_line(item) for item in items]
    return " ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]} ({len(names)})"


def doctor_report(findings: Iterable[Any]) -> RenderableType:
    """One line per check, and under it what to do."""
    out = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        out.add_column(overflow="fold")
    for one in findings:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[one.state]
        out.add_row(Text(one.state, f"bold {colour}"), one.check, Text(one_line(one.found)))
        if one.advice:
            out.add_row("", "", Text(f"→ {one_line(one.advice)}", colour))
    return out


def run_report(document: Mapping[str, Any], seconds: float | None, path: str) -> RenderableType:
    """The end of a run: what came out, and where it lives."""
    state = str(document["state"])
    head = Text.assemble(one_line(document["job"]), ": ", (one_line(state), f"bold {_STATES.get(state, 'yellow')}"))
    if "step" not in document:  # of a run that goes on in the background, or of one that never began
        return Group(head, _facts({"run": path}))
    head.append(f" after {plural(document['step'], 'step')}")
    samples = f"{document['samples']:,}"
    for key in ("lost", "repeated"):
        samples += f", {document[f'samples_{key}']} {key}"
    facts = {"loss": number(document["loss"]), "digest": document["params_digest"] or "–", "samples": samples}
    if document["recoveries"]:
        facts["recoveries"] = str(len(document["recoveries"]))
    if seconds is not None:
        facts["time"] = duration(seconds)
    return Group(head, _facts({**facts, "run": path}))


def _facts(facts: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(f"  {name}", Text(value))
    return grid


def status_report(document: Mapping[str, Any]) -> RenderableType:
    """One row per worker of every live node."""
    state = str(document["state"])
    head = Text.assemble(
        (one_line(document["job"]), "bold"),
        "  ",
        (one_line(state), _STATES.get(state, "yellow")),
        f"  epoch {document['epoch']}  step {document['step']}",
    )
    if not document["nodes"]:
        return head
    columns = ("node", "state", "incarnation", "agent", "worker", "rank", "pipeline", "stage", "layers")
    out = table(*columns, right=(3, 4, 5, 6, 7))
    for node in document["nodes"]:
        who: list[str | Text] = [
            one_line(node["id"]),
            Text(node["state"], _STATES.get(node["state"], "")),
            str(node["incarnation"])[:8],
        ]
        who.append(str(node["agent_pid"]))
        for worker in node["workers"] or [{}]:
            places = [str(worker.get(key, "–")) for key in ("pid", "rank", "pipeline", "stage")]
            out.add_row(*who, *places, span(worker.get("layers", ())) or "–")
    return Group(head, Text(), out)
