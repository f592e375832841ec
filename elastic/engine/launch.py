"""Starts worker processes and talks to them. Used by agents, and by tests and benchmarks in an agent's place."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import psutil

from elastic.engine.channel import Channel, Message
from elastic.engine.page import Page


def interface_of(host: str) -> str | None:
    """The name of the network interface that has the address ``host``, for gloo; ``None`` lets gloo choose."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    return None


class WorkerProcess:
    """One worker; ``page`` says what it is doing.

    Must be created by a thread that lives as long as the worker should: the kernel's parent-death signal fires when
    that *thread* ends.

    Args:
        host: address of this node, where the worker's store and gloo listen.
        log: file that gets the worker's stdout and stderr.
        on_message: called from a reader thread with each message; after the last one with
            ``{"ev": "exit", "code": int}`` once the process is reaped.
    """

    def __init__(
        self,
        host: str,
        log: Path,
        on_message: Callable[[Message], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), **(environment or {})}
        # One thread per worker unless the job says otherwise; OpenMP reads this before torch can be told.
        env.setdefault("OMP_NUM_THREADS", "1")
        interface = interface_of(host)
        if interface is not None:
            env["GLOO_SOCKET_IFNAME"] = interface
        self._log: IO[bytes] = log.open("ab")
        self.page = Page()
        inherited = (theirs.fileno(), self.page.fd)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastic.engine.worker", str(inherited[0]), str(os.getpid()), str(inherited[1])],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=env,
        )
        theirs.close()
        self._channel = Channel(ours)
        self._on_message = on_message
        self._reader = threading.Thread(target=self._read, name=f"worker-{self.process.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: Message) -> bool:
        """``False`` when the worker is gone; its exit is reported through ``on_message``."""
        try:
            self._channel.send(message)
        except OSError:
            return False
        return True

    def _read(self) -> None:
        try:
            for message in self._channel:
                self._on_message(message)
        finally:  # whatever happened to the channel: without it the worker is of no use
            self.process.kill()
            self._on_message({"ev": "exit", "code": self.process.wait()})

    def close(self) -> None:
        """Ends the worker by SIGKILL and waits until it is reaped."""
        self.process.kill()
        self.process.wait()
        self._reader.join(timeout=5)
        self._channel.close()
        self._log.close()
        self.page.close()


class Mailbox:
    """Collects the messages of a worker for a caller that wants to wait for a certain one."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Message] = queue.Queue()

    def __call__(self, message: Message) -> None:
        self._queue.put(message)

    def get(self, timeout_s: float) -> Message:
        """
        Raises:
            queue.Empty: nothing came in time.
        """
        return self._queue.get(timeout=timeout_s)
