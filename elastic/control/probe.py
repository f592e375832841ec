"""Whether an agent's process still lives, told by the kernel: its end of an idle TCP connection closes when it dies.

The controller holds one connection to every agent. Nothing is ever sent over it. A closed connection is checked by
connecting again: refused is proof that the process has ended, an answer means that only the connection broke, and
silence proves nothing.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

CONNECT_TIMEOUT_S = 1.0


class ProbeServer:
    """The agent's end: accepts connections and keeps them open as long as the process lives."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, name="probe-server", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._held.append(connection)


class Prober:
    """The controller's end: one connection per agent, watched by one thread.

    Args:
        gone: called from that thread with the address of an agent whose process has ended.
    """

    def __init__(self, gone: Callable[[str], None]) -> None:
        self._gone = gone
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._watched: dict[str, socket.socket] = {}
        self._closed = False
        self._wake, wake = socket.socketpair()
        self._selector.register(wake, selectors.EVENT_READ)
        threading.Thread(target=self._run, args=(wake,), name="prober", daemon=True).start()

    def watch(self, address: str) -> None:
        """Starts to watch an agent, once; an agent that is gone already is reported too."""
        with self._lock:
            if address in self._watched or self._closed:
                return
        threading.Thread(target=self._connect, args=(address,), name="probe", daemon=True).start()

    def _connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:
            self._gone(address)
            return
        except OSError:
            return  # no answer is no proof; the agent's lease decides
        connection.setblocking(False)
        with self._lock:
            if self._closed or address in self._watched:
                connection.close()
                return
            self._watched[address] = connection
            self._selector.register(connection, selectors.EVENT_READ, address)
        with contextlib.suppress(OSError):
            self._wake.send(b"w")  # select() does not see what was registered meanwhile on every platform

    def _run(self, wake: socket.socket) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj is wake:
                    with contextlib.suppress(OSError):
                        wake.recv(4096)
                    continue
                address = key.data
                with self._lock:
                    self._selector.unregister(key.fileobj)
                    self._watched.pop(address).close()
                self.watch(address)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._watched.values():
                connection.close()
