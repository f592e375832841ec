"""JSON lines between an agent and its worker, over a socket pair that the worker inherits.

Nobody else can reach the socket, and nothing executable ever crosses it.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
MAX_LINE = 64 * 1024 * 1024


class Channel:
    """One end. Sending is safe from any thread; one thread reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """
        Raises:
            OSError: the other end is gone.
        """
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._sock.sendall(data)

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end closes; a torn last line is dropped."""
        with self._sock.makefile("rb") as lines:
            while True:
                try:
                    line = lines.readline(MAX_LINE)
                except OSError:
                    return
                if not line.endswith(b"\n"):
                    return
                yield json.loads(line)

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end closed first
        self._sock.close()
