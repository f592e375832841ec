"""``elastic bench``: benchmarks beside their peers, in one run."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure this installation against its peers, in one run."
)


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


@app.command()
def recovery(
    cause: Annotated[str, typer.Option(help="Comma-separated: worker, node.")] = "worker,node",
    trials: Annotated[int, typer.Option(help="Kills per cause.", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="Chooses the victims.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """SIGKILL a worker or a whole node of a running job, and time the next committed step.

    Example: elastic bench recovery --cause worker,node --trials 10
    """
    from elastic.bench.recovery import run_recovery

    document = run_recovery(cause.split(","), trials, seed, lambda line: print(line, file=sys.stderr))
    print(json.dumps(document) if as_json else recovery_table(document["causes"]))


def recovery_table(causes: dict[str, dict[str, Any]]) -> str:
    """One line per cause, seconds."""
    phases = list(next(iter(causes.values()))["phases"])
    lines = [f"{'cause':<10}{'trials':>7}{'median':>9}{'p90':>9}{'max':>9}{'lost':>6}  " + " ".join(phases)]
    for name, c in causes.items():
        figures = "".join(f"{c[key]:>9.3f}" for key in ("median_s", "p90_s", "max_s"))
        each = " ".join(f"{c['phases'][phase]:.3f}" for phase in phases)
        lines.append(f"{name:<10}{c['trials']:>7}{figures}{c['lost_steps']:>6}  {each}")
    return "\n".join(lines)


def table(cases: dict[str, dict[str, Any]]) -> str:
    """The cases as aligned columns."""
    lines = [f"{'case':<18}{'ours':>10}{'peer':>10}{'ratio':>8}"]
    for name, case in cases.items():
        lines.append(f"{name:<18}{case['ours']:>10.1f}{case['peer']:>10.1f}{case['ratio']:>8.3f}  {case['unit']}")
    return "\n".join(lines)
