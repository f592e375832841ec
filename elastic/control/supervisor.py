"""The supervisor of a run: owns its etcd and its Ray, and writes the run's history into the run's folder.

    python -m elastic.control.supervisor RUN_DIR

It speaks JSON lines. On stdin: first ``{config, detach}``, then ``{spec}`` once the job has been inspected, later
``{op: stop | kill}``. On stdout: ``{note}``, ``{event}``, ``{step}``, ``{error}``, and last ``{result}``. When stdin
ends it takes the run down, unless the run is detached.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import psutil

from checkpoint.store import Store, StoreError
from elastic.config import Config
from elastic.control.agent import PROBE
from elastic.errors import ElasticError, EtcdUnreachable, Interrupted, RayUnreachable, StoreUnreachable
from elastic.observe.summary import summarize
from elastic.rendezvous import Etcd, Keys, watch_prefix
from elastic.rendezvous.server import EtcdServer
from elastic.runfiles import RunFiles

Json = dict[str, Any]
PR_SET_CHILD_SUBREAPER = 36
START_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
AGENTS_END_S = 3.0
QUIET: Json = {"log_to_driver": False, "configure_logging": False}


class Supervisor:
    def __init__(self, run_dir: Path, config: Config, inbox: queue.Queue[Json], say: Callable[[Json], None]) -> None:
        self._files, self._say = RunFiles(run_dir), say
        self._config, self._inbox = config, inbox
        self._keys = Keys(config.name)
        self._temp = Path()
        self._server: EtcdServer | None = None
        self._etcd: Etcd | None = None
        self._ray: Any = None
        self._generation = 1
        self._events: list[Json] = []
        self._steps: list[Json] = []
        self._starting, self._ending = True, False
        self._stop_asked = False  # by Ctrl-C, that is; `elastic stop` goes through etcd

    def run(self) -> Json:
        """The result document of the run. Everything that was started is ended when this returns or raises."""
        try:
            self._temp = Path(tempfile.mkdtemp(prefix="elastic-", dir=short_temp_dir()))
            record = {"temp_dir": str(self._temp), "supervisor": os.getpid(), "job": self._config.name}
            self._files.write_run(record)
            endpoints = self._start_etcd()
            self._etcd = Etcd(endpoints)
            self._etcd.status()  # fails now rather than after Ray has started
            self._files.write_run({**record, "etcd": endpoints, "ray": self._config.cluster.ray})
            self._start_ray()
            signal.signal(signal.SIGTERM, self.terminate)  # Ray has put a handler of its own there
            first = self._inbox.get()
            if "spec" not in first or self._poll():  # stopped before it began
                return self._interrupted()
            return self._supervise(self._etcd, tuple(endpoints), first["spec"])
        finally:
            self._tear_down()

    def _start_etcd(self) -> list[str]:
        if self._config.cluster.etcd != "embedded":
            return list(self._config.cluster.endpoints)
        self._say({"note": "starting etcd"})
        self._server = EtcdServer(self._temp / "etcd", self._files.logs / "etcd.log", throwaway=True)
        self._server.start()
        return [self._server.endpoint]

    def _start_ray(self) -> None:
        self._say({"note": "starting Ray" if self._local else f"connecting to Ray at {self._config.cluster.ray}"})
        import ray  # after main() has set up token authentication

        self._ray = ray
        try:
            self._start_local() if self._local else self._connect()
        except Exception as error:  # Ray raises many kinds here
            raise RayUnreachable(
                f"Ray at {self._config.cluster.ray!r} did not start or answer: {error}",
                "is this machine very busy? try again, and see the run's logs"
                if self._local
                else "check cluster.ray, and RAY_AUTH_TOKEN if that cluster wants a token",
            ) from error

    def _start_local(self) -> None:
        for tries_left in (2, 1, 0):
            try:
                self._ray.init(
                    address="local",
                    _temp_dir=str(self._temp / f"r{tries_left}"),
                    num_cpus=1,
                    num_gpus=0,
                    include_dashboard=False,
                    **QUIET,
                )
            except Exception:
                # Ray gives its parts 30 s to start, too little on a very busy machine, and leaves them running.
                if not tries_left:
                    raise
                end_descendants(spare={self._server.pid} if self._server else set())
            else:
                return

    def _connect(self) -> None:
        """Ray tries for minutes, and not even a signal gets through to it meanwhile: so in a thread, with a deadline.

        Raises:
            OSError: nobody listens there, or it is not Ray that does.
        """
        address = self._config.cluster.ray
        if address != "auto":
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        packages = [str(Path(sys.modules[name].__file__ or "").parent) for name in ("elastic", "checkpoint")]
        environment = {
            "working_dir": self._config.folder,
            "py_modules": packages,
            "excludes": ["runs/", ".git/", ".venv/", "__pycache__/"],
        }
        outcome: list[Exception | None] = []

        def init() -> None:
            try:
                self._ray.init(address=address, runtime_env=environment, **QUIET)
            except Exception as error:  # noqa: BLE001 - raised below
                outcome.append(error)
            else:
                outcome.append(None)

        thread = threading.Thread(target=init, name="ray", daemon=True)
        thread.start()
        thread.join(START_TIMEOUT_S)
        if not outcome:
            raise TimeoutError(f"no answer within {START_TIMEOUT_S:.0f} s")
        if outcome[0] is not None:
            raise outcome[0]

    @property
    def _local(self) -> bool:
        return self._config.cluster.ray == "local"

    def _supervise(self, etcd: Etcd, endpoints: tuple[str, ...], spec: Json) -> Json:
        from elastic.control.actors import Site, start_controller

        self._generation = spec["generation"]
        etcd.delete_prefix(self._keys.root)  # leftovers of a run that ended without its supervisor
        url = self._config.checkpoint.url_in(str(self._files.path))
        with self._probe(url):
            etcd.put(
                self._keys.spec, json.dumps({**spec, "checkpoint_url": url, "secret": os.urandom(16).hex()}).encode()
            )
            site = Site(
                endpoints=endpoints,
                job=self._config.name,
                nodes=self._config.cluster.nodes if self._local else None,
                folder=self._config.folder if self._local else None,
                log_dir=str(self._files.logs) if self._local else None,
            )
            try:
                start_controller(site, START_TIMEOUT_S)
            except self._ray.exceptions.RayError as error:
                raise RayUnreachable(
                    f"the job's controller did not start on Ray: {error}", "see the logs of that cluster"
                ) from error
            self._starting = False
            self._say({"note": "waiting for nodes"})
            return self._mirror(etcd)

    @contextlib.contextmanager
    def _probe(self, url: str) -> Iterator[None]:
        """An object that every agent must be able to read before it joins: proof that the store is shared."""
        try:
            store = Store(url, self._config.checkpoint.storage_options)
            store.write(PROBE, self._config.name.encode())
        except StoreError as error:
            raise StoreUnreachable(str(error), "check checkpoint.url and checkpoint.storage_options") from error
        try:
            yield
        finally:
            with contextlib.suppress(StoreError):  # the run's result matters more than this object
                store.delete(PROBE)

    def _mirror(self, etcd: Etcd) -> Json:
        """Copies events and steps into the run's folder and to stdout until the job has a result."""
        listed, watch = watch_prefix(etcd, self._keys.root)
        last = 0
        pending = list(listed)
        with watch:
            while True:
                for kv in pending:
                    parsed = self._keys.parse(kv.key)
                    if parsed.kind == "event":
                        record = json.loads(kv.value)
                        if record["kind"] == "rollback":
                            last = record["to_step"]
                            self._steps = [step for step in self._steps if step["step"] <= last]
                        self._event(record)
                    elif parsed.kind == "progress":
                        for record in json.loads(kv.value)["steps"]:
                            if record["step"] > last:
                                last = record["step"]
                                self._step(record)
                    elif parsed.kind == "result":
                        return self._document(json.loads(kv.value))
                order = self._poll()
                if order == "kill":
                    return self._interrupted()
                if order == "stop":
                    self._stop_asked = True
                    etcd.put(self._keys.request("stop"), b"{}")
                pending = [event.kv for event in watch.get(timeout_s=0.1) if event.kind == "put"]

    def _poll(self) -> str:
        try:
            return str(self._inbox.get_nowait().get("op", ""))
        except queue.Empty:
            return ""

    def _event(self, record: Json) -> None:
        self._events.append(record)
        self._files.append_event(record)
        self._say({"event": record})

    def _step(self, record: Json) -> None:
        record = {key: value for key, value in record.items() if key != "ev"}
        self._steps.append(record)
        self._files.append_step(record)
        self._say({"step": record})

    def _document(self, result: Json) -> Json:
        if result["state"] == "stopped" and self._stop_asked:
            result = {**result, "state": "interrupted"}
        if result["state"] == "interrupted":
            error = Interrupted("interrupted", "run the same command again to go on")
            result = {**result, "error": error.as_json()}
        document = summarize(self._config.name, self._events, self._steps, result, self._generation)
        self._files.write_result(document)
        return document

    def _interrupted(self) -> Json:
        step = self._steps[-1]["step"] if self._steps else 0
        return self._document({"state": "interrupted", "step": step, "loss": None, "params_digest": None})

    def kill(self) -> None:
        """Ends the run now; from any thread."""
        self._inbox.put({"op": "kill"})
        while self._starting and not self._ending:  # the inbox is read later only; Ray swallows an exit now and then
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)

    def terminate(self, *_: object) -> None:
        """On SIGTERM: leaves `run`, which takes everything down. Not while it does so already."""
        if not self._ending:
            sys.exit(1)

    def _tear_down(self) -> None:
        """Agents and workers, actors, the job's keys, Ray, etcd, whatever else descends from this process, and the
        temporary folder."""
        self._ending = True
        if self._ray is not None and self._ray.is_initialized():
            with contextlib.suppress(EtcdUnreachable):  # the actors are ended all the same
                self._end_agents()
            with contextlib.suppress(Exception):  # Ray may be gone already; the processes are ended below
                from elastic.control.actors import end_actors

                end_actors(self._config.name)
            with contextlib.suppress(Exception):
                self._ray.shutdown()
        if self._etcd is not None:
            with contextlib.suppress(EtcdUnreachable):  # then there is nothing to clean
                if self._server is None:
                    self._etcd.delete_prefix(self._keys.root)
            self._etcd.close()
        if self._server is not None:
            self._server.stop()
        end_descendants()
        if self._temp.name:
            shutil.rmtree(self._temp, ignore_errors=True)
        self._files.forget_run()

    def _end_agents(self) -> None:
        """Agents end their workers and delete their keys once the job has a result; not all may be on this host."""
        assert self._etcd is not None
        if self._etcd.get(self._keys.spec) is None:
            return  # none was started
        self._etcd.create(self._keys.result, json.dumps({"state": "interrupted"}).encode())
        deadline = time.monotonic() + AGENTS_END_S
        while self._etcd.range(f"{self._keys.root}hosts/")[0] and time.monotonic() < deadline:
            time.sleep(0.02)


