"""Starts a job and follows it to its end: what ``elastic run`` does, and `run` for Python callers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from elastic.config import Config, config_from, load_config
from elastic.errors import ElasticError, EtcdUnreachable, Interrupted, JobAlive, PlanError, from_json
from elastic.observe.summary import summarize
from elastic.rendezvous import Etcd, Keys, Put, created
from elastic.resume import begin, find_start
from elastic.runfiles import RunFiles, writing

Json = dict[str, Any]
TEAR_DOWN_S = 30.0
CLEAN_UP_S = 5.0


class Watcher(Protocol):
    """Sees a run as it goes."""

    def event(self, record: Json) -> None: ...
    def step(self, record: Json) -> None: ...
    def note(self, text: str) -> None: ...
    def tick(self) -> None: ...


def run(
    job: str | Mapping[str, Any],
    *,
    set: Sequence[str] = (),
    run_dir: str | Path | None = None,
    resume: str = "auto",
    watcher: Watcher | None = None,
) -> Json:
    """Trains a job to its end and returns the document that ``elastic run --json`` prints.

    Args:
        job: path of a YAML config, or its content as a mapping (paths in it start at the current folder).
        set: overrides such as ``"train.steps=20"``.
        run_dir: where the run lives; ``runs/<name>`` by default.
        resume: ``auto`` goes on with an unfinished generation, ``never`` begins a new one, a step starts from there.

    Raises:
        ElasticError: the job could not be started, or it failed.
    """
    config = config_from(job, overrides=set) if isinstance(job, Mapping) else load_config(job, set)
    document = execute(config, run_dir=Path(run_dir) if run_dir else None, resume=resume, watcher=watcher)
    if "error" in document:
        raise from_json(document["error"])
    return document


def execute(
    config: Config,
    *,
    run_dir: Path | None = None,
    detach: bool = False,
    resume: str = "auto",
    watcher: Watcher | None = None,
) -> Json:
    """Starts the supervisor of a run and follows it; with ``detach``, only until training has begun.

    Ctrl-C asks for a stop at the next voted step; a second one ends the run at once. Both give state ``interrupted``.

    Raises:
        ElasticError: the job could not be started; nothing is left running.
    """
    files = RunFiles((run_dir or Path("runs") / config.name).absolute())
    lock = files.lock()
    if lock is None:
        raise JobAlive(
            f"job {config.name!r} is running already in {files.path} (process {files.owner()})",
            "stop it with `elastic stop`, or give another --run-dir",
        )
    _clean_up(files)
    url = config.checkpoint.url_in(str(files.path))
    try:
        start = find_start(config, url, resume)
    except BaseException:
        os.close(lock)
        raise
    if start.finished is not None:
        os.close(lock)
        if watcher is not None:
            watcher.note(
                f"generation {start.finished['generation']} in {url} is finished; --resume never starts a new one,"
                " a higher train.steps goes on"
            )
        return summarize(config.name, [], [], start.finished, start.finished["generation"])
    files.prepare()
    supervisor = _Supervisor(files, lock)
    try:
        supervisor.tell({"config": config.to_dict(), "detach": detach})
        if watcher is not None:
            watcher.note("inspecting the job")
        spec = _inspect(config)
        generation = begin(config, url, start, [layer["name"] for layer in spec["profile"]["layers"]])
        supervisor.tell({"spec": {**spec, "generation": generation, "start": start.manifest}})
        return supervisor.follow(watcher, until_formed=detach)
    except BaseException:
        supervisor.kill()
        raise
    finally:
        if not detach:
            supervisor.close()


def _inspect(config: Config) -> Json:
    """Loads the job here, so that a mistake in it shows before anything is trained.

    Raises:
        ElasticError: the job cannot be loaded, is refused, or can never fit the cluster.
    """
    from elastic.engine.inspection import inspect_job
    from elastic.engine.usercode import user_code
    from elastic.job import load_job
    from elastic.planning import smallest_size

    with user_code(f"the job function {config.job}"):
        job = load_job(config.job, config.params, config.train.seed, config.folder)
    inspection = inspect_job(job, config.train)
    if config.cluster.device_memory is not None:
        needed = smallest_size(inspection.profile, config.cluster.device_memory)
        if config.cluster.ray == "local" and needed > config.cluster.nodes:
            raise PlanError(
                f"one copy of the model needs {needed} nodes under cluster.device_memory, cluster.nodes is"
                f" {config.cluster.nodes}",
                f"set cluster.nodes to {needed} or more, or raise cluster.device_memory",
            )
    return {
        "config": config.to_dict(),
        "profile": inspection.profile.to_json(),
        "boundaries": inspection.boundaries,
    }


class _Supervisor:
    """The supervisor's process, as its command sees it."""

    def __init__(self, files: RunFiles, lock: int) -> None:
        self._files = files
        self._messages: queue.Queue[Json | None] = queue.Queue()
        self._interrupts = 0
        with writing(files.logs), (files.logs / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elastic.control.supervisor", str(files.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C in the terminal is for the command alone
                text=True,
            )
        os.truncate(lock, 0)
        os.pwrite(lock, str(self._process.pid).encode(), 0)
        os.close(lock)  # the supervisor's copy keeps it held
        threading.Thread(target=self._read, name="supervisor", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._messages.put(json.loads(line))
        self._messages.put(None)

    def tell(self, message: Json) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; its last message says why
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def follow(self, watcher: Watcher | None, until_formed: bool) -> Json:
        """Hands events on until the result comes.

        Raises:
            ElasticError: what the supervisor reports, or that it was killed.
        """
        with self._interruptible():
            while True:
                try:
                    message = self._messages.get(timeout=0.1)
                except queue.Empty:
                    if watcher is not None:
                        watcher.tick()
                    continue
                if message is None:
                    if self._interrupts:
                        raise Interrupted("interrupted")
                    raise ElasticError(
                        "the supervisor of the run was killed", f"its log is {self._files.logs / 'supervisor.log'}"
                    )
                if "error" in message:
                    raise from_json(message["error"])
                if "result" in message:
                    result: Json = message["result"]
                    return result
                if watcher is not None:
                    _show(watcher, message)
                if until_formed and message.get("event", {}).get("kind") == "formed":
                    return {"job": self._files.run()["job"], "state": "running", "run_dir": str(self._files.path)}

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: object) -> None:
            self._interrupts += 1
            self.tell({"op": "stop" if self._interrupts == 1 else "kill"})

        before: dict[int, Callable[..., Any] | int | None] = {
            number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def kill(self) -> None:
        self.tell({"op": "kill"})
        self.close()

    def close(self) -> None:
        """Waits until the run has taken itself down; by force, and with its temporary folder, if it does not."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(TEAR_DOWN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _clean_up(self._files)


def _clean_up(files: RunFiles) -> None:
    """Ends and removes what a supervisor that was killed has left: processes that use its temporary folder, and it."""
    temp_dir = files.run().get("temp_dir")
    if not temp_dir:
        return
    deadline = time.monotonic() + CLEAN_UP_S
    # Again and again: as long as its raylet lived, Ray may have started another agent for one that was killed.
    while left := [process for process in psutil.process_iter() if _uses(process, temp_dir)]:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=max(0.1, deadline - time.monotonic()))
        if time.monotonic() > deadline:
            break
    shutil.rmtree(temp_dir, ignore_errors=True)
    with writing(files.path):
        files.forget_run()


def _uses(process: psutil.Process, folder: str) -> bool:
    """Whether the folder is in the process's arguments or among its open files."""
    proc = Path(f"/proc/{process.pid}")
    try:
        texts = [os.fsdecode((proc / "cmdline").read_bytes()), *(os.readlink(fd) for fd in (proc / "fd").iterdir())]
    except OSError:
        return False  # it ended meanwhile, or it is another user's
    return any(folder in text for text in texts)


def _show(watcher: Watcher, message: Json) -> None:
    if "event" in message:
        watcher.event(message["event"])
    elif "step" in message:
        watcher.step(message["step"])
    elif "note" in message:
        watcher.note(message["note"])


def read_status(files: RunFiles) -> Json:
    """The document of ``elastic status --json``: of a live run from its etcd, of an ended one its last state.

    Raises:
        EtcdUnreachable: the run is alive, its etcd does not answer.
    """
    result = files.result()
    live = files.run()
    if result is not None or not files.alive() or "etcd" not in live:
        last = result or {}
        state = last.get("state", "starting" if files.alive() else "unknown")
        return {
            "job": last.get("job", live.get("job", files.path.name)),
            "state": state,
            "epoch": last.get("epoch", 0),
            "step": last.get("step", 0),
            "nodes": [],
        }
    etcd = Etcd(live["etcd"])
    try:
        return _live_status(etcd, Keys(live["job"]), live["job"])
    finally:
        etcd.close()


def _live_status(etcd: Etcd, keys: Keys, job: str) -> Json:
    listed, _ = etcd.range(keys.root)
    by_kind: dict[str, list[Json]] = {}
    for kv in listed:
        kind = keys.parse(kv.key).kind
        if kind in ("member", "plan", "progress", "result", "event"):
            by_kind.setdefault(kind, []).append(json.loads(kv.value))
    plan = by_kind.get("plan", [None])[-1]
    progress = by_kind.get("progress", [{"steps": []}])[-1]
    quarantined = set()
    for event in by_kind.get("event", []):
        if event["kind"] == "quarantined":
            quarantined.add(event["node"])
        elif event["kind"] == "quarantine_over":
            quarantined.discard(event["node"])
    nodes = []
    for member in sorted(by_kind.get("member", []), key=lambda one: str(one["node"])):
        workers = []
        planned = (
            plan is not None and plan["members"].get(member["node"], {}).get("incarnation") == member["incarnation"]
        )
        if planned:
            assert plan is not None
            rank = 0
            for p, pipeline in enumerate(plan["plan"]["pipelines"]):
                for s, stage in enumerate(pipeline["stages"]):
                    if stage["node"] == member["node"]:
                        workers.append(
                            {
                                "rank": rank,
                                "pid": member["worker_pid"],
                                "pipeline": p,
                                "stage": s,
                                "layers": list(range(stage["start"], stage["stop"])),
                            }
                        )
                    rank += 1
        state = "active" if planned else ("spare" if plan else "joining")
        if not planned and member["node"] in quarantined:
            state = "quarantined"
        nodes.append(
            {
                "id": member["node"],
                "incarnation": member["incarnation"],
                "state": state,
                "agent_pid": member["agent_pid"],
                "workers": workers,
            }
        )
    steps, version = progress["steps"], plan["version"] if plan else None
    ended = by_kind.get("result", [None])[-1]
    return {
        "job": job,
        "state": ended["state"] if ended else ("running" if plan else "waiting"),
        "epoch": plan["epoch"] if plan else 0,
        "step": steps[-1]["step"] if steps else (version[1] if version else 0),
        "nodes": nodes,
    }


def request_stop(files: RunFiles, timeout_s: float) -> Json:
    """Asks a live run to stop at the next voted step and waits for its end; its result document.

    Raises:
        EtcdUnreachable: its etcd does not answer.
        ElasticError: it did not end in time.
    """
    live = files.run()
    if files.result() is not None:
        pass  # it is taking itself down
    elif files.alive() and "etcd" in live:
        keys = Keys(live["job"])
        with Etcd(live["etcd"]) as etcd:
            spec = etcd.get(keys.spec)
            if spec is None:
                raise EtcdUnreachable(f"the run in {files.path} is starting or ending", "try again in a few seconds")
            # Only while the job has its spec: afterwards its keys are gone, and this one would stay behind.
            etcd.txn([created(keys.spec, spec.create_revision)], [Put(keys.request("stop"), b"{}")])
    elif files.alive():
        raise EtcdUnreachable(f"the run in {files.path} is still starting", "try again in a few seconds")
    deadline = time.monotonic() + timeout_s
    while files.alive():
        if time.monotonic() > deadline:
            raise ElasticError(f"the run in {files.path} did not stop within {timeout_s:.0f} s", "see its logs")
        time.sleep(0.1)
    return files.result() or {"job": live.get("job", files.path.name), "state": "unknown"}
