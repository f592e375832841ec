"""A worker process: ``python -m elastic.engine.worker FD``, child of an agent, one per device.

From the agent, as JSON lines on the inherited socket FD:

    init {config, folder, boundaries, host}     first, once
    form {epoch, node, ranks, plan, store, step}  the record of a plan, as it stands in etcd
    stop                                        vote to stop after the step under way
To the agent:

    ready {pid, store, fingerprint}             the job is loaded; asks to be planned in
    formed {epoch, rank}
    step {epoch, …}                             rank 0 only: one committed step
    end {epoch, kind, step, reason, digests, ledger}
    error {epoch, error}                        the user's code, or a refusal by name
    broken {epoch, reason}                      a collective failed
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import torch

from elastic.config import Config
from elastic.engine.channel import Channel, Message
from elastic.engine.comm import form, serve_store
from elastic.engine.fingerprint import fingerprint
from elastic.engine.gradients import FIRST_EXPONENT
from elastic.engine.layers import LayerState, build_layer
from elastic.engine.step import Announcement, End, Epoch, Progress
from elastic.engine.units import units_of
from elastic.engine.usercode import cause_of, user_code
from elastic.errors import ElasticError, UserCodeError
from elastic.job import load_job
from elastic.planning import Plan

PR_SET_PDEATHSIG = 1


class Worker:
    """The state that outlives an epoch: the job, the held layers, and what all ranks know alike."""

    def __init__(self, init: Message, channel: Channel) -> None:
        self._config = Config.from_dict(init["config"])
        self._boundaries = [(tuple(shape), dtype) for shape, dtype in init["boundaries"]]
        self._channel = channel
        self._stop = threading.Event()
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        torch.set_num_threads(self._config.train.threads)
        train = self._config.train
        with user_code(f"the job function {self._config.job}"):
            self._job = load_job(self._config.job, self._config.params, train.seed, init["folder"])
        self._store, self.store_address = serve_store(init["host"])
        self._units = units_of(self._job)
        self._layers: dict[int, LayerState] = {}

    def request_stop(self) -> None:
        self._stop.set()

    def run_epoch(self, command: Message) -> None:
        """Forms and trains one epoch, and reports how it ended; errors are reported, never raised."""
        epoch = command["epoch"]
        try:
            end, digests, progress = self._train(command)
        except Exception as error:  # noqa: BLE001 - torch raises many kinds; every one is reported
            cause = cause_of(error)
            if isinstance(cause, ElasticError):
                self._channel.send({"ev": "error", "epoch": epoch, "error": cause.as_json()})
            else:
                traceback.print_exc()
                self._channel.send({"ev": "broken", "epoch": epoch, "reason": f"{type(error).__name__}: {error}"})
            return
        self._channel.send(
            {
                "ev": "end",
                "epoch": epoch,
                **end.__dict__,
                "loss": progress.loss,
                "digests": digests,
                "ledger": progress.ledger.__dict__,
            }
        )

    def _train(self, command: Message) -> tuple[End, dict[str, str], Progress]:
        plan = Plan.from_json(command["plan"])
        place = next(place for place in plan.ranks() if place.rank == command["ranks"][command["node"]])
        train = self._config.train
        for index in range(place.start, place.stop):
            if index not in self._layers:
                with user_code(f"building layer {self._job.layers[index].name!r}"):
                    self._layers[index] = build_layer(self._job, index, train.seed)
                self._layers[index].module.to(self._device)
        progress = Progress(command["step"], [FIRST_EXPONENT] * len(self._units))
        prefix = f"{self._config.name}/{command['epoch']}"
        groups = form(plan, place.rank, self._units, command["store"], prefix, self._config.detection.orphan_s)
        try:
            self._channel.send({"ev": "formed", "epoch": command["epoch"], "rank": place.rank})

            def announce(announcement: Announcement) -> None:
                self._announce(command["epoch"], announcement)

            epoch = Epoch(
                self._job,
                train,
                self._boundaries,
                plan,
                groups,
                self._layers,
                progress,
                self._device,
                announce,
                self._stop.is_set,
            )
            end = epoch.train()
            mine = [self._layers[i] for i in range(place.start, place.stop)]
            return end, {layer.name: layer.digest() for layer in mine}, progress
        finally:
            groups.close()

    def _announce(self, epoch: int, announcement: Announcement) -> None:
        if self._job.on_metrics is not None:
            with user_code("the metric callback on_metrics"):
                self._job.on_metrics(announcement.metrics)
        record: dict[str, Any] = {**announcement.metrics.__dict__, **announcement.ledger.__dict__}
        self._channel.send(
            {"ev": "step", "epoch": epoch, **record, "weight": announcement.weight, "seconds": announcement.seconds}
        )


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that spawned it ends; returns only if it still lives."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int, parent: int) -> None:
    die_with(parent)
    # The agent decides when to stop; Ctrl-C in a terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    messages = iter(channel)
    init = next(messages, None)
    if init is None:
        return
    try:
        worker = Worker(init, channel)
    except Exception as error:  # noqa: BLE001 - reported to the agent
        cause = cause_of(error)
        if not isinstance(cause, ElasticError):
            cause = UserCodeError(f"{type(error).__name__} while starting: {error}", detail=traceback.format_exc())
        channel.send({"ev": "error", "epoch": 0, "error": cause.as_json()})
        return
    commands: queue.Queue[Message | None] = queue.Queue()

    def listen() -> None:
        for message in messages:
            if message["op"] == "stop":
                worker.request_stop()
            else:
                commands.put(message)
        os._exit(0)  # the agent is gone, or done with this worker: whatever runs here counts no more

    threading.Thread(target=listen, name="listen", daemon=True).start()
    channel.send({"ev": "ready", "pid": os.getpid(), "store": worker.store_address, "fingerprint": fingerprint()})
    while True:
        command = commands.get()
        if command is None:
            return
        worker.run_epoch(command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
