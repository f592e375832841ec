"""What a checkpoint says about itself: JSON documents, each checked when read.

A *piece* is a range of a tensor's bytes, an *index* lists the pieces that one writer wrote, a *manifest* the indexes
that make up a checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import xxhash

from checkpoint.layout import Attempt

Json = dict[str, Any]
T = TypeVar("T")

FORMAT = 1
PIECE_BYTES = 16 * 2**20
# torch's name → bytes of an element, and what safetensors calls it (None: unknown there, stored as plain bytes)
DTYPES: Mapping[str, tuple[int, str | None]] = {
    "complex128": (16, None),
    "float64": (8, "F64"),
    "int64": (8, "I64"),
    "uint64": (8, "U64"),
    "complex64": (8, "C64"),
    "float32": (4, "F32"),
    "int32": (4, "I32"),
    "uint32": (4, "U32"),
    "complex32": (4, None),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "int16": (2, "I16"),
    "uint16": (2, "U16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, None),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2fnuz": (1, None),
    "int8": (1, "I8"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
}
_SEAL = re.compile(rb',"hash":"([0-9a-f]{32})"}\n')


class Malformed(ValueError):
    """A document is not what was written, or was written by a version that does things another way."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """The hash that all of this package uses: xxh3-128, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class Piece:
    """
    Attributes:
        start, stop: in bytes from the tensor's start.
        hash: of these bytes.
        pack: name of the object they are in.
        offset: where they begin there, in bytes from its start.
    """

    start: int
    stop: int
    hash: str
    pack: str
    offset: int


@dataclass(frozen=True)
class Entry:
    """A tensor.

    Attributes:
        dtype: torch's name, such as ``bfloat16``.
        pieces: in the order of their bytes; one of no bytes if the tensor is empty.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return self.pieces[-1].stop


@dataclass(frozen=True)
class Index:
    """
    Attributes:
        packs: bytes of each pack, by the name of the object.
        entries: by the tensor's name.
        meta: whatever the writer wanted to keep with them; JSON.
    """

    writer: str
    packs: Mapping[str, int]
    entries: Mapping[str, Entry]
    meta: Json = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        number = {name: i for i, name in enumerate(self.packs)}
        entries = {
            name: [e.dtype, e.shape, [[p.start, p.stop, p.hash, number[p.pack], p.offset] for p in e.pieces]]
            for name, e in self.entries.items()
        }
        packs = list(self.packs.items())
        return _dump({"format": FORMAT, "writer": self.writer, "packs": packs, "entries": entries, "meta": self.meta})

    @classmethod
    def from_bytes(cls, data: bytes) -> Index:
        """
        Raises:
            Malformed: it is not an index, or contradicts itself.
        """
        document = _load(data)
        packs = [(_is(str, name), _natural(size)) for name, size in _lists(document["packs"], 2)]
        entries = {}
        for name, (dtype, shape, pieces) in zip(
            _is(dict, document["entries"]), _lists(list(document["entries"].values()), 3), strict=True
        ):
            entries[name] = _entry(name, dtype, shape, pieces, packs)
        return cls(_is(str, document["writer"]), dict(packs), entries, _is(dict, document["meta"]))


@dataclass(frozen=True)
class Part:
    """What one writer wrote for an attempt.

    Attributes:
        index: name of the object with its index.
        hash: of that object.
        bytes: of all its objects.
    """

    writer: str
    index: str
    hash: str
    bytes: int

    def to_json(self) -> Json:
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Part:
        """
        Raises:
            Malformed: something is missing or of another type.
        """
        try:
            writer, index, hash_ = (_is(str, document[key]) for key in ("writer", "index", "hash"))
            return cls(writer, index, hash_, _natural(document["bytes"]))
        except KeyError as error:
            raise Malformed(f"it has no {error}") from None


@dataclass(frozen=True)
class Manifest:
    """
    Attributes:
        created: seconds since 1970.
        meta: whatever the committer wanted to keep with it; JSON.
    """

    attempt: Attempt
    created: float
    parts: tuple[Part, ...]
    meta: Json = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        parts = [part.to_json() for part in self.parts]
        return seal({**self.attempt.__dict__, "created": self.created, "parts": parts, "meta": self.meta})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """
        Raises:
            Malformed: it is not a manifest, or not the one that was written.
        """
        document = unseal(data)
        attempt = Attempt(*(_natural(document[key]) for key in ("generation", "lineage", "step", "decider")))
        parts = tuple(Part.from_json(_is(dict, part)) for part in _is(list, document["parts"]))
        created = document["created"]
        if isinstance(created, bool) or not isinstance(created, int | float):
            raise Malformed(f"created is {created!r}")
        return cls(attempt, created, parts, _is(dict, document["meta"]))


def seal(document: Mapping[str, Any]) -> bytes:
    """A JSON document that carries its own hash."""
    body = _dump({"format": FORMAT, **document})
    return body[:-1] + b',"hash":"%s"}\n' % digest(body).encode()


def unseal(data: bytes) -> Json:
    """
    Raises:
        Malformed: it is not what was sealed.
    """
    document = _load(data)
    match = _SEAL.search(data, max(0, len(data) - 64))
    if match is None or match.end() != len(data) or digest(data[: match.start()] + b"}") != match[1].decode():
        raise Malformed("it does not have the hash it was written with")
    return _Document({key: value for key, value in document.items() if key not in ("format", "hash")})


class _Document(Json):
    def __missing__(self, key: str) -> Any:
        raise Malformed(f"it has no {key!r}")


def _dump(document: Json) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _load(data: bytes) -> Json:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise Malformed(f"it is not JSON: {error}") from None
    version = document.get("format") if isinstance(document, dict) else None
    if version != FORMAT or version is True:
        raise Malformed(f"it has format {version!r} and this version reads format {FORMAT}")
    return _Document(document)


def _entry(name: str, dtype: Any, shape: Any, pieces: Any, packs: list[tuple[str, int]]) -> Entry:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Malformed(f"tensor {name!r} has the unknown dtype {dtype!r}")
    sizes = tuple(_natural(size) for size in _is(list, shape))
    found = []
    at = 0
    for start, stop, hash_, number, offset in _lists(pieces, 5):
        pack, room = packs[_natural(number)] if _natural(number) < len(packs) else ("", -1)
        if _natural(start) != at or _natural(stop) < start or _natural(offset) + stop - start > room:
            raise Malformed(f"the pieces of tensor {name!r} do not fit together")
        found.append(Piece(start, stop, _is(str, hash_), pack, offset))
        at = stop
    if not found or at != math.prod(sizes) * DTYPES[dtype][0]:
        raise Malformed(f"tensor {name!r} of {at} bytes is not {dtype} of shape {sizes}")
    return Entry(dtype, sizes, tuple(found))


def _is(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise Malformed(f"{value!r:.80} is not a {kind.__name__}")
    return value


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Malformed(f"{value!r:.80} is not a natural number")
    return value


def _lists(value: Any, length: int) -> list[list[Any]]:
    rows = _is(list, value)
    if any(not isinstance(row, list) or len(row) != length for row in rows):
        raise Malformed(f"{rows!r:.80} are not lists of {length}")
    return rows
