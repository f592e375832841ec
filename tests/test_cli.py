"""The command line, with a stand-in where a command would start a cluster."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from elastic import cli
from elastic.errors import EtcdUnreachable, UserCodeError
from elastic.runfiles import RunFiles

JOB = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import elastic

def job(params):
    x = torch.zeros(64, 8)
    return elastic.Job(
        layers=elastic.layers_of(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1))),
        loss=lambda output, target: (F.mse_loss(output, target, reduction="sum"), target.numel()),
        dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        optimizer=lambda named: torch.optim.AdamW(named),
    )

def broken(params):
    raise ValueError("[bold]no[/bold]\\nsuch thing")
"""
CONFIG = "name: small\njob: small_job.py:job\ntrain: {steps: 5, global_batch: 16, microbatch: 4}\n"

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "small_job.py").write_text(JOB)
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def elastic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs a command in this process, in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands in for elastic.runner: gives or raises ``outcome``, and keeps how it was called."""
    stand_in = types.SimpleNamespace(outcome={}, calls=[])

    def execute(config, *, run_dir, detach, resume, watcher):
        stand_in.calls.append({"config": config, "run_dir": run_dir, "detach": detach, "resume": resume})
        path = run_dir or Path("runs") / config.name
        RunFiles(path).prepare()
        watcher.note("starting")
        watcher.event({"seq": 0, "time": 0.0, "kind": "started", "config": "c", "nodes": 4})
        watcher.step({"step": 1, "loss": 2.0, "samples": 16, "weight": 16.0, "seconds": 0.1})
        watcher.tick()
        if isinstance(stand_in.outcome, BaseException):
            raise stand_in.outcome
        return stand_in.outcome

    module = types.ModuleType("elastic.runner")
    module.execute = execute
    module.request_stop = lambda files, timeout_s: stand_in.outcome
    module.read_status = lambda files: stand_in.outcome
    monkeypatch.setitem(sys.modules, "elastic.runner", module)
    return stand_in


DONE = {
    "job": "small", "state": "done", "step": 5, "loss": 0.25, "params_digest": "ab12", "generation": 1,
    "resumed_from": None, "steps_trained": 5, "samples": 80, "samples_lost": 0, "samples_repeated": 0, "epoch": 1,
    "recoveries": [], "reconfigurations": [], "checkpoints": [], "plans": [],
}  # fmt: skip


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom elastic.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print([m for m in ('torch', 'ray', 'etcd3', 'pydantic') if m in sys.modules], file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr.strip() == "[]"
    assert "status" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All commands that do something, those of our own packages included."""
    if not hasattr(group, "list_commands"):
        yield path
        return
    for name in group.list_commands(None):
        yield from commands(group.get_command(None, name), (*path, name))


