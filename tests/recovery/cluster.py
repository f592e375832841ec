"""A whole control plane without Ray: real etcd, the real controller in this process, real agents and workers.

Agents are restarted when they die, as Ray would. Victims are chosen by tokens: a file ``PHASE`` in the folder of tokens
kills the first worker (or the whole node, for ``PHASE.node``) that comes to that phase, see ``kill_site``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from checkpoint.store import Store
from elastic.control.agent import PROBE
from elastic.control.controller import Controller
from elastic.engine.inspection import inspect_job
from elastic.errors import EtcdUnreachable
from elastic.job import load_job
from elastic.rendezvous import Etcd, Fenced, Keys
from elastic.rendezvous.server import EtcdServer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class LocalFleet:
    """Starts agents as processes, and starts them again when they have died."""

    def __init__(self, endpoint, job, nodes, folder, run_dir):
        self._spec = {"endpoints": [endpoint], "job": job, "host": "127.0.0.1", "folder": folder}
        self._log_dir = run_dir / "logs"
        self._tokens = run_dir / "tokens"
        self._tokens.mkdir(parents=True)
        self._log_dir.mkdir()
        self._lock = threading.Lock()
        self._wanted = [f"node-{i}" for i in range(nodes)]
        self.agents: dict[str, subprocess.Popen] = {}
        self._closed = False

    def ensure(self):
        with self._lock:
            for name in [] if self._closed else self._wanted:
                agent = self.agents.get(name)
                if agent is None or agent.poll() is not None:
                    self.agents[name] = self._start(name)
            return len(self._wanted)

    def _start(self, name):
        spec = {**self._spec, "node": name, "log_dir": str(self._log_dir)}
        path = os.pathsep.join([str(HERE / "kill_site"), str(ROOT), *filter(None, sys.path)])
        env = {**os.environ, "PYTHONPATH": path, "KILL_TOKENS": str(self._tokens)}
        with (self._log_dir / f"agent-{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.recovery.agent_process", json.dumps(spec)],
                cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def resize(self, nodes):
        with self._lock:
            index = 0
            while len(self._wanted) < nodes:
                if f"node-{index}" not in self._wanted:
                    self._wanted.append(f"node-{index}")
                index += 1

    def release(self, node):
        with self._lock:
            self._wanted = [name for name in self._wanted if name != node]

    def close(self):
        with self._lock:
            self._closed = True
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


class Controllers:
    """Controllers as processes, each started again when it has ended, until the job has a result; all but the leader
    stand by."""

    def __init__(self, count, endpoint, job, nodes, run_dir, fleet, over):
        self._count, self._arguments = count, [endpoint, job, str(nodes)]
        self._run_dir, self._fleet, self._over = run_dir, fleet, over
        self.processes: dict[int, subprocess.Popen] = {}
        self.named: dict[str, subprocess.Popen] = {}

    def run(self):
        """In the thread that they are children of."""
        number = 0
        while not self._over():
            self._fleet.ensure()
            for place in range(self._count):
                process = self.processes.get(place)
                if process is None or process.poll() is not None:
                    number += 1
                    name = f"controller-{number}"
                    self.processes[place] = self.named[name] = self._start(name)
            time.sleep(0.05)
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()

    def _start(self, name):
        path = os.pathsep.join([str(HERE / "kill_site"), str(ROOT), *filter(None, sys.path)])
        env = {**os.environ, "PYTHONPATH": path, "KILL_TOKENS": str(self._run_dir / "tokens")}
        with (self._run_dir / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.recovery.controller_process", *self._arguments, name],
                cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip


class Cluster:
    """``with Cluster(config, nodes, tmp_path) as cluster: cluster.wait_for(...); cluster.result(...)``."""

    def __init__(self, config, nodes, run_dir, controllers=0):
        """With ``controllers`` there are so many, in processes of their own; else one, in this process."""
        self._config, self._nodes, self.run_dir = config, nodes, run_dir
        self._count, self.controllers = controllers, None
        self.keys = Keys(config.name)
        self.tokens = run_dir / "tokens"

    def __enter__(self):
        config, run_dir = self._config, self.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._server = EtcdServer(run_dir / "etcd", run_dir / "etcd.log", throwaway=True)
        self._server.start()
        self.etcd = Etcd([self._server.endpoint])
        inspection = inspect_job(load_job(config.job, config.params, config.train.seed, config.folder), config.train)
        url = str(run_dir / "store")
        Store(url).write(PROBE, config.name.encode())
        spec = {
            "config": config.to_dict(),
            "profile": inspection.profile.to_json(),
            "boundaries": inspection.boundaries,
            "checkpoint_url": url,
            "generation": 1,
            "start": "",
            "secret": "s3cret",
        }
        self.etcd.put(self.keys.spec, json.dumps(spec).encode())
        self.fleet = LocalFleet(self._server.endpoint, config.name, self._nodes, config.folder, run_dir)
        self._errors = []
        work = self._run
        if self._count:
            self.controllers = Controllers(
                self._count, self._server.endpoint, config.name, self._nodes, run_dir, self.fleet, self._over
            )
            work = self.controllers.run
        self._closing = False
        self._thread = threading.Thread(target=work, name="controller", daemon=True)
        self._thread.start()
        return self

    def _over(self):
        with contextlib.suppress(EtcdUnreachable):
            return self._closing or self.etcd.get(self.keys.result) is not None
        return self._closing

    def _run(self):
        """As Ray does: a controller that lost its lease or its etcd is started again, and reads everything anew."""
        number = 0
        while self.etcd.get(self.keys.result) is None:
            number += 1
            try:
                Controller([self._server.endpoint], self._config.name, self.fleet, f"controller-{number}").run()
            except (Fenced, EtcdUnreachable):
                continue
            except BaseException as error:  # shown by whoever waits
                self._errors.append(error)
                raise

    def __exit__(self, *_):
        story = "".join(json.dumps(event) + "\n" for event in self.events())
        (self.run_dir / "events.jsonl").write_text(story)
        self._closing = True
        self._thread.join(10 if self._count else 0)
        self.fleet.close()
        self._thread.join(10)
        self.etcd.close()
        self._server.stop()

    def events(self):
        return [json.loads(kv.value) for kv in self.etcd.range(self.keys.events)[0]]

    def of_kind(self, kind):
        return [event for event in self.events() if event["kind"] == kind]

    def members(self):
        return {m["node"]: m for m in (json.loads(kv.value) for kv in self.etcd.range(self.keys.members)[0])}

    def step(self):
        kv = self.etcd.get(self.keys.progress)
        return json.loads(kv.value)["steps"][-1]["step"] if kv is not None else 0

    def computing(self, plans=0):
        """The nodes that compute under the newest plan if it has formed and is not one of the first ``plans``."""
        events = self.events()  # one reading: plan and formed must be of one moment
        formed = [e["epoch"] for e in events if e["kind"] == "formed"]
        plan = [e for e in events if e["kind"] == "plan"][plans:][-1:]
        if not plan or plan[0]["epoch"] not in formed:
            return []
        return [node for pipeline in plan[0]["pipelines"] for node in pipeline]

    def wait_for(self, what, timeout_s=60.0):
        """Polls ``what()`` until it is true.

        Raises:
            AssertionError: it did not become true; the history is in the message.
        """
        deadline = time.monotonic() + timeout_s
        while not (value := what()):
            if self._errors:
                raise AssertionError("the controller failed") from self._errors[0]
            if time.monotonic() > deadline:
                story = "\n".join(str({k: v for k, v in e.items() if k != "time"})[:300] for e in self.events()[-25:])
                raise AssertionError(f"not within {timeout_s} s; the last events:\n{story}")
            time.sleep(0.02)
        return value

    def leader(self):
        """The process that leads, by its name in etcd."""
        kv = self.etcd.get(self.keys.leader)
        return kv.value.decode() if kv is not None else None

    def request(self, name, value=b"{}"):
        self.etcd.put(self.keys.request(name), value)

    def result(self, timeout_s=120.0):
        kv = self.wait_for(lambda: self.etcd.get(self.keys.result), timeout_s)
        return json.loads(kv.value)

    def kill_at(self, phase):
        """Arms a token; whoever comes to the phase first dies."""
        (self.tokens / phase).touch()

    def armed(self):
        return sorted(path.name for path in self.tokens.iterdir() if not path.name.endswith(".used"))
