"""Runs the command as a user does: a process of its own, in a folder of its own. And looks for what a run left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
COMMAND = str(Path(sys.executable).with_name("elastic"))
RUN_S = 180  # for any command here, on a busy machine

DOCUMENT_KEYS = {
    "job", "state", "step", "loss", "params_digest", "generation", "resumed_from", "steps_trained", "samples",
    "samples_lost", "samples_repeated", "epoch", "recoveries", "reconfigurations", "checkpoints", "plans",
}  # fmt: skip


def until(condition, what, timeout_s=RUN_S):
    """The first true value of ``condition``; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return value


class Ended:
    """A command that has ended; ``document`` is what it printed with ``--json``."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def document(self):
        return json.loads(self.out)

    def __repr__(self):
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Command:
    """A command under way."""

    def __init__(self, arguments, folder, environment):
        self._out, self._err = folder / f"{uuid.uuid4().hex}.out", folder / f"{uuid.uuid4().hex}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [COMMAND, *map(str, arguments)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def err(self):
        return self._err.read_text()

    def wait(self, timeout_s=RUN_S):
        code = self.process.wait(timeout_s)
        return Ended(code, self._out.read_text(), self.err)


class Elastic:
    """The command line in a folder, and the processes that it started.

    Every process inherits a variable that names this object. A few overwrite their environment with their title;
    those are found by the run's folders, which are in their arguments or among their open files.
    """

    def __init__(self, folder, **environment):
        self.folder = folder
        self.run_dir = folder / "run"
        self._mark = f"E2E_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = {**os.environ, "PYTHONPATH": path, name: value, **environment}
        self._commands = []
        self.traces = Traces()

    def start(self, *arguments):
        command = Command(arguments, self.folder, self.environment)
        self._commands.append(command)
        return command

    def __call__(self, *arguments, timeout_s=RUN_S):
        return self.start(*arguments).wait(timeout_s)

    def train(self, config, *arguments, **settings):
        """Starts ``elastic run --json`` in our run folder; settings are written ``train__steps=4``."""
        options = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        return self.start("run", config, "--run-dir", self.run_dir, "--json", *options, *arguments)

    def live(self):
        """What run.json says of the run, and empty when it is not there."""
        try:
            return json.loads((self.run_dir / "run.json").read_text())
        except (OSError, json.JSONDecodeError):
            return {}

    def lines(self, name):
        try:
            return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines(keepends=True)]
        except (FileNotFoundError, json.JSONDecodeError):
            return []

    def until_step(self, step, command):
        """Waits until so many steps are committed, and notes what runs then, for `Traces.left`."""

        def reached():
            assert command.process.poll() is None, command.wait()
            return len(self.lines("steps.jsonl")) >= step

        until(reached, f"step {step}")
        self.note()

    def note(self):
        self.traces.note(self.processes(), self.live())

    def processes(self):
        """Every process of ours that lives now, commands included."""
        if "temp_dir" in self.live():
            self.traces.folders.add(self.live()["temp_dir"])
        folders = [os.fsencode(folder) for folder in (str(self.run_dir), *self.traces.folders)]
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and self._is_ours(p, folders)]

    def _is_ours(self, process, folders):
        proc = Path(f"/proc/{process.pid}")
        try:
            if self._mark.encode() in (proc / "environ").read_bytes().split(b"\0"):
                return True
            texts = [(proc / "cmdline").read_bytes(), *(os.fsencode(os.readlink(fd)) for fd in (proc / "fd").iterdir())]
        except (OSError, psutil.Error):
            return False  # it ended meanwhile
        return any(folder in text for folder in folders for text in texts)

    def left(self):
        """What should not be there after the end of all commands, in words; empty when all is well."""
        found = [f"{p}" for p in self.processes()]
        if (self.run_dir / "run.json").exists():
            found.append("run.json")
        return found + self.traces.left()

    def end(self):
        """Ends whatever still runs, after a test that failed."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                pass  # it ended meanwhile
        for command in self._commands:
            command.process.wait()
        for folder in self.traces.folders:
            shutil.rmtree(folder, ignore_errors=True)


class Traces:
    """What was seen of a run while it lived: folders, listening sockets, shared memory, processes."""

    def __init__(self):
        self.folders, self.sockets, self.shared, self._processes = set(), set(), set(), set()

    def note(self, processes, live):
        if "temp_dir" in live:
            self.folders.add(live["temp_dir"])
        if "supervisor" in live:
            supervisor = psutil.Process(live["supervisor"])
            processes = {*processes, supervisor, *supervisor.children(recursive=True)}
        for process in processes:
            try:
                self._processes.add(process)
                self.sockets |= {os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()} & listening()
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            except (psutil.Error, OSError):
                continue  # it ended meanwhile
            self.shared |= {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}

    def left(self):
        found = [f"process {p.pid}" for p in self._processes if _runs(p)]
        found += [f"folder {folder}" for folder in self.folders if Path(folder).exists()]
        found += [f"listening {one}" for one in self.sockets & listening()]
        return found + [f"shared memory {path}" for path in self.shared if Path(path).exists()]


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening():
    """The listening TCP sockets of this machine, as ``socket:[inode]``: a port may be another's a moment later."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


def plain_digest(config_path, *overrides):
    """``(digest, losses)`` of one plain loop over the job of a config."""
    from elastic.config import load_config
    from elastic.job import load_job
    from tests.engine.plain import plain_train

    config = load_config(config_path, overrides)
    job = load_job(config.job, config.params, config.train.seed, config.folder)
    return plain_train(job, config.train)
