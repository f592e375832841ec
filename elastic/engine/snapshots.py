"""Checkpoints as a worker sees them: it writes its share in the background, and fills layers from one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from checkpoint.layout import Attempt
from checkpoint.reader import Checkpoint, CheckpointError
from checkpoint.store import Store, StoreError
from checkpoint.writer import Item, write_part
from elastic.engine.channel import Message
from elastic.engine.fingerprint import differences
from elastic.engine.layers import LayerState, Version, hash_tensor
from elastic.engine.transfer import Entry, TransferFailed, entries_of, groups_of, install, raw_bytes
from elastic.errors import JobError

Json = dict[str, Any]
CHANGED = "the job's code has changed since; change it back, or start anew with --resume never"
Copied = list[tuple[Entry, Tensor]]


@dataclass(frozen=True)
class Staged:
    """One layer as it was when training went on; ``groups`` are settings of its optimizer."""

    index: int
    name: str
    entries: Copied
    groups: list[Json]


class Damaged(Exception):
    """A checkpoint cannot be restored; ``manifest`` names it, the message says what is wrong."""

    def __init__(self, manifest: str, reason: str) -> None:
        super().__init__(reason)
        self.manifest = manifest


class Snapshots:
    """
    Args:
        writer: names this incarnation among the writers of a checkpoint.
        fingerprint: numeric facts of this process; with exact reduction a checkpoint of others is refused.
        send: hands a message to the agent; from any thread.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        generation: int,
        writer: str,
        fingerprint: Mapping[str, str],
        send: Callable[[Message], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store = Store(url, options)
        self._generation, self._writer, self._fingerprint = generation, writer, dict(fingerprint)
        self._send, self._clock = send, clock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
        self._running: Future[None] | None = None
        self._buffers: dict[tuple[int, str, str], Tensor] = {}  # kept from save to save: their memory is warm
        self._version: Version | None = None  # of the newest save, and the layers in it
        self._indices: set[int] = set()
        self._lock = threading.Lock()
        self._opened: tuple[str, Checkpoint] | None = None

    def save(self, layers: Sequence[LayerState], progress: Json, epoch: int, *, wait: bool) -> None:
        """Copies the layers, all of one version, and has them written while training goes on.

        Saves do not overlap: this one is given up while the one before is still being written, unless it is to
        ``wait`` for that, and then for itself.
        """
        version = layers[0].version if layers else None
        if version is None:
            return
        if version != self._version:
            self._version, self._indices = version, set()
        todo = [layer for layer in layers if layer.index not in self._indices]
        if self._running is not None and not self._running.done():
            if not wait:
                self._failed(version, "the checkpoint before it is still being written")
                return
            self._running.result()
        if todo:
            started = self._clock()
            staged = [self._stage(layer) for layer in todo]
            stall_s = self._clock() - started
            self._indices |= {layer.index for layer in todo}
            self._running = self._pool.submit(self._write, version, staged, progress, epoch, stall_s)
        if wait and self._running is not None:
            self._running.result()

    def _stage(self, layer: LayerState) -> Staged:
        copied = []
        for entry, tensor in entries_of(layer):
            key = (layer.index, entry.path, entry.key)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            buffer.copy_(tensor)
            copied.append((entry, buffer))
        return Staged(layer.index, layer.name, copied, groups_of(layer))

    def _write(self, version: Version, staged: list[Staged], progress: Json, epoch: int, stall_s: float) -> None:
        started = self._clock()
        try:
            layers = {
                str(layer.index): {
                    "name": layer.name,
                    "entries": [entry.__dict__ for entry, _ in layer.entries],
                    "groups": layer.groups,
                    "digest": digest_of(layer.entries),
                }
                for layer in staged
            }
            items = [
                Item(item_name(layer.name, entry), entry.dtype, entry.shape, raw_bytes(tensor))
                for layer in staged
                for entry, tensor in layer.entries
                if entry.number is None
            ]
            meta = {"layers": layers, "progress": progress, "fingerprint": self._fingerprint}
            attempt = Attempt(self._generation, *version)
            writer = f"{self._writer}-{epoch}"
            part = write_part(self._store, attempt, writer, items, meta)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on and the failure is told
            self._failed(version, str(error) or type(error).__name__)
            return
        self._send(
            {
                "ev": "saved",
                "version": version,
                "writer": writer,
                "part": part.to_json(),
                "layers": [layer.index for layer in staged],
                "digests": {layer["name"]: layer["digest"] for layer in layers.values()},
                "bytes": part.bytes,
                "stall_s": stall_s,
                "upload_s": self._clock() - started,
                "progress": progress,
            }
        )

    def _failed(self, version: Version, reason: str) -> None:
        self._send({"ev": "unsaved", "version": version, "writer": self._writer, "reason": reason})

    def restore(self, blank: LayerState, manifest: str, version: Version, exact: bool) -> Json:
        """Fills a freshly built layer; returns how far training was (`Progress` as JSON).

        Raises:
            Damaged: something is missing, or is not what was written.
            TransferFailed: the store did not answer.
            JobError: it was made by other code, or with other numerics than this process has.
        """
        try:
            found = self._open(manifest)
            meta = next((m for m in found.metas().values() if str(blank.index) in m["layers"]), None)
            if meta is None:
                raise JobError(f"the checkpoint has no layer {blank.name!r} of number {blank.index}", CHANGED)
            kept = meta["layers"][str(blank.index)]
            entries = [Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in kept["entries"]]
            data = bytearray().join(
                found.read(item_name(blank.name, entry)) for entry in entries if entry.number is None
            )
        except CheckpointError as error:
            raise Damaged(manifest, str(error)) from error
        except StoreError as error:
            raise TransferFailed(str(error)) from error
        try:
            install(blank, entries, kept["groups"], data)
        except TransferFailed as error:
            raise JobError(str(error), CHANGED) from error
        if blank.digest() != kept["digest"]:
            raise Damaged(manifest, f"layer {blank.name!r} does not have the digest it was saved with")
        other = differences(self._fingerprint, meta["fingerprint"])
        if exact and other:
            raise JobError(
                f"reduction 'exact' cannot go on from a checkpoint with other numerics: {'; '.join(other)}",
                "use the same versions and processors, or start anew with --resume never",
            )
        blank.version = version
        progress: Json = meta["progress"]
        return progress

    def _open(self, manifest: str) -> Checkpoint:
        with self._lock:  # layers are restored side by side
            if self._opened is None or self._opened[0] != manifest:
                self._opened = (manifest, Checkpoint.open(self._store, Attempt.parse(manifest)))
            return self._opened[1]


def item_name(layer: str, entry: Entry) -> str:
    """What a tensor is called in a checkpoint: ``layer/path``, and ``layer/path@key`` for optimizer state."""
    return f"{layer}/{entry.path}" + (f"@{entry.key}" if entry.key else "")


def digest_of(entries: Copied) -> str:
    """`LayerState.digest` of a copy."""
    h = xxhash.xxh3_128()
    for entry, tensor in entries:
        value = tensor if entry.number is None else torch.tensor(entry.number)
        hash_tensor(h, f"{entry.path}/{entry.key}" if entry.key else entry.path, value)
    return h.hexdigest()
