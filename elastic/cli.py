"""The command line. Data goes to stdout, progress and errors to stderr; ``--json`` prints one document on stdout,
also on failure. What a command needs is imported inside it, so that ``elastic --help`` never waits for torch."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from elastic.errors import ElasticError, Interrupted, UsageError

if TYPE_CHECKING:
    from elastic.runfiles import RunFiles

PLUGINS = "elastic.commands"  # entry-point group: name of a sub-command → typer app
FOLLOW_S = 0.2
PIPED_WIDTH = 160  # columns of tables that go into a file or a pipe
SIGPIPE_EXIT = 141

# Typer carries click inside or depends on it, by version; this is the base of all its complaints in either case.
_CommandLineError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Defect(ElasticError):
    """An exception that nobody foresaw."""

    code = "internal"


class _Commands(TyperGroup):
    """Our commands, and those of installed packages, which are imported only when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(_plugins().keys() - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        plugin = _plugins().get(cmd_name)
        return own if own is not None or plugin is None else _load(plugin)

    def invoke(self, ctx: Any) -> Any:
        # Caught here because typer, further out, would turn both into exits of its own.
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        except BrokenPipeError:
            raise typer.Exit(_reader_left()) from None


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PLUGINS)}


def _load(plugin: EntryPoint) -> Any:
    try:
        command = typer.main.get_command(plugin.load())
    except Exception as error:  # noqa: BLE001 - foreign code, and the other commands must work whatever it does
        command = typer.main.get_command(_stand_in(plugin, f"{type(error).__name__}: {error}"))
    command.name = plugin.name
    return command


def _stand_in(plugin: EntryPoint, why: str) -> typer.Typer:
    """Takes the place of a command that cannot be loaded, and says so when it is run."""
    app = typer.Typer(rich_markup_mode="rich")
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(help=escape(f"Cannot be loaded: {why}"), context_settings=anything)
    def fail() -> None:
        package = plugin.dist.name if plugin.dist else plugin.value
        raise ElasticError(f"command {plugin.name!r} cannot be loaded: {why}", f"reinstall the package {package}")

    return app


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The job's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Override a key of the config, such as train.steps=20; may be repeated.",
    ),
]
JobName = Annotated[
    str | None, typer.Option("--job", metavar="NAME", help="The run's job; by default the newest run below here.")
]
RunDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The run's folder, where it is not runs/NAME.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, also on failure.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"elastic {version('elastic-runtime')}")
        except PackageNotFoundError:  # run from a source tree
            print("elastic, not installed")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models on machines that come and go.

    Start with: elastic init my_job
    """


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Write a small job and its config to start from.

    Example: elastic init my_job
    """
    from elastic.scaffold import scaffold

    written = scaffold(folder)
    if as_json:
        _print_json({"written": [str(path) for path in written]})
        return
    console = _stdout()
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    config = shlex.quote(str(written[1]))
    console.print(f"\nnext:             elastic run {config}", markup=False, soft_wrap=True)
    console.print(f"while it trains:  elastic status --job {folder.resolve().name}", markup=False, soft_wrap=True)


@app.command()
def doctor(
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="A checkpoint store to try too.", show_default=False)
    ] = None,
    options: Annotated[
        list[str],
        typer.Option("--option", metavar="KEY=VALUE", help="For its file system; may be repeated.", show_default=False),
    ] = [],  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """Check whether this machine can run jobs, and say what to do where it cannot.

    Example: elastic doctor --store s3://bucket/run
    """
    from elastic.doctor import document, examine
    from elastic.observe.tables import doctor_report

    example = "example: --store s3://bucket/run --option endpoint_url=http://127.0.0.1:9000"
    if options and store is None:
        raise UsageError("--option is for the file system of --store", example)
    pairs = [option.partition("=") for option in options]
    if not all(key and separator for key, separator, _ in pairs):
        raise UsageError("--option must be KEY=VALUE", example)
    findings = examine(store, {key: _json_or_text(value) for key, _, value in pairs})
    _print_json(document(findings)) if as_json else _stdout().print(doctor_report(findings))
    raise typer.Exit(0 if document(findings)["fit"] else 1)


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    detach: Annotated[bool, typer.Option("--detach", help="Return once training has begun; it goes on.")] = False,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|STEP", help="Go on from the newest checkpoint, none, or that of a step.")
    ] = "auto",
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Train a job to its end.

    Ctrl-C stops it after the step under way, a second Ctrl-C at once.

    Example: elastic run configs/gpt-bytes.yaml --set train.steps=20
    """
    from elastic.config import load_config
    from elastic.observe.view import view_for
    from elastic.runfiles import find_run
    from elastic.runner import execute

    if resume not in ("auto", "never") and not (resume.isascii() and resume.isdecimal()):
        raise UsageError(
            f"--resume must be auto, never or the number of a step, not {resume!r}", "example: --resume 50"
        )
    loaded = load_config(config, overrides)
    started = time.monotonic()
    with view_for(Console(stderr=True), loaded.name, loaded.train.steps) as view:
        document = execute(loaded, run_dir=run_dir, detach=detach, resume=resume, watcher=view)
    path = document.get("run_dir") or find_run(loaded.name, run_dir).path
    _finish(document, as_json, path, None if detach else time.monotonic() - started)


@app.command()
def status(job: JobName = None, run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Show what a run is doing: its step, its nodes, and who computes which layers.

    Example: elastic status --job gpt-bytes
    """
    from elastic.observe.tables import status_report
    from elastic.runfiles import find_run
    from elastic.runner import read_status

    document = read_status(find_run(job, run_dir))
    _print_json(document) if as_json else _stdout().print(status_report(document))


