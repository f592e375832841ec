"""Writes one writer's part of a checkpoint: packs that the safetensors library can read, and then their index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.layout import Attempt
from checkpoint.manifest import DTYPES, PIECE_BYTES, Entry, Index, Part, Piece, digest
from checkpoint.store import Store

PACK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Item:
    """A tensor to write.

    Attributes:
        dtype: torch's name, such as ``bfloat16``.
        data: its elements in row-major order; must not change until it is written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


@dataclass(frozen=True)
class _Slice:
    """A piece before it has a place: what of which item, and what it is called in the pack."""

    item: Item
    label: str
    dtype: str
    shape: list[int]
    start: int
    data: memoryview


def write_part(store: Store, attempt: Attempt, writer: str, items: Iterable[Item], meta: Mapping[str, Any]) -> Part:
    """Writes the items; they count once a manifest names the part.

    Args:
        writer: unique among the writers of the attempt.
        meta: kept in the index; JSON.

    Raises:
        StoreError: the store refused or did not answer.
        ValueError: two items of one name, an unknown dtype, or data that does not fit the shape.
    """
    # Elements of falling size keep every tensor aligned without gaps, which safetensors refuses.
    ordered = sorted(_checked(items), key=_alignment, reverse=True)
    packs: dict[str, int] = {}
    pieces: dict[str, list[Piece]] = {item.name: [] for item in ordered}
    for slices in _packs(ordered):
        name = attempt.pack(writer, len(packs))
        header = _header(slices)
        offset = len(header)
        for s in slices:
            stop = s.start + s.data.nbytes
            pieces[s.item.name].append(Piece(s.start, stop, digest(s.data), name, offset))
            offset += s.data.nbytes
        store.write(name, header, *(s.data for s in slices))
        packs[name] = offset
    entries = {item.name: Entry(item.dtype, item.shape, tuple(pieces[item.name])) for item in ordered}
    data = Index(writer, packs, entries, dict(meta)).to_bytes()
    index = attempt.index(writer)
    store.write(index, data)
    return Part(writer, index, digest(data), sum(packs.values()) + len(data))


def _checked(items: Iterable[Item]) -> list[Item]:
    found: dict[str, Item] = {}
    for item in items:
        if item.dtype not in DTYPES:
            raise ValueError(f"tensor {item.name!r} has dtype {item.dtype!r}, which a checkpoint cannot hold")
        size = memoryview(item.data).nbytes
        if size != math.prod(item.shape) * DTYPES[item.dtype][0]:
            raise ValueError(f"tensor {item.name!r} of {size} bytes is not {item.dtype} of shape {item.shape}")
        if item.name in found:
            raise ValueError(f"there are two tensors named {item.name!r}")
        found[item.name] = item
    return list(found.values())


def _is_plain(item: Item) -> bool:
    """Whether it is stored as bytes of no dtype."""
    return DTYPES[item.dtype][1] is None or memoryview(item.data).nbytes > PIECE_BYTES


def _alignment(item: Item) -> int:
    return 1 if _is_plain(item) else DTYPES[item.dtype][0]


def _packs(items: list[Item]) -> Iterator[list[_Slice]]:
    pack: list[_Slice] = []
    size = 0
    for item in items:
        for piece in _slices(item):
            if pack and size + piece.data.nbytes > PACK_BYTES:
                yield pack
                pack, size = [], 0
            pack.append(piece)
            size += piece.data.nbytes
    if pack:
        yield pack


def _slices(item: Item) -> Iterator[_Slice]:
    view = memoryview(item.data)
    data = view.cast("B") if view.nbytes else memoryview(b"")  # a view of nothing cannot be cast
    dtype = DTYPES[item.dtype][1]
    if not _is_plain(item) and dtype is not None:
        yield _Slice(item, item.name, dtype, list(item.shape), 0, data)
        return
    for k, start in enumerate(range(0, max(data.nbytes, 1), PIECE_BYTES)):
        piece = data[start : start + PIECE_BYTES]
        label = f"{item.name}#{k}" if data.nbytes > PIECE_BYTES else item.name
        yield _Slice(item, label, "U8", [piece.nbytes], start, piece)


def _header(slices: list[_Slice]) -> bytes:
    """What a safetensors file begins with: the length of a JSON text, and the text."""
    header: dict[str, Any] = {"__metadata__": {}}
    at = 0
    for s in slices:
        label = s.label
        while label in header:  # a tensor may be called like a piece of another
            label += "#"
        header[label] = {"dtype": s.dtype, "shape": s.shape, "data_offsets": [at, at + s.data.nbytes]}
        at += s.data.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
