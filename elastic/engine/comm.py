"""Process groups of one epoch. An object of this module belongs to one epoch and is never changed, only ended."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from elastic.engine.gate import Superseded
from elastic.engine.units import Unit
from elastic.planning import Plan, groups

ABORT_TAG = 1 << 20  # no operation of ours has it, so the receive that carries it never completes
POLL_S = 0.002
REACH_S = 0.5


class FormFailed(Exception):
    """The groups of an epoch did not come up in time; the message says what was missing."""


def serve_store(host: str) -> tuple[TCPStore, str]:
    """A c10d store server in this process on a free port of ``host``: ``(store, "host:port")``.

    It lives as long as the process; epochs share it under prefixes of their own. The listening socket is bound here
    and handed over, so the port cannot be taken in between, and nothing listens on other interfaces.
    """
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return store, f"{host}:{port}"


@dataclass(frozen=True)
class Groups:
    """The groups one rank takes part in.

    Attributes:
        world: every rank of the plan; carries the vote.
        pipeline: the ranks of this rank's pipeline, in stage order.
        buckets: for each set of units with the same owners that this rank is one of, the group of the owners
            (``None`` when it is alone) and the indices of the units. In the same order on all ranks.
        all: every distinct group.
    """

    rank: int
    world: Any
    pipeline: Any
    buckets: tuple[tuple[Any, tuple[int, ...]], ...]
    all: tuple[Any, ...]

    def abort(self) -> None:
        """Makes every pending operation of these groups raise, here and at the peers. From any thread.

        gloo's own ``abort`` does nothing for a waiting thread. A receive that times out makes gloo close all
        connections of the group, and whatever waits on them raises.
        """
        for group in self.all:
            if group.size() > 1:
                peer = (group.rank() + 1) % group.size()
                backend = group._get_backend(torch.device("cpu"))
                with contextlib.suppress(RuntimeError):
                    backend.recv([torch.empty(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))
            if torch.cuda.is_available():
                with contextlib.suppress(RuntimeError):
                    group._get_backend(torch.device("cuda")).abort()

    def close(self) -> None:
        """Ends every group of the epoch; peers that are gone already are no error. Only the thread that formed them."""
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()


def form(
    plan: Plan,
    rank: int,
    units: Sequence[Unit],
    store: str,
    prefix: str,
    meet_timeout_s: float,
    connect_timeout_s: float,
    operation_timeout_s: float,
    superseded: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Groups:
    """Builds the groups of a plan. Every rank of the plan must call it with the same arguments (but ``rank``).

    Connecting blocks until its timeout when a peer is missing, and there is no group yet to abort. So the ranks first
    meet in the store, where waiting can be given up at once; only when all are there do they connect, which takes
    milliseconds.

    Args:
        store: ``host:port`` of the store server that the plan names.
        prefix: unique to the epoch.
        meet_timeout_s, connect_timeout_s: bounds for these two phases.
        operation_timeout_s: bound for every collective later.
        superseded: set when a newer epoch has begun.

    Raises:
        Superseded: a newer epoch has begun.
        FormFailed: a peer or the store did not answer in time.
    """
    ranks = plan.ranks()
    size = len(ranks)
    superseded = superseded or threading.Event()
    timeout = timedelta(seconds=connect_timeout_s)
    host, _, port = store.rpartition(":")
    _reach(host, int(port), superseded, clock() + connect_timeout_s, clock)
    try:
        # A client of its own per epoch: an abandoned one blocks its client until the timeout.
        client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        shared = PrefixStore(prefix, client)
        _meet(shared, rank, size, superseded, clock() + meet_timeout_s, clock)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        # Torch names groups by this count, which an attempt that failed leaves behind on some ranks and not on others.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=timeout)
        made: dict[tuple[int, ...], Any] = {tuple(range(size)): dist.group.WORLD}
        pipelines = [tuple(p.rank for p in ranks if p.pipeline == number) for number in range(len(plan.pipelines))]
        owners = groups(plan, [unit.layers for unit in units])
        # Every rank makes every group, in one order; only the members of each connect. Torch's local synchronization
        # names a group after the number of groups that its rank has already, which is not the same on all members.
        for members in [*pipelines, *(bucket.ranks for bucket in owners)]:
            if len(members) > 1 and members not in made:
                made[members] = dist.new_group(members, timeout=timeout)
        mine = pipelines[next(place.pipeline for place in ranks if place.rank == rank)]
        if mine not in made:  # a pipeline of one, among several: nobody else need take part
            made[mine] = dist.new_group(mine, timeout=timeout, use_local_synchronization=True)
        pipeline = made[mine]
        buckets = [
            (made[bucket.ranks] if len(bucket.ranks) > 1 else None, bucket.units)
            for bucket in owners
            if rank in bucket.ranks
        ]
        for group in [group for members, group in made.items() if rank in members]:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=operation_timeout_s), group)
    except (RuntimeError, ValueError) as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()
        raise FormFailed(f"{type(error).__name__}: {error}") from error
    return Groups(rank, dist.group.WORLD, pipeline, tuple(buckets), tuple(g for m, g in made.items() if rank in m))


def _reach(host: str, port: int, superseded: threading.Event, deadline: float, clock: Callable[[], float]) -> None:
    """Returns when the store can be connected to: its own client cannot be stopped while it tries."""
    while True:
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
            return
        except OSError as error:
            if clock() > deadline:
                raise FormFailed(f"the store at {host}:{port} does not answer: {error}") from error
        if superseded.wait(10 * POLL_S):
            raise Superseded


def _meet(
    store: Any, rank: int, size: int, superseded: threading.Event, deadline: float, clock: Callable[[], float]
) -> None:
    """Returns when every rank has called it."""
    store.set(f"here/{rank}", "1")
    everyone = [f"here/{other}" for other in range(size)]
    while not store.check(everyone):
        if superseded.wait(POLL_S):
            raise Superseded
        if clock() > deadline:
            absent = [other for other in range(size) if not store.check([everyone[other]])]
            raise FormFailed(f"ranks {absent} did not come")
