"""What a worker is doing, on a page of memory that its agent can read even while the worker's interpreter is stuck.

The worker writes whenever it turns from one thing to another; a thread of its own counts up as long as the interpreter
runs. So an agent can tell a worker that hangs from one that only waits for the one that hangs.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Literal

Kind = Literal["waiting", "computing", "storing"]
KINDS: tuple[Kind, ...] = ("waiting", "computing", "storing")
_LAYOUT = struct.Struct("<QdB47s")  # beats, since, kind, what
BEAT_S = 0.1


@dataclass(frozen=True)
class Doing:
    """
    Attributes:
        beats: goes up while the interpreter runs.
        since: seconds of the machine's monotonic clock.
        kind: ``waiting`` for a peer or for orders, ``computing`` by itself, or ``storing``, at the checkpoint store.
        what: such as ``forward pass, microbatch 3``.
    """

    beats: int
    since: float
    kind: Kind
    what: str


class Page:
    """Either end. The file is inherited by the worker: it has no name, and is gone with the last of the two.

    Args:
        fd: of the page to write, in a worker; without it a new one is made.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._file: IO[bytes] | None = None
        if fd is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the page
            self._file.truncate(_LAYOUT.size)
            fd = self._file.fileno()
        self.fd = fd
        self._map = mmap.mmap(fd, _LAYOUT.size)
        self._lock = threading.Lock()  # of the two threads that write
        self._beats = 0
        self._now: tuple[float, Kind, str] = (time.monotonic(), "waiting", "")

    def read(self) -> Doing:
        beats, since, kind, what = _LAYOUT.unpack(self._map[: _LAYOUT.size])
        return Doing(beats, since, KINDS[kind], what.rstrip(b"\0").decode(errors="replace"))

    def write(self, kind: Kind, what: str = "") -> None:
        with self._lock:
            self._now = (time.monotonic(), kind, what)
            self._put()

    def touch(self) -> None:
        """It is still at the same, and moves."""
        _, kind, what = self._now
        self.write(kind, what)

    @contextmanager
    def doing(self, kind: Kind, what: str) -> Iterator[None]:
        """Afterwards it says again what it said before, as of then."""
        _, before, said = self._now
        self.write(kind, what)
        try:
            yield
        finally:
            self.write(before, said)

    def beat(self) -> None:
        """Counts up for ever, in a thread of its own."""
        while True:
            with self._lock:
                self._beats += 1
                self._put()
            time.sleep(BEAT_S)

    def _put(self) -> None:
        since, kind, what = self._now
        self._map[: _LAYOUT.size] = _LAYOUT.pack(self._beats, since, KINDS.index(kind), what.encode()[:47])

    def close(self) -> None:
        self._map.close()
        if self._file is not None:
            self._file.close()
