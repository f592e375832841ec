"""``elastic checkpoints``: what is in a checkpoint store, and whether it is whole."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from checkpoint.commit import Survey
    from checkpoint.layout import Attempt
    from checkpoint.reader import CheckpointError
    from checkpoint.store import Store

Json = dict[str, Any]

PATIENCE_S = 10.0  # somebody is waiting at the terminal
READERS = 8

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, show and verify checkpoints.")

Url = Annotated[str, typer.Argument(metavar="URL", help="Root of the checkpoints, or the folder of a run.")]
Step = Annotated[int | None, typer.Argument(metavar="[STEP]", help="Of the checkpoint; by default the newest.")]
Options = Annotated[
    list[str],
    typer.Option("--option", metavar="KEY=VALUE", help="For the file system, such as anon=true; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, also on failure.")]


@app.callback()
def group() -> None:
    """List, show and verify checkpoints."""


@app.command()
def ls(
    url: Url,
    option: Options = [],  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """All checkpoints, newest first.

    Example: elastic checkpoints ls s3://bucket/run
    """
    with _reporting(as_json):
        store, found = _survey(url, option)
        counted = _counted(found)
        attempts = sorted((a for g in found.generations for a in found.committed(g)), reverse=True)
        with ThreadPoolExecutor(READERS) as pool:
            rows = list(pool.map(lambda attempt: _row(store, attempt, attempt in counted), attempts))
        if as_json:
            _print_json({"url": store.url, "checkpoints": rows})
        elif not rows:
            print(f"no checkpoints yet in {store.url}", file=sys.stderr)
        else:
            cells = [
                [
                    r["generation"],
                    r["lineage"],
                    r["step"],
                    _size(r["bytes"]),
                    r["parts"],
                    _when(r["created"]),
                    _state(r),
                ]
                for r in rows
            ]
            _print_table(["generation", "lineage", "step", "size", "parts", "when", "state"], cells)


@app.command()
def show(
    url: Url,
    step: Step = None,
    option: Options = [],  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """What one checkpoint holds.

    Example: elastic checkpoints show runs/gpt-bytes 100
    """
    from checkpoint.reader import Checkpoint

    with _reporting(as_json):
        store, found = _survey(url, option)
        attempt = _choose(store, found, step)
        opened = Checkpoint.open(store, attempt)
        row = _row(store, attempt, attempt in _counted(found))
        tensors = {name: opened.entry(name) for name in opened.names()}
        if as_json:
            parts = [part.to_json() for part in opened.manifest.parts]
            entries = {n: {"dtype": e.dtype, "shape": e.shape, "bytes": e.bytes} for n, e in tensors.items()}
            _print_json({"url": store.url, **row, "parts": parts, "meta": opened.meta, "tensors": entries})
            return
        about = {"checkpoint": f"{store.url}/{attempt.manifest}", "when": _when(row["created"]), "state": _state(row)}
        about |= {"tensors": f"{len(tensors)}, {_size(row['bytes'])}"}
        for key, value in {**about, **{key: json.dumps(value) for key, value in opened.meta.items()}}.items():
            print(f"{key}: {value}")
        print()
        _print_table(["writer", "size"], [[part.writer, _size(part.bytes)] for part in opened.manifest.parts])
        print()
        cells = [[n, e.dtype, "×".join(map(str, e.shape)) or "scalar", _size(e.bytes)] for n, e in tensors.items()]
        _print_table(["tensor", "dtype", "shape", "size"], cells)


@app.command()
def verify(
    url: Url,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint there is.")] = False,
    option: Options = [],  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """Read everything and compare it with what was written.

    Example: elastic checkpoints verify s3://bucket/run --all
    """
    from checkpoint.reader import CheckpointError

    if every and step is not None:
        raise typer.BadParameter("give a STEP or --all, not both")
    with _reporting(as_json):
        store, found = _survey(url, option)
        counted = _counted(found)
        chosen = [_choose(store, found, step)]
        if every:
            chosen = sorted((a for g in found.generations for a in found.committed(g)), reverse=True)
        rows = []
        worst: CheckpointError | None = None
        for attempt in chosen:
            row: Json = {**attempt.__dict__, "counts": attempt in counted, "ok": True}
            try:
                row["bytes"] = _verify(store, attempt)
            except CheckpointError as error:
                if worst is None or error.exit_code > worst.exit_code:
                    worst = error
                row |= {"ok": False, "error": _error(error)}
            rows.append(row)
            if not as_json:
                _print_verdict(row)
        if as_json:
            _print_json({"url": store.url, "checkpoints": rows, **({"error": _error(worst)} if worst else {})})
        if worst:
            raise typer.Exit(worst.exit_code)


def _survey(url: str, options: Sequence[str]) -> tuple[Store, Survey]:
    from checkpoint.commit import survey
    from checkpoint.reader import Absent
    from checkpoint.store import Store

    inner = os.path.join(url, "checkpoints")
    store = Store(inner if os.path.isdir(inner) else url, _parsed(options), PATIENCE_S)
    found = survey(store)
    if not found.generations:
        raise Absent(f"there are no checkpoints in {store.url}", "give the root of the checkpoints or a run's folder")
    return store, found


def _parsed(options: Sequence[str]) -> Json:
    """``key=value``; the value is JSON, or else a string."""
    found: Json = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"--option wants KEY=VALUE, not {option!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _counted(found: Survey) -> set[Attempt]:
    return {attempt for generation in found.generations for attempt in found.surviving(generation)}


def _choose(store: Store, found: Survey, step: int | None) -> Attempt:
    """The newest of that step; one that counts before one that was undone."""
    from checkpoint.reader import Absent

    counted = _counted(found)
    every = [a for g in found.generations for a in found.committed(g)]
    fitting = counted if step is None else {a for a in every if a.step == step}
    if not fitting:
        steps = ", ".join(str(step) for step in sorted({a.step for a in every})) or "none yet"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise Absent(f"there is {what} in {store.url}", f"there are: {steps}")
    return max(fitting, key=lambda a: (a in counted, a))


def _row(store: Store, attempt: Attempt, counts: bool) -> Json:
    from checkpoint.reader import CheckpointError, read_manifest

    row: Json = {**attempt.__dict__, "counts": counts, "bytes": None, "parts": None, "created": None}
    try:
        manifest = read_manifest(store, attempt)
    except CheckpointError as error:
        return {**row, "error": _error(error)}
    return {**row, "bytes": manifest.total_bytes, "parts": len(manifest.parts), "created": manifest.created}


def _verify(store: Store, attempt: Attempt) -> int:
    from checkpoint.reader import Checkpoint

    opened = Checkpoint.open(store, attempt)
    with _progress(f"step {attempt.step}") as progress:
        opened.verify(progress)
    return opened.manifest.total_bytes


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _reporting(as_json: bool) -> Iterator[None]:
    """Errors as a line, a hint and an exit code."""
    from checkpoint.reader import CheckpointError
    from checkpoint.store import StoreError

    try:
        yield
    except (CheckpointError, StoreError) as error:
        if as_json:
            _print_json({"error": _error(error)})
        else:
            print(f"error: {error.message}", file=sys.stderr)
            if error.hint:
                print(f"hint: {error.hint}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def _error(error: Any) -> Json:
    return {"code": error.code, "message": error.message, "hint": error.hint}


def _print_json(document: Json) -> None:
    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_verdict(row: Json) -> None:
    name = f"generation {row['generation']}, lineage {row['lineage']}, step {row['step']}"
    if row["ok"]:
        print(f"{name}: ok, {_size(row['bytes'])}")
        return
    print(f"{name}: {row['error']['code']}")
    print(f"error: {row['error']['message']}", file=sys.stderr)
    if row["error"]["hint"]:
        print(f"hint: {row['error']['hint']}", file=sys.stderr)


def _print_table(heads: list[str], rows: list[list[Any]]) -> None:
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*heads, box=None, header_style="bold")
        for row in cells:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for row in [heads, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _when(created: float | None) -> str:
    return "-" if created is None else datetime.fromtimestamp(created).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _state(row: Json) -> str:
    return row["error"]["code"] if "error" in row else "counts" if row["counts"] else "undone"
