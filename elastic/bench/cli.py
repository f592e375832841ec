"""``elastic bench``: benchmarks beside their peers, in one run."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Measure this installation against its peers, in one run.")


@app.callback()
def group() -> None:
    """Measure this installation against its peers, in one run."""


@app.command()
def throughput(
    trials: Annotated[int, typer.Option(help="Windows per contender and case.", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Our training step against plain torch, DDP and torch's pipelines on the same work.

    Example: elastic bench throughput --trials 10
    """
    from elastic.bench.throughput import run_throughput

    document = run_throughput(trials, lambda line: print(line, file=sys.stderr))
    print(json.dumps(document) if as_json else table(document["cases"]))


def table(cases: dict[str, dict[str, Any]]) -> str:
    """The cases as aligned columns."""
    lines = [f"{'case':<18}{'ours':>10}{'peer':>10}{'ratio':>8}"]
    for name, case in cases.items():
        lines.append(f"{name:<18}{case['ours']:>10.1f}{case['peer']:>10.1f}{case['ratio']:>8.3f}  {case['unit']}")
    return "\n".join(lines)