COMMANDS = list(commands(cli.typer.main.get_command(cli.app)))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_teaches_by_one_example_that_fits(
    elastic: Cli, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = elastic(*command, "--help")
    assert code == 0
    assert "Cannot be loaded" not in out
    examples = [line for line in out.splitlines() if "Example" in line]
    assert len(examples) == 1
    assert f"Example: elastic {' '.join(command)}" in examples[0]
    assert max(map(len, out.splitlines())) <= 80
    after = out.splitlines()[out.splitlines().index(examples[0]) + 1]
    assert after.strip() == ""  # an example on one line can be copied


def test_the_commands_are_known() -> None:
    assert {("init",), ("doctor",), ("run",), ("checkpoints", "ls"), ("nodes", "set"), ("chaos", "run")} <= {*COMMANDS}
    assert len(COMMANDS) >= 17


def test_no_command_at_all_shows_the_help(elastic: Cli) -> None:
    assert elastic() == elastic("--help")


def test_version(elastic: Cli) -> None:
    code, out, _ = elastic("--version")
    assert (code, out.split()[0].rstrip(",")) == (0, "elastic")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "missing.yaml"], "missing.yaml: no such file"),
        (["run", "small.yaml", "--set", "train.step=5"], "unknown key train.step; did you mean train.steps?"),
        (["run", "small.yaml", "--set", "train.steps=many"], "train.steps must be a whole number, not 'many'"),
        (["run", "small.yaml", "--resume", "soon"], "--resume must be auto, never or the number of a step, not 'soon'"),
        (["run", "small.yaml", "--resume", "-5"], "--resume must be"),
        (["run"], "CONFIG"),
        (["run", "small.yaml", "--detached"], "No such option: --detached"),
        (["rum"], "No such command 'rum'"),
        (["plan", "small.yaml"], "--nodes"),
        (["plan", "small.yaml", "--nodes", "0"], "--nodes"),
        (["status"], "there is no run below"),
        (["events", "--job", "other"], "there is no run of job 'other'"),
        (["stop", "--run-dir", "nowhere"], "nowhere is not the folder of a run"),
    ],
)
def test_a_mistake_is_one_line_and_a_hint_with_exit_code_2(
    elastic: Cli, config: Path, arguments: list[str], message: str
) -> None:
    code, out, err = elastic(*arguments)
    first, *rest = err.splitlines()
    assert (code, out) == (2, "")
    assert first.startswith("error: ")
    assert message.lower() in first.lower()
    assert all(line.startswith("hint: ") for line in rest)
    code, out, err = elastic(*arguments, "--json")
    error = json.loads(out)["error"]
    assert (code, err) == (2, "")
    assert f"error: {error['message']}" == first


def test_run_passes_its_options_on_and_prints_the_end(
    elastic: Cli, config: Path, execute: types.SimpleNamespace
) -> None:
    execute.outcome = DONE
    code, out, err = elastic("run", config, "--set", "train.steps=7", "--set", "cluster.nodes=2", "--resume", "3")
    (call,) = execute.calls
    assert (call["config"].train.steps, call["config"].cluster.nodes, call["resume"]) == (7, 2, "3")
    assert (call["run_dir"], call["detach"], code) == (None, False, 0)
    for expected in ("small: done after 5 steps", "0.2500", "ab12", "80, 0 lost, 0 repeated", "runs/small"):
        assert expected in out
    assert "started c on 4 nodes" in err
    assert "step 1/7" in err


def test_run_prints_one_document(elastic: Cli, config: Path, execute: types.SimpleNamespace) -> None:
    execute.outcome = {**DONE, "loss": float("nan")}
    code, out, _ = elastic("run", config, "--json")
    assert (code, json.loads(out)) == (0, {**DONE, "loss": None})


def test_a_detached_run_says_where_it_lives(elastic: Cli, config: Path, execute: types.SimpleNamespace) -> None:
    execute.outcome = {"job": "small", "state": "running", "run_dir": str(config.parent / "runs/small")}
    code, out, _ = elastic("run", config, "--detach")
    assert (code, execute.calls[0]["detach"]) == (0, True)
    assert out.split() == ["small:", "running", "run", "runs/small"]


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [
        ("failed", {"code": "user_code", "message": "ValueError in the loss", "hint": "look", "detail": "Trace"}, 1),
        ("failed", {"code": "etcd_unreachable", "message": "etcd is gone", "hint": "start it"}, 3),
        ("interrupted", {"code": "interrupted", "message": "interrupted", "hint": "run it again to go on"}, 130),
    ],
)
def test_a_run_that_fails_prints_its_end_and_the_error(
    elastic: Cli, config: Path, execute: types.SimpleNamespace, state: str, error: dict, code: int
) -> None:
    execute.outcome = {**DONE, "state": state, "error": error}
    got, out, err = elastic("run", config)
    assert got == code
    assert f"small: {state} after 5 steps" in out
    lines = err.splitlines()
    assert f"error: {error['message']}" in lines
    assert [line for line in lines if line.startswith("hint: ")] == [f"hint: {error['hint']}"] * bool(error["hint"])
    assert error.get("detail", "error:") in err
    got, out, _ = elastic("run", config, "--json")
    assert (got, json.loads(out)["error"]) == (code, error)


