from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from checkpoint import cli
from checkpoint.commit import claim_generation, claim_lineage, commit
from checkpoint.layout import Attempt
from checkpoint.store import Store
from checkpoint.writer import Item, write_part


def save(store, lineage, step, decider=1):
    attempt = Attempt(1, lineage, step, decider)
    items = [Item("layer/weight", "bfloat16", (2, 3), bytes(12)), Item("scale", "float64", (), bytes(8))]
    parts = [write_part(store, attempt, "w-0", items, {}), write_part(store, attempt, "w-1", [], {})]
    commit(store, attempt, parts, {"loss": float("nan"), "job": "test"}, 1700000000.5)
    return attempt


def fill(store):
    """Steps 10, 20, 30, of which 30 is undone, and then 25."""
    claim_generation(store, {})
    claim_lineage(store, 1, None, {})
    first = [save(store, 0, step) for step in (10, 20, 30)]
    claim_lineage(store, 1, first[1], {})
    return [*first, save(store, 1, 25)]


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def saved(run_dir):
    return fill(Store(str(run_dir / "checkpoints")))


@pytest.fixture
def disk(run_dir, saved):
    return Store(str(run_dir / "checkpoints"))


def call(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def document(*arguments, code=0):
    return json.loads(call(*arguments, "--json", code=code).stdout)


def fails(name, *arguments, code):
    """Checks both ways to report; returns the message."""
    error = document(*arguments, code=code)["error"]
    assert error["code"] == name
    result = call(*arguments, code=code)
    assert f"error: {error['message']}\n" in result.stderr
    assert (f"hint: {error['hint']}\n" in result.stderr) == bool(error["hint"])
    return error["message"]


def test_ls_lists_newest_first_and_tells_what_counts(run_dir, saved):
    rows = document("ls", run_dir)["checkpoints"]
    assert [(row["lineage"], row["step"], row["counts"]) for row in rows] == [
        (1, 25, True),
        (0, 30, False),
        (0, 20, True),
        (0, 10, True),
    ]
    assert all((row["parts"], row["created"]) == (2, 1700000000.5) for row in rows)
    lines = call("ls", run_dir / "checkpoints").stdout.splitlines()
    assert lines[0].split() == ["generation", "lineage", "step", "size", "parts", "when", "state"]
    assert [line.split()[-1] for line in lines[1:]] == ["counts", "undone", "counts", "counts"]


def test_ls_goes_on_past_a_damaged_manifest(run_dir, saved, disk):
    disk.write(saved[1].manifest, b"{}")
    rows = document("ls", run_dir)["checkpoints"]
    assert [row.get("error", {}).get("code") for row in rows] == [None, None, "corrupt", None]
    assert "corrupt" in call("ls", run_dir).stdout.splitlines()[3]


def test_ls_of_a_run_that_has_saved_nothing_yet(tmp_path):
    claim_generation(Store(str(tmp_path)), {})
    assert document("ls", tmp_path)["checkpoints"] == []
    assert "no checkpoints yet" in call("ls", tmp_path).stderr


def test_show_tells_what_a_checkpoint_holds(run_dir, saved):
    shown = document("show", run_dir)
    assert (shown["step"], shown["counts"], shown["meta"]) == (25, True, {"loss": None, "job": "test"})
    assert [part["writer"] for part in shown["parts"]] == ["w-0", "w-1"]
    assert shown["tensors"] == {
        "layer/weight": {"dtype": "bfloat16", "shape": [2, 3], "bytes": 12},
        "scale": {"dtype": "float64", "shape": [], "bytes": 8},
    }
    assert document("show", run_dir, 30)["counts"] is False
    text = call("show", run_dir, 20).stdout
    assert "layer/weight  bfloat16  2×3     12 B" in text
    assert "scale         float64   scalar  8 B" in text


def test_verify_reads_one_or_all(run_dir, saved):
    assert [row["step"] for row in document("verify", run_dir)["checkpoints"]] == [25]
    assert [row["step"] for row in document("verify", run_dir, 10)["checkpoints"]] == [10]
    assert [row["ok"] for row in document("verify", run_dir, "--all")["checkpoints"]] == [True] * 4
    assert call("verify", run_dir, "--all").stdout.count(": ok, ") == 4


def test_verify_tells_what_is_wrong(run_dir, saved, disk):
    pack = saved[3].pack("w-0", 0)
    data = disk.read(pack)
    disk.write(pack, data[:-1] + b"\1")
    assert "tensor 'layer/weight'" in fails("corrupt", "verify", run_dir, code=6)
    disk.delete(pack)
    assert "is missing" in fails("incomplete", "verify", run_dir, code=5)
    assert "is missing" in fails("incomplete", "verify", run_dir, "--all", code=5)
    disk.write(saved[0].index("w-0"), b"")
    every = document("verify", run_dir, "--all", code=6)
    assert [row.get("error", {}).get("code") for row in every["checkpoints"]] == ["incomplete", None, None, "corrupt"]
    assert every["error"]["code"] == "corrupt"
    fails("corrupt", "show", run_dir, 10, code=6)


def test_what_is_not_there_is_absent(run_dir, saved, tmp_path):
    assert "step 99" in fails("absent", "show", run_dir, 99, code=4)
    assert "step 99" in fails("absent", "verify", run_dir, 99, code=4)
    for command in ("ls", "show", "verify"):
        assert "nowhere" in fails("absent", command, tmp_path / "nowhere", code=4)
    claim_generation(Store(str(tmp_path / "empty")), {})
    fails("absent", "show", tmp_path / "empty", code=4)
    fails("absent", "verify", tmp_path / "empty", "--all", code=4)


def test_a_store_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(cli, "PATIENCE_S", 0.0)
    options = ["--option", "endpoint_url=http://127.0.0.1:1", "--option", "key=k", "--option", "secret=s"]
    for command in ("ls", "show", "verify"):
        fails("store_unreachable", command, "s3://bucket/run", *options, code=3)


def test_options_reach_the_file_system(moto):
    fill(Store("s3://bucket/cli", moto))
    options = [f"--option={key}={value}" for key, value in moto.items()]
    assert len(document("ls", "s3://bucket/cli", *options)["checkpoints"]) == 4
    assert document("verify", "s3://bucket/cli", "--all", *options)["checkpoints"][0]["ok"]


def test_wrong_usage(run_dir, saved):
    for arguments in (
        ["show"],
        ["show", run_dir, "x"],
        ["verify", run_dir, 10, "--all"],
        ["ls", run_dir, "--option=x"],
    ):
        call(*arguments, code=2)


def test_option_values_are_json_or_text():
    assert cli._parsed(["a=1", "b=x=y", "c=", 'd={"e": true}']) == {"a": 1, "b": "x=y", "c": "", "d": {"e": True}}