@app.command()
def events(
    job: JobName = None,
    run_dir: RunDir = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one per event.")] = False,
) -> None:
    """List what was decided in a run, and why.

    Example: elastic events --follow
    """
    from elastic.observe.sentences import sentence
    from elastic.observe.summary import finite
    from elastic.observe.text import clock_time
    from elastic.runfiles import find_run

    for event in _events(find_run(job, run_dir), follow):
        if as_json:
            print(json.dumps(finite(event)), flush=True)
        else:
            print(f"{clock_time(event.get('time'))}  {sentence(event)}", flush=True)


def _events(files: RunFiles, follow: bool) -> Iterator[dict[str, Any]]:
    seen = 0
    while True:
        alive = follow and files.alive()  # asked first, so that the last events of an ended run are not missed
        known = files.events()
        yield from known[seen:]
        seen = len(known)
        if not alive:
            return
        time.sleep(FOLLOW_S)


@app.command()
def stop(
    job: JobName = None,
    run_dir: RunDir = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for its end.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Stop a run after the step under way, and wait for its end.

    Example: elastic stop --job gpt-bytes
    """
    from elastic.runfiles import find_run
    from elastic.runner import request_stop

    files = find_run(job, run_dir)
    _finish(request_stop(files, timeout), as_json, files.path)


@app.command()
def plan(
    config: ConfigFile,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="How many nodes to plan for.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """Show how a job would be laid out on N nodes; needs no cluster.

    Example: elastic plan configs/gpt-bytes-pipeline.yaml --nodes 5
    """
    from elastic.config import load_config
    from elastic.engine.inspection import inspect_job
    from elastic.engine.usercode import user_code
    from elastic.job import load_job
    from elastic.observe.plans import plan_document, plan_report

    loaded = load_config(config, overrides)
    with user_code(f"the job function {loaded.job}"):
        job = load_job(loaded.job, loaded.params, loaded.train.seed, loaded.folder)
    document = plan_document(loaded, inspect_job(job, loaded.train).profile, nodes)
    _print_json(document) if as_json else _stdout().print(plan_report(document))


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _finish(document: dict[str, Any], as_json: bool, path: Path | str, seconds: float | None = None) -> NoReturn:
    """Prints the document of a run and exits by its state."""
    from elastic.errors import from_json
    from elastic.observe.errors import print_error
    from elastic.observe.summary import exit_code
    from elastic.observe.tables import run_report

    if as_json:
        _print_json(document)
    else:
        _stdout().print(run_report(document, seconds, os.path.relpath(path)))
        if document.get("error"):
            print_error(Console(stderr=True), from_json(document["error"]))
    raise typer.Exit(exit_code(document))


def _stdout() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def _print_json(document: dict[str, Any]) -> None:
    from elastic.observe.summary import finite

    print(json.dumps(finite(document), indent=2, allow_nan=False))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits: every error becomes a line, a hint and an exit code (see `elastic.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = app(arguments, prog_name="elastic", standalone_mode=False) or 0
        sys.stdout.flush()
    except ElasticError as error:
        code = _fail(error, arguments)
    except _CommandLineError as error:
        code = _command_line_error(error, arguments)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(Interrupted("interrupted"), arguments)
    except BrokenPipeError:
        code = _reader_left()
    except Exception as error:  # noqa: BLE001 - the outermost frame
        where = "this is a defect: please report it on the project's issue tracker, with the lines below"
        code = _fail(
            Defect(f"internal error: {type(error).__name__}: {error}", where, traceback.format_exc()), arguments
        )
    sys.exit(code)


def _reader_left() -> int:
    """Whoever read the output has enough of it (``elastic events | head``); the exit code is that of other tools."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
    return SIGPIPE_EXIT


def _fail(error: ElasticError, arguments: Sequence[str]) -> int:
    if "--json" in arguments:
        _print_json({"error": error.as_json()})
    else:
        from elastic.observe.errors import print_error

        print_error(Console(stderr=True), error)
    return error.exit_code


def _command_line_error(error: Any, arguments: Sequence[str]) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands without one of them: the message is its help
        error.show()
        return UsageError.exit_code
    command = error.ctx.command_path if getattr(error, "ctx", None) else "elastic"
    return _fail(UsageError(error.format_message(), f"`{command} --help` shows what there is"), arguments)


if __name__ == "__main__":
    main()
