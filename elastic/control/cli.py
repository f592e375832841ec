"""``elastic nodes``: the size of a running local job, and handing a node's work over."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from elastic.errors import UsageError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Grow, shrink and drain a running job; end quarantines."
)
Job = Annotated[str | None, typer.Option("--job", help="Name of the job; the newest run by default.")]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="The run's folder.")]


@app.callback()
def group() -> None:
    """Grow, shrink and drain a running job."""


@app.command("set")
def set_nodes(
    nodes: Annotated[int, typer.Argument(help="How many nodes the local run shall have.", min=1)],
    job: Job = None,
    run_dir: RunDir = None,
) -> None:
    """Start nodes, or drain those with the highest numbers, until there are NODES.

    Example: elastic nodes set 7
    """
    _request(job, run_dir, "nodes", str(nodes).encode())
    print(f"asked for {nodes} nodes", file=sys.stderr)


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Id of the node, as `elastic status` shows it.")],
    job: Job = None,
    run_dir: RunDir = None,
) -> None:
    """Hand a node's work over and let it go; training does not lose a step.

    Example: elastic nodes drain node-2
    """
    _request(job, run_dir, f"drain.{node}", b"{}", node)
    print(f"asked {node} to hand over its work", file=sys.stderr)


@app.command()
def release(
    node: Annotated[str, typer.Argument(help="Id of the node, as `elastic status` shows it.")],
    job: Job = None,
    run_dir: RunDir = None,
) -> None:
    """End the quarantine of a node that had failed again and again; it is taken in at the next voted step.

    Example: elastic nodes release node-2
    """
    _request(job, run_dir, f"unquarantine.{node}", b"{}", node)
    print(f"asked for {node} to be taken in", file=sys.stderr)


def _request(job: str | None, run_dir: Path | None, name: str, value: bytes, node: str = "") -> None:
    from elastic.rendezvous import Etcd, Keys
    from elastic.runfiles import find_run

    files = find_run(job, run_dir)
    live = files.run()
    if not files.alive() or "etcd" not in live:
        raise UsageError(f"the run in {files.path} is not running", "see `elastic status`")
    keys = Keys(live["job"])
    etcd = Etcd(live["etcd"])
    try:
        members = [json.loads(kv.value)["node"] for kv in etcd.range(keys.members)[0]]
        if node and node not in members:
            raise UsageError(f"there is no node {node!r}", f"there are {', '.join(members) or 'none'}")
        etcd.put(keys.request(name), value)
    finally:
        etcd.close()
