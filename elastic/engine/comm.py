"""Process groups of one epoch. An object of this module belongs to one epoch and is never changed, only closed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from elastic.engine.units import Unit
from elastic.planning import Plan, groups


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
    """

    rank: int
    world: Any
    pipeline: Any
    buckets: tuple[tuple[Any, tuple[int, ...]], ...]

    def close(self) -> None:
        """Ends every group of the epoch; peers that are gone already are no error."""
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


def form(plan: Plan, rank: int, units: Sequence[Unit], store: str, prefix: str, timeout_s: float) -> Groups:
    """Builds the groups of a plan. Every rank of the plan must call it with the same arguments (but ``rank``).

    Args:
        store: ``host:port`` of the store server that the plan names.
        prefix: unique to the epoch and the attempt.
        timeout_s: bound for forming, and afterwards for every collective.

    Raises:
        RuntimeError: a peer or the store did not answer in time (``DistNetworkError``, ``DistStoreError`` are such).
    """
    ranks = plan.ranks()
    timeout = timedelta(seconds=timeout_s)
    host, _, port = store.rpartition(":")
    # A client of its own per attempt: an abandoned attempt blocks its client until the timeout.
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore(prefix, client), rank=rank, world_size=len(ranks), timeout=timeout
    )
    made: dict[tuple[int, ...], Any] = {tuple(range(len(ranks))): dist.group.WORLD}

    def group_of(members: tuple[int, ...]) -> Any:
        if members not in made:
            made[members] = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
        return made[members]

    mine = next(place for place in ranks if place.rank == rank)
    pipeline = group_of(tuple(place.rank for place in ranks if place.pipeline == mine.pipeline))
    buckets = []
    for bucket in groups(plan, [unit.layers for unit in units]):
        if rank in bucket.ranks:
            buckets.append((group_of(bucket.ranks) if len(bucket.ranks) > 1 else None, bucket.units))
    return Groups(rank, dist.group.WORLD, pipeline, tuple(buckets))
