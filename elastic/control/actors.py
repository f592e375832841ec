"""The controller and the agents as Ray actors, and the fleet that places them.

Ray starts them, pins them to nodes and restarts them. Their work starts in ``__init__``, which is what a restart runs,
and runs in a thread of its own; when that thread fails the process ends, so that Ray restarts it. Orders and reports
go through etcd, never through actor calls.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray._private.worker as ray_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.control.agent import Agent, AgentSpec
from elastic.control.controller import Controller


@dataclass(frozen=True)
class Site:
    """Where a job runs.

    Attributes:
        nodes: agents to start on a private local Ray; ``None`` on a user's cluster, where each Ray node gets one.
        folder: where the job's code lies; ``None`` where Ray ships it as the working folder.
        log_dir: for the output of workers; ``None`` for the log folder of each node's Ray session.
    """

    endpoints: tuple[str, ...]
    job: str
    nodes: int | None
    folder: str | None
    log_dir: str | None


def namespace(job: str) -> str:
    """The Ray namespace of a job's actors."""
    return f"elastic-{job}"


def _in_thread(name: str, work: Callable[[], None]) -> None:
    def body() -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - whatever it is, Ray is to restart the process
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=body, name=name, daemon=True).start()


@ray.remote(num_cpus=0, max_restarts=-1)
class AgentActor:
    """One per node; see `Agent`."""

    def __init__(self, site: Site, node: str) -> None:
        local = site.nodes is not None
        session: Any = ray_worker._global_node  # where this Ray node keeps its logs; there is no public name for it
        spec = AgentSpec(
            endpoints=site.endpoints,
            job=site.job,
            node=node,
            host="127.0.0.1" if local else str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            folder=site.folder or os.getcwd(),
            log_dir=site.log_dir or session.get_logs_dir_path(),
        )
        agent = Agent(spec)
        signal.signal(signal.SIGTERM, lambda *_: agent.drain())  # a preemption: hand the work over, then go
        _in_thread("agent", agent.run)


@ray.remote(num_cpus=0, max_restarts=-1)
class ControllerActor:
    """One per job; see `Controller`."""

    def __init__(self, site: Site) -> None:
        controller = Controller(site.endpoints, site.job, RayFleet(site), uuid.uuid4().hex[:12])
        _in_thread("controller", controller.run)

    def ready(self) -> bool:
        """Returns once the actor has started."""
        return True


class RayFleet:
    """Starts one agent per node, found again by name after a restart of the controller."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._agents: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._local = [f"node-{i}" for i in range(site.nodes or 0)]
        self._released: set[str] = set()

    def resize(self, nodes: int) -> None:
        with self._lock:
            free = (f"node-{i}" for i in itertools.count() if f"node-{i}" not in self._local)
            while len(self._local) < nodes:
                name = next(free)
                self._released.discard(name)
                self._local.append(name)

    def release(self, node: str) -> None:
        with self._lock:
            self._released.add(node)
            self._local = [name for name in self._local if name != node]
            self._agents.pop(node, None)
        try:
            agent = ray.get_actor(node, namespace(self._site.job))
        except ValueError:
            return
        ray.kill(agent, no_restart=True)

    def ensure(self) -> int:
        with self._lock:
            return self._ensure()

    def _ensure(self) -> int:
        if self._site.nodes is not None:
            here = ray.get_runtime_context().get_node_id()
            wanted = dict.fromkeys(self._local, here)
        else:
            alive = {f"node-{node['NodeID'][:8]}": node["NodeID"] for node in ray_nodes() if node["Alive"]}
            wanted = {name: node_id for name, node_id in alive.items() if name not in self._released}
        for name, node_id in wanted.items():
            if name not in self._agents:
                self._agents[name] = start_agent(self._site, name, node_id)
        return len(wanted)


def ray_nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def start_agent(site: Site, name: str, node_id: str) -> Any:
    """Pinned hard to the Ray node: with soft affinity Ray may start a second agent elsewhere while the first lives."""
    gpus = next((n["Resources"].get("GPU", 0) for n in ray_nodes() if n["NodeID"] == node_id), 0)
    return AgentActor.options(  # type: ignore[attr-defined]
        name=name,
        namespace=namespace(site.job),
        lifetime="detached",
        get_if_exists=True,
        num_gpus=1 if gpus and site.nodes is None else 0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(site, name)


def start_controller(site: Site, timeout_s: float) -> None:
    """Starts the job's controller, which starts everything else.

    Raises:
        ray.exceptions.RayError: it did not come up in time.
    """
    actor = ControllerActor.options(  # type: ignore[attr-defined]
        name="controller", namespace=namespace(site.job), lifetime="detached", get_if_exists=True
    ).remote(site)
    ray.get(actor.ready.remote(), timeout=timeout_s)


def end_actors(job: str) -> None:
    """Ends the job's actors for good; Ray does not restart them."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace(job):
            try:
                ray.kill(ray.get_actor(actor["name"], actor["namespace"]), no_restart=True)
            except ValueError:
                continue  # it ended meanwhile