def teller() -> Callable[[Json], None]:
    """A function that writes one line to whoever started us. Nobody else gets to write to stdout; Ray would."""
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: Json) -> None:
        with contextlib.suppress(OSError, ValueError):  # a detached run's command has gone
            messages.write(json.dumps(message) + "\n")
            messages.flush()

    return say


def short_temp_dir() -> str:
    """A base short enough for Ray's socket names (107 characters in all)."""
    base = tempfile.gettempdir()
    return base if len(base) <= 30 else "/tmp"


def end_descendants(timeout_s: float = 5.0, spare: Set[int] = frozenset()) -> None:
    """SIGKILL to every process below this one but those to spare; orphans come to us, the subreaper."""
    deadline = time.monotonic() + timeout_s

    def living() -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in spare]

    while (children := living()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)


def listen(supervisor: Supervisor, inbox: queue.Queue[Json], detach: bool) -> None:
    """Takes in what the command says, and takes the run down when the command ends before its time."""
    began = False
    for line in sys.stdin:
        message = json.loads(line)
        began = began or "spec" in message
        if message.get("op") == "kill":
            supervisor.kill()
        else:
            inbox.put(message)
    if not (detach and began):
        supervisor.kill()


def main(run_dir: Path) -> int:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    say = teller()
    inbox: queue.Queue[Json] = queue.Queue()
    first = json.loads(sys.stdin.readline() or "null")
    if first is None:
        return 1
    config = Config.from_dict(first["config"])
    detach = bool(first["detach"])
    if config.cluster.ray == "local":
        # Must be in the environment before ray is imported; whoever reaches its ports could run code otherwise.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = os.urandom(32).hex()
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    try:
        supervisor = Supervisor(run_dir, config, inbox, say)
        signal.signal(signal.SIGTERM, supervisor.terminate)
        threading.Thread(target=listen, args=(supervisor, inbox, detach), name="stdin", daemon=True).start()
        document = supervisor.run()
    except ElasticError as error:
        say({"error": error.as_json()})
        return 1
    except Exception as error:  # noqa: BLE001 - a defect; the command shows it
        traceback.print_exc()
        internal = ElasticError(f"internal error in the supervisor: {error}", detail=traceback.format_exc())
        say({"error": internal.as_json()})
        return 1
    say({"result": document})
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main(Path(sys.argv[1]))
    finally:
        # All is taken down, and a Ray whose start was broken off can spin for ever in the handlers that run at exit.
        os._exit(code)
