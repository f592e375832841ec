import json
import random

import pytest

from checkpoint.layout import Attempt
from checkpoint.manifest import Entry, Index, Malformed, Manifest, Part, Piece, seal, unseal

ATTEMPT = Attempt(1, 2, 300, 4)
MANIFEST = Manifest(ATTEMPT, 1700000000.25, (Part("w-1", ATTEMPT.index("w-1"), "0" * 32, 77),), {"loss": 1.5, "é": []})
PACK = ATTEMPT.pack("w-1", 0)
INDEX = Index(
    "w-1",
    {PACK: 1000},
    {
        "layer 0/weight.ü": Entry("float32", (2, 3), (Piece(0, 16, "a", PACK, 100), Piece(16, 24, "b", PACK, 116))),
        "scalar": Entry("bool", (), (Piece(0, 1, "c", PACK, 999),)),
        "empty": Entry("float64", (0, 7), (Piece(0, 0, "d", PACK, 1000),)),
    },
    {"layers": {"0": 1}},
)


def test_documents_round_trip():
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert Index.from_bytes(INDEX.to_bytes()) == INDEX
    assert Part.from_json(json.loads(json.dumps(MANIFEST.parts[0].to_json()))) == MANIFEST.parts[0]
    assert unseal(seal({"a": 1})) == {"a": 1}
    assert json.loads(MANIFEST.to_bytes())["format"] == 1


def test_any_flipped_bit_of_a_manifest_is_noticed():
    data = MANIFEST.to_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Malformed):
            Manifest.from_bytes(bytes(flipped))
    for length in range(len(data)):
        with pytest.raises(Malformed):
            Manifest.from_bytes(data[:length])


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_format_is_named(version):
    document = json.dumps({**json.loads(MANIFEST.to_bytes()), "format": version}).encode()
    for read in (Manifest.from_bytes, Index.from_bytes):
        with pytest.raises(Malformed, match="reads format 1"):
            read(document)


def test_sealed_documents_of_another_kind_are_refused():
    for document in ({}, {**ATTEMPT.__dict__, "created": "now", "parts": [], "meta": {}}, {"generation": -1}):
        with pytest.raises(Malformed):
            Manifest.from_bytes(seal(document))
    with pytest.raises(Malformed, match="hash"):
        Part.from_json({"writer": "w", "index": "i", "bytes": 1})


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (["float32", [2], []], "not float32"),
        (["float32", [2], [[0, 4, "a", 0, 0]]], "not float32"),
        (["float32", [1], [[4, 8, "a", 0, 0]]], "fit together"),
        (["float32", [1], [[0, 4, "a", 0, 997]]], "fit together"),
        (["float32", [1], [[0, 4, "a", 1, 0]]], "fit together"),
        (["float32", [-1], [[0, 4, "a", 0, 0]]], "natural"),
        ([["float32"], [1], [[0, 4, "a", 0, 0]]], "unknown dtype"),
        (["float33", [1], [[0, 4, "a", 0, 0]]], "unknown dtype"),
        (["float32", [1], [[0, 4, 7, 0, 0]]], "not a str"),
        (["float32", [1]], "lists of 3"),
        ("float32", "lists of 3"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(entry, why):
    document = {**json.loads(INDEX.to_bytes()), "entries": {"x": entry}}
    with pytest.raises(Malformed, match=why):
        Index.from_bytes(json.dumps(document).encode())


def test_documents_out_of_nothing_are_malformed(seed):
    draw = random.Random(seed)
    data = INDEX.to_bytes()
    for _ in range(300):
        garbled = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            garbled[draw.randrange(len(garbled))] = draw.randrange(256)
        try:
            Index.from_bytes(bytes(garbled))
        except Malformed:
            pass
