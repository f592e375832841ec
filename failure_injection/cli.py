"""``elastic chaos``: prove that a job survives, before the cloud tries it."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Annotated

import typer

from elastic.errors import UsageError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Inject faults into a job and check that it survives."
)
FOLDER = Path("configs/chaos")


@app.callback()
def group() -> None:
    """Inject faults into a job and check that it survives."""


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario's YAML file.", show_default=False)],
    seed: Annotated[int | None, typer.Option(help="Chooses the victims; a new one each time without it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Run a job undisturbed and under a scenario's faults, and compare.

    Example: elastic chaos run configs/chaos/single-node.yaml --seed 7
    """
    from failure_injection.runner import load_scenario, run_scenario

    loaded = load_scenario(scenario)
    chosen = random.SystemRandom().randrange(2**31) if seed is None else seed
    document = run_scenario(loaded, scenario.parent, chosen, lambda line: print(line, file=sys.stderr))
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        for verdict in document["verdicts"]:
            print(f"{'ok  ' if verdict['holds'] else 'FAIL'}  {verdict['oracle']:<26}{verdict['why']}")
        again = f"elastic chaos run {scenario} --seed {chosen}"
        print("survived" if document["passed"] else f"did not survive; the same again: {again}")
    raise typer.Exit(0 if document["passed"] else 1)


@app.command("list")
def list_scenarios(
    folder: Annotated[Path, typer.Option(help="Where to look.")] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List the scenarios of a folder.

    Example: elastic chaos list --folder configs/chaos
    """
    from failure_injection.runner import load_scenario

    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "give the folder of the scenarios by --folder")
    found = {path: load_scenario(path) for path in sorted(folder.glob("*.yaml"))}
    if as_json:
        print(json.dumps([{"path": str(path), "name": one.name, "about": one.about} for path, one in found.items()]))
        return
    for path, one in found.items():
        print(f"{path!s:<40} {one.about}")