def test_an_error_before_the_start(elastic: Cli, config: Path, execute: types.SimpleNamespace) -> None:
    execute.outcome = EtcdUnreachable("etcd at [1.2.3.4]:1 does not answer", "start it")
    code, out, err = elastic("run", config)
    assert (code, out) == (3, "")
    assert err.splitlines()[-2:] == ["error: etcd at [1.2.3.4]:1 does not answer", "hint: start it"]
    code, out, _ = elastic("run", config, "--json")
    assert json.loads(out) == {"error": execute.outcome.as_json()}


def test_ctrl_c_before_the_start(elastic: Cli, config: Path, execute: types.SimpleNamespace) -> None:
    execute.outcome = KeyboardInterrupt()
    assert elastic("run", config)[0] == 130
    code, out, _ = elastic("run", config, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (130, "interrupted")


def test_a_defect_shows_its_traceback(elastic: Cli, config: Path, execute: types.SimpleNamespace) -> None:
    execute.outcome = RuntimeError("never thought of")
    code, _, err = elastic("run", config)
    assert code == 1
    assert "error: internal error: RuntimeError: never thought of" in err
    assert "issue tracker" in err
    assert "Traceback (most recent call last)" in err
    code, out, _ = elastic("run", config, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "internal")


def test_status_is_a_table_that_fits(
    elastic: Cli, config: Path, execute: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunFiles(tmp_path / "runs/small").prepare()
    worker = {"rank": 3, "pid": 1234567, "pipeline": 1, "stage": 1, "layers": [4, 5, 6, 7]}
    execute.outcome = {
        "job": "small", "state": "running", "epoch": 2, "step": 17,
        "nodes": [
            {"id": "node-0", "incarnation": "01234567ab", "state": "active", "agent_pid": 7654321, "workers": [worker]},
            {"id": "node-1", "incarnation": "ff", "state": "spare", "agent_pid": 11, "workers": []},
        ],
    }  # fmt: skip
    monkeypatch.setattr(cli, "PIPED_WIDTH", 80)
    code, out, _ = elastic("status")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "small  running  epoch 2  step 17")
    assert " ".join(lines[4].split()) == "node-0 active 01234567 7654321 1234567 3 1 1 4 … 7 (4)"
    assert " ".join(lines[5].split()) == "node-1 spare ff 11 – – – – –"
    code, out, _ = elastic("status", "--json")
    assert json.loads(out) == execute.outcome


def test_status_of_an_ended_run(elastic: Cli, execute: types.SimpleNamespace, tmp_path: Path) -> None:
    RunFiles(tmp_path / "elsewhere").prepare()
    execute.outcome = {"job": "small", "state": "done", "epoch": 2, "step": 17, "nodes": []}
    assert elastic("status", "--run-dir", "elsewhere") == (0, "small  done  epoch 2  step 17\n", "")


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_events(elastic: Cli, tmp_path: Path, follow: list[str]) -> None:
    files = RunFiles(tmp_path / "runs/small")
    files.prepare()
    history = [{"seq": i, "time": 0.0, "kind": "node_joined", "node": f"node-{i}"} for i in range(3)]
    for record in history:
        files.append_event(record)
    code, out, _ = elastic("events", *follow)
    assert code == 0
    assert [line[10:] for line in out.splitlines()] == ["node-0 joined", "node-1 joined", "node-2 joined"]
    _, out, _ = elastic("events", "--json", *follow)
    assert [json.loads(line) for line in out.splitlines()] == history


def test_stop_prints_the_end(elastic: Cli, execute: types.SimpleNamespace, tmp_path: Path) -> None:
    RunFiles(tmp_path / "runs/small").prepare()
    execute.outcome = {**DONE, "state": "stopped"}
    code, out, _ = elastic("stop")
    assert (code, out.splitlines()[0]) == (0, "small: stopped after 5 steps")
    code, out, _ = elastic("stop", "--json")
    assert json.loads(out) == execute.outcome


def test_stop_of_a_run_that_left_no_result(elastic: Cli, execute: types.SimpleNamespace, tmp_path: Path) -> None:
    RunFiles(tmp_path / "runs/small").prepare()
    execute.outcome = {"job": "small", "state": "unknown"}
    code, out, _ = elastic("stop")
    assert (code, out.splitlines()[0]) == (0, "small: unknown")


def test_plan(elastic: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = elastic("plan", config, "--nodes", 3, "--set", "cluster.device_memory=36KiB", "--json")
    document = json.loads(out)
    assert (code, document["n0"], document["device_bytes"], document["layers"]) == (0, 2, 36 * 1024, ["0", "1", "2"])
    stages = [stage for pipeline in document["pipelines"] for stage in pipeline["stages"]]
    assert [layer for stage in document["pipelines"][0]["stages"] for layer in stage["layers"]] == ["0", "1", "2"]
    assert all(stage["memory_bytes"] <= 36 * 1024 for stage in stages)
    assert sum(pipeline["microbatches"] for pipeline in document["pipelines"]) == 4
    assert [template["stages"] for template in document["templates"]] == [2, 3]
    monkeypatch.setattr(cli, "PIPED_WIDTH", 80)
    code, out, _ = elastic("plan", config, "--nodes", 3, "--set", "cluster.device_memory=36KiB")
    assert code == 0
    for expected in ("small on 3 nodes", "needs 2 nodes (n0), devices of 36KiB", "predicted", "node-0", "%"):
        assert expected in out
    assert "cluster.device_memory" in elastic("plan", config, "--nodes", 3)[1]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("1KiB", "layer '0' alone needs"),
        ("36KiB", "the model needs 2 devices of 36KiB, 1 present"),
    ],
)
def test_plan_of_a_model_that_is_too_large(elastic: Cli, config: Path, limit: str, message: str) -> None:
    code, out, err = elastic("plan", config, "--nodes", 1, "--set", f"cluster.device_memory={limit}")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert "hint: " in err


