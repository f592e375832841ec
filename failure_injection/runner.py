"""Runs a job twice, once with nothing going wrong and once under a scenario's faults, and judges what came out."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import psutil
import yaml

from checkpoint.commit import survey
from checkpoint.reader import Checkpoint, CheckpointError
from checkpoint.store import Store
from elastic.config import Config, load_config
from elastic.errors import ConfigError, EtcdUnreachable
from elastic.job import load_job
from elastic.runfiles import RunFiles
from elastic.runner import execute, read_status
from failure_injection.oracles import Evidence, judge
from failure_injection.scenario import Due, Scenario, Schedule, scenario_from, victims

Json = dict[str, Any]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


def load_scenario(path: Path) -> Scenario:
    """
    Raises:
        ConfigError: the file cannot be read, or is no scenario.
    """
    try:
        mapping = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", "`elastic chaos list` shows those that ship"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", "see configs/chaos for examples") from None
    return scenario_from(mapping, str(path))


def run_scenario(scenario: Scenario, folder: Path, seed: int, say: Callable[[str], None]) -> Json:
    """``{scenario, seed, passed, faults, verdicts, recoveries}``.

    Args:
        folder: where the scenario's file lies, and the path of its config starts.
        seed: chooses the victims.

    Raises:
        ElasticError: the job could not be started, or failed undisturbed.
    """
    config = load_config(folder / scenario.config, scenario.set)
    with tempfile.TemporaryDirectory(prefix="elastic-chaos-") as place:
        say("undisturbed, on one node")
        alone = load_config(folder / scenario.config, [*scenario.set, "cluster.nodes=1", "cluster.device_memory=null"])
        undisturbed = execute(alone, run_dir=Path(place) / "undisturbed")
        say(f"under faults, seed {seed}")
        files = RunFiles(Path(place) / "run")
        injector = Injector(config, scenario, files, Random(seed), say)
        document = execute(config, run_dir=files.path, watcher=injector)
        injector.close()
        evidence = Evidence(
            document=document,
            events=files.events(),
            steps=files.steps(),
            undisturbed=undisturbed,
            batch=config.train.global_batch,
            unfired=injector.unfired(),
            left=injector.left(),
            damaged=damaged(config, files),
        )
    verdicts = judge(evidence, scenario.checks)
    return {
        "scenario": scenario.name,
        "seed": seed,
        "passed": all(verdict.holds for verdict in verdicts),
        "faults": injector.fired,
        "verdicts": [verdict.__dict__ for verdict in verdicts],
        "recoveries": document["recoveries"],
    }


class Injector:
    """A watcher of a run that carries out what is due."""

    def __init__(
        self,
        config: Config,
        scenario: Scenario,
        files: RunFiles,
        random: Random,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule = Schedule(scenario.faults)
        job = load_job(config.job, config.params, config.train.seed, config.folder)
        self._layers = [layer.name for layer in job.layers]
        self._files, self._random, self._say, self._clock = files, random, say, clock
        self._began: float | None = None
        self._pending: list[Due] = []
        self._stopped: list[tuple[float, int]] = []  # when to go on, and which process
        self._temp_dir = ""
        self.fired: list[Json] = []

    def event(self, record: Json) -> None:
        self._temp_dir = self._files.run().get("temp_dir", self._temp_dir)
        if record["kind"] == "formed" and self._began is None:
            self._began = self._clock()
        self._act(self._schedule.advance(event=record["kind"]))

    def step(self, record: Json) -> None:
        self._act(self._schedule.advance(step=record["step"]))

    def note(self, text: str) -> None:
        pass

    def tick(self) -> None:
        now = self._clock()
        self._act(self._schedule.advance(seconds=now - self._began) if self._began is not None else [])
        for entry in [entry for entry in self._stopped if entry[0] <= now]:
            self._stopped.remove(entry)
            _send([entry[1]], signal.SIGCONT)

    def _act(self, due: list[Due]) -> None:
        """Those for which there is no victim at the moment are tried again at the next occasion."""
        todo, self._pending = [*self._pending, *due], []
        for one in todo:
            found = self._find(one)
            if not found:
                self._pending.append(one)
                continue
            fault = one.fault
            _send([pid for pids in found.values() for pid in pids], SIGNALS[fault.do])
            if fault.do == "stop":
                until = self._clock() + fault.for_s
                self._stopped += [(until, pid) for pids in found.values() for pid in pids]
            self.fired.append({"do": fault.do, "to": fault.to, "nodes": sorted(found), "time": time.time()})
            self._say(f"{fault.do} {fault.to} {', '.join(found)}")

    def _find(self, due: Due) -> Mapping[str, list[int]]:
        """Processes to hit, by node."""
        fault = due.fault
        if fault.to == "controller":
            pids = controllers(self._files)
            return {"controller": pids} if pids else {}
        try:
            nodes = read_status(self._files)["nodes"]
        except EtcdUnreachable:
            return {}
        hit = victims(fault.pick, nodes, self._layers, self._random)
        if fault.to == "worker":
            return {node["id"]: [worker["pid"] for worker in node["workers"]] for node in hit if node["workers"]}
        if fault.do == "terminate":  # what a cloud sends is for the agent, which hands the work over
            return {node["id"]: [node["agent_pid"]] for node in hit}
        return {node["id"]: group_of(node["agent_pid"]) for node in hit}

    def close(self) -> None:
        for _, pid in self._stopped:
            _send([pid], signal.SIGCONT)

    def unfired(self) -> list[Any]:
        return [*self._schedule.left, *(due.fault for due in self._pending)]

    def left(self) -> list[str]:
        """What the run left behind."""
        marks = [str(self._files.path), *([self._temp_dir] if self._temp_dir else [])]
        found = [f"folder {self._temp_dir}"] if self._temp_dir and Path(self._temp_dir).exists() else []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if process.pid != os.getpid() and any(mark in line for mark in marks):
                found.append(f"process {process.pid}")
        return found


def controllers(files: RunFiles) -> list[int]:
    """The process of the job's controller, which Ray names by its class."""
    try:
        below = psutil.Process(files.run()["supervisor"]).children(recursive=True)
    except (KeyError, psutil.Error):
        return []
    return [process.pid for process in below if "ControllerActor" in " ".join(_command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []  # it ended meanwhile


def group_of(agent: int) -> list[int]:
    """All processes of a node: those in the process group of its agent."""
    members = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == agent:
                members.append(pid)
        except ProcessLookupError:
            continue
    return members


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it ended meanwhile


def damaged(config: Config, files: RunFiles) -> list[str]:
    """Checkpoints that count and do not verify."""
    store = Store(config.checkpoint.url_in(str(files.path)), config.checkpoint.storage_options)
    found = survey(store)
    out = []
    for attempt in (a for generation in found.generations for a in found.surviving(generation)):
        try:
            Checkpoint.open(store, attempt).verify()
        except CheckpointError as error:
            out.append(f"step {attempt.step}: {error}")
    return out
