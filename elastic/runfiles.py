"""The folder of a run: ``runs/<name>``, or what ``--run-dir`` says.

run.json       while it is alive: its supervisor, where its etcd and Ray are, its temporary folder
lock           held by the supervisor as long as it lives; its process id
events.jsonl   every decision, in order
steps.jsonl    every committed step
result.json    what ``elastic run --json`` printed
logs/          one file per worker, and those of etcd and the supervisor
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tenacity import Retrying, stop_after_delay, wait_fixed

from elastic.errors import ElasticError, UsageError

Json = dict[str, Any]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Maps what goes wrong inside to an `ElasticError` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise ElasticError(
            f"{path} cannot be written: {error.strerror}", "is the disk full, or --run-dir gone?"
        ) from error


class RunFiles:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"

    def prepare(self) -> None:
        """Makes the folder and clears what an earlier run left in it; logs are kept and appended to."""
        with writing(self.path):
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.path / "lock").touch()  # its time says which run is the newest
            for name in ("events.jsonl", "steps.jsonl", "result.json", "run.json"):
                (self.path / name).unlink(missing_ok=True)

    def owner(self) -> str:
        """The process id of the supervisor that holds the lock, as far as it is known."""
        return (self.path / "lock").read_text() or "unknown"

    def lock(self) -> int | None:
        """The descriptor of the lock, or ``None`` when a live run holds it. Children that inherit it keep it held.

        Raises:
            UsageError: the folder cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be the folder of a run: {error.strerror}", "give --run-dir"
            ) from error
        try:
            # `alive` of another command may hold it for a moment.
            for attempt in Retrying(stop=stop_after_delay(0.5), wait=wait_fixed(0.02), reraise=True):
                with attempt:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def alive(self) -> bool:
        """Whether a supervisor holds the lock."""
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def run(self) -> Json:
        """What a live run says of itself; empty when it is not alive (yet)."""
        return self._read("run.json") or {}

    def result(self) -> Json | None:
        return self._read("result.json")

    def events(self) -> list[Json]:
        return self._lines("events.jsonl")

    def steps(self) -> list[Json]:
        return self._lines("steps.jsonl")

    def write_run(self, record: Json) -> None:
        self._write("run.json", record)

    def forget_run(self) -> None:
        (self.path / "run.json").unlink(missing_ok=True)

    def write_result(self, document: Json) -> None:
        self._write("result.json", document)

    def append_event(self, record: Json) -> None:
        self._append("events.jsonl", record)

    def append_step(self, record: Json) -> None:
        self._append("steps.jsonl", record)

    def _read(self, name: str) -> Json | None:
        try:
            out: Json = json.loads((self.path / name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return out

    def _lines(self, name: str) -> list[Json]:
        try:
            text = (self.path / name).read_text()
        except FileNotFoundError:
            return []
        whole = text.rpartition("\n")[0]  # a line that is being written has no end yet
        return [json.loads(line) for line in whole.splitlines()]

    def _write(self, name: str, record: Json) -> None:
        new = self.path / f".{name}.new"
        with writing(self.path / name):
            new.write_text(json.dumps(record, indent=1) + "\n")
            new.replace(self.path / name)

    def _append(self, name: str, record: Json) -> None:
        with writing(self.path / name), (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")


def find_run(job: str | None, run_dir: Path | None = None) -> RunFiles:
    """The run a command means: the given folder, the run of that name, or the newest below the current folder.

    Raises:
        UsageError: there is none.
    """
    if run_dir is not None:
        if not run_dir.is_dir():
            raise UsageError(f"{run_dir} is not the folder of a run")
        return RunFiles(run_dir)
    runs = Path("runs")
    found = [path.parent for path in runs.glob("*/lock") if job is None or path.parent.name == job]
    if not found:
        what = "no run" if job is None else f"no run of job {job!r}"
        raise UsageError(
            f"there is {what} below {runs.absolute()}", "start one with `elastic run CONFIG`, or give --run-dir"
        )
    return RunFiles(max(found, key=lambda path: (path / "lock").stat().st_mtime))