def test_an_error_in_the_users_code_comes_with_its_traceback(elastic: Cli, config: Path) -> None:
    code, _, err = elastic("plan", config, "--nodes", 1, "--set", "job=small_job.py:broken")
    lines = err.splitlines()
    assert code == UserCodeError.exit_code
    # One line, and what looks like markup is printed as it is.
    assert lines[0] == "error: ValueError in the job function small_job.py:broken: [bold]no[/bold] such thing"
    assert lines[2] == "Traceback (most recent call last):"
    assert "small_job.py" in err


PLUGIN = """
import typer
app = typer.Typer(help="Look after checkpoints.")

@app.command()
def ls(): print("two checkpoints")

@app.command()
def rm(): raise SystemExit(4)
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [
        EntryPoint("checkpoints", "cli_plugin:app", cli.PLUGINS),
        EntryPoint("chaos", "no_such_module:app", cli.PLUGINS),
        EntryPoint("status", "cli_plugin:app", cli.PLUGINS),  # ours stays
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: points if group == cli.PLUGINS else [])


@pytest.mark.usefixtures("plugins")
def test_commands_of_other_packages(elastic: Cli) -> None:
    code, out, _ = elastic("--help")
    assert code == 0
    assert "Look after checkpoints." in out
    assert "Cannot be loaded: ModuleNotFoundError" in out
    assert "Show what a run is doing" in out
    assert elastic("checkpoints", "ls") == (0, "two checkpoints\n", "")
    assert elastic("checkpoints", "rm")[0] == 4


@pytest.mark.usefixtures("plugins")
def test_a_broken_package_breaks_its_own_command_only(elastic: Cli) -> None:
    code, out, err = elastic("chaos", "run", "--seed", 3)
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == (
        "error: command 'chaos' cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert json.loads(elastic("chaos", "--json")[1])["error"]["code"] == "failed"
    assert elastic("events")[0] == 2


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "runs/small")
    files.prepare()
    for i in range(20_000):
        files.append_event({"seq": i, "time": 0.0, "kind": "node_joined", "node": f"node-{i}"})
    command = [sys.executable, "-c", "from elastic.cli import main; main()", "events"]
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 141)
