"""Reads a committed checkpoint. Every byte is checked against the hash it was written with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from checkpoint.layout import Attempt
from checkpoint.manifest import Entry, Index, Json, Malformed, Manifest, Part, Piece, digest
from checkpoint.store import Store

REQUEST_BYTES = 32 * 2**20
INDEX_READERS = 8

Named = tuple[str, Entry]


class CheckpointError(Exception):
    """A checkpoint cannot be used.

    Args:
        message: names the checkpoint and what is wrong with it.
        hint: what to do about it; may be empty.
    """

    code = "checkpoint"
    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Absent(CheckpointError):
    """There is none."""

    code = "absent"
    exit_code = 4


class Incomplete(CheckpointError):
    """An object that belongs to it is missing."""

    code = "incomplete"
    exit_code = 5


class Corrupt(CheckpointError):
    """Something in it is not what was written."""

    code = "corrupt"
    exit_code = 6


OTHER = "start from another checkpoint"


class Checkpoint:
    """Made by `open`; may be used from several threads."""

    def __init__(self, store: Store, manifest: Manifest, indexes: Sequence[Index]) -> None:
        self.manifest = manifest
        self.indexes = tuple(indexes)
        self._store = store
        self._entries: dict[str, Entry] = {}
        for index in indexes:
            for name, entry in index.entries.items():
                # Writers that hold the same tensor may both have saved it.
                known = self._entries.setdefault(name, entry)
                if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                    raise Corrupt(f"{self._where}: tensor {name!r} is there twice, with other dtypes or shapes", OTHER)

    @classmethod
    def open(cls, store: Store, attempt: Attempt) -> Checkpoint:
        """Reads the manifest and the indexes, none of the tensors.

        Raises:
            Absent, Incomplete, Corrupt: see there.
            StoreError: the store did not answer.
        """
        manifest = read_manifest(store, attempt)
        return cls(store, manifest, read_indexes(store, manifest.parts))

    @property
    def meta(self) -> Json:
        """What the committer kept with it."""
        return self.manifest.meta

    def metas(self) -> dict[str, Json]:
        """What each writer kept with its part."""
        return {index.writer: index.meta for index in self.indexes}

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._entries)

    def entry(self, name: str) -> Entry:
        """
        Raises:
            Absent: there is no tensor of that name.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise Absent(f"{self._where} has no tensor {name!r}") from None

    def read(self, name: str) -> bytearray:
        """The bytes of a tensor, in row-major order.

        Raises:
            Absent: there is no tensor of that name.
            Incomplete, Corrupt: its pack is missing, or not what was written.
            StoreError: the store did not answer.
        """
        return self._fetch([(name, self.entry(name))])[0][1]

    def read_many(self, names: Iterable[str], threads: int = 4) -> Iterator[tuple[str, bytearray]]:
        """Tensors in the order in which they are stored, one request of 32 MiB, or one larger
        tensor, per thread ahead of the caller.

        Raises:
            as `read`.
        """
        return self._stream([(name, self.entry(name)) for name in dict.fromkeys(names)], threads)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads and checks everything.

        Args:
            progress: called with the bytes checked and the bytes in all.

        Raises:
            Incomplete, Corrupt: a pack is missing, or not what was written.
            StoreError: the store did not answer.
        """
        entries = [named for index in self.indexes for named in index.entries.items()]
        total = sum(entry.bytes for _, entry in entries)
        done = 0
        for _, data in self._stream(entries, 4):
            done += len(data)
            if progress:
                progress(done, total)

    @property
    def _where(self) -> str:
        return f"{self._store.url}/{self.manifest.attempt.manifest}"

    def _stream(self, entries: list[Named], threads: int) -> Iterator[tuple[str, bytearray]]:
        running: deque[Future[list[tuple[str, bytearray]]]] = deque()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read")
        try:
            for group in _groups(entries):
                running.append(pool.submit(self._fetch, group))
                if len(running) > threads:
                    yield from running.popleft().result()
            while running:
                yield from running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _fetch(self, entries: list[Named]) -> list[tuple[str, bytearray]]:
        out = [(name, bytearray(entry.bytes)) for name, entry in entries]
        pieces = [(piece, i) for i, (_, entry) in enumerate(entries) for piece in entry.pieces]
        pieces.sort(key=lambda found: (found[0].pack, found[0].offset))
        for run in _runs(pieces):
            first, last = run[0][0], run[-1][0]
            data = self._store.read_range(first.pack, first.offset, last.offset + last.stop - last.start)
            if data is None:
                lost = out[run[0][1]][0]
                raise Incomplete(f"{self._where}: {first.pack} is missing, and with it tensor {lost!r}", OTHER)
            view = memoryview(data)
            for piece, i in run:
                name, buffer = out[i]
                at = piece.offset - first.offset
                found = view[at : at + piece.stop - piece.start]
                if digest(found) != piece.hash:
                    what = f"bytes {piece.start} to {piece.stop} of tensor {name!r}, in {piece.pack},"
                    raise Corrupt(f"{self._where}: {what} are not what was written", OTHER)
                buffer[piece.start : piece.stop] = found
        return out


def read_manifest(store: Store, attempt: Attempt) -> Manifest:
    """
    Raises:
        Absent: the attempt is not committed.
        Corrupt: its manifest is not what was written.
        StoreError: the store did not answer.
    """
    data = store.read(attempt.manifest)
    where = f"{store.url}/{attempt.manifest}"
    if data is None:
        raise Absent(f"there is no checkpoint {where}", OTHER)
    try:
        manifest = Manifest.from_bytes(data)
    except Malformed as error:
        raise Corrupt(f"{where} cannot be used: {error}", OTHER) from error
    if manifest.attempt != attempt:
        raise Corrupt(f"{where} is the manifest of another attempt, {manifest.attempt.manifest}", OTHER)
    return manifest


def read_indexes(store: Store, parts: Sequence[Part]) -> list[Index]:
    """The indexes of the parts.

    Raises:
        Incomplete, Corrupt: one is missing, or not what was written.
        StoreError: the store did not answer.
    """

    def read(part: Part) -> Index:
        data = store.read(part.index)
        if data is None:
            raise Incomplete(f"{store.url}/{part.index} is missing", OTHER)
        if digest(data) != part.hash:
            raise Corrupt(f"{store.url}/{part.index} is not what was written", OTHER)
        try:
            return Index.from_bytes(data)
        except Malformed as error:
            raise Corrupt(f"{store.url}/{part.index} cannot be used: {error}", OTHER) from error

    with ThreadPoolExecutor(INDEX_READERS, thread_name_prefix="checkpoint-read") as pool:
        return list(pool.map(read, parts))


def _groups(entries: list[Named]) -> Iterator[list[Named]]:
    """Neighbours, so many that one request brings them."""
    group: list[Named] = []
    size = 0
    for named in sorted(entries, key=lambda named: (named[1].pieces[0].pack, named[1].pieces[0].offset)):
        if group and size + named[1].bytes > REQUEST_BYTES:
            yield group
            group, size = [], 0
        group.append(named)
        size += named[1].bytes
    if group:
        yield group


def _runs(pieces: list[tuple[Piece, int]]) -> Iterator[list[tuple[Piece, int]]]:
    """Pieces that follow each other in a pack, so many that one request brings them."""
    run: list[tuple[Piece, int]] = []
    begin, end = ("", 0), ("", 0)
    for found in pieces:
        piece = found[0]
        size = piece.stop - piece.start
        if run and ((piece.pack, piece.offset) != end or end[1] + size - begin[1] > REQUEST_BYTES):
            yield run
            run = []
        if not run:
            begin = (piece.pack, piece.offset)
        run.append(found)
        end = (piece.pack, piece.offset + size)
    if run:
        yield run
