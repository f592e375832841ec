"""What ``elastic doctor`` finds, on this machine and on worse ones."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from checkpoint.store import Store
from elastic import cli, doctor
from elastic.rendezvous import server
from tests.e2e.objects import s3_server


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "elastic", "doctor", *arguments], capture_output=True, text=True, timeout=120
    )


def test_this_machine_is_fit_and_the_command_says_so(tmp_path):
    ended = run("--store", str(tmp_path / "store"), "--json")
    assert ended.returncode == 0, ended
    document = json.loads(ended.stdout)
    assert document["fit"] is True
    states = {one["check"]: one["state"] for one in document["checks"]}
    assert {"python", "torch", "numerics", "etcd", "ray", "network", "memory", "disk", "clock", "store"} == set(states)
    assert states["store"] == states["python"] == "ok"
    assert list((tmp_path / "store").iterdir()) == []  # nothing is left there
    lines = run().stdout.splitlines()
    assert any(line.split()[:2] == ["ok", "python"] for line in lines), lines


def test_what_is_missing_comes_with_what_to_do(monkeypatch):
    monkeypatch.setattr(server, "find_etcd", lambda: None)
    found = doctor.etcd()
    assert (found.state, found.found) == ("fail", "not found")
    assert "elastic-runtime[local]" in found.advice
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "ray" else "2.4.1")
    assert (doctor.ray().state, doctor.torch().state) == ("fail", "fail")
    assert not doctor.document([doctor.ray()])["fit"]


@pytest.mark.parametrize(
    ("version", "state"),
    [("3.3.25", "fail"), ("3.4.23", "ok"), ("3.5.1", "warn"), ("3.5.9", "warn"), ("3.6.14", "ok"), ("no", "warn")],
)
def test_versions_of_etcd(monkeypatch, version, state):
    monkeypatch.setattr(server, "find_etcd", lambda: "/usr/bin/etcd")
    said = SimpleNamespace(stdout=f"etcd Version: {version}\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **more: said)
    assert doctor.etcd().state == state


def test_a_check_that_raises_does_not_end_the_others(monkeypatch):
    def fail():
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "clock", fail)
    findings = doctor.examine()
    assert [one.found for one in findings if one.state == "fail"] == ["OSError: no such device"]
    assert len(findings) == 9


def test_stores(tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert doctor.checkpoint_store(f"{tmp_path}/file/below", {}).state == "fail"
    assert doctor.checkpoint_store("nosuch://bucket", {}).state == "fail"
    with s3_server() as (url, options):
        assert doctor.checkpoint_store(f"{url}/run", options).state == "ok"


def test_a_store_without_conditional_writes_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(Store, "conditional", False)
    found = doctor.checkpoint_store(str(tmp_path), {})
    assert (found.state, "does not honour conditional writes" in found.found) == ("warn", True)


def test_a_store_that_gives_back_something_else_is_unfit(monkeypatch, tmp_path):
    monkeypatch.setattr(Store, "read", lambda self, name: b"stale")
    assert doctor.checkpoint_store(str(tmp_path), {}).state == "fail"


def test_a_machine_without_shared_memory_and_one_with_a_fake_clock(monkeypatch):
    monkeypatch.setattr(doctor.os.path, "isdir", lambda path: False)
    assert "/dev/shm" not in doctor.memory().found
    monkeypatch.setattr(doctor.time, "monotonic", lambda: 7.0)
    found = doctor.clock()
    assert (found.state, "libfaketime" in found.advice) == ("fail", True)


def test_values_of_options_are_json_or_text(monkeypatch):
    given = []
    monkeypatch.setattr(doctor, "examine", lambda store, options: given.append((store, options)) or [])
    options = ["--option", 'client_kwargs={"a": 1}', "--option", "key=x"]
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--store", "s3://bucket", *options, "--json"])
    assert given == [("s3://bucket", {"client_kwargs": {"a": 1}, "key": "x"})]


def test_a_store_that_does_not_answer_is_named_by_the_command(tmp_path):
    (tmp_path / "file").write_text("no folder")
    ended = run("--store", f"{tmp_path}/file/below")
    assert ended.returncode == 1
    assert "store" in ended.stdout
    assert ended.stderr == ""
    wrong = run("--store", "s3://bucket", "--option", "x")
    assert (wrong.returncode, "KEY=VALUE" in wrong.stderr) == (2, True)
    alone = run("--option", "x=1")
    assert (alone.returncode, "--store" in alone.stderr) == (2, True)
