"""Parts written to every kind of store, and read back."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from safetensors.torch import load

from checkpoint import reader, writer
from checkpoint.commit import commit
from checkpoint.layout import Attempt
from checkpoint.manifest import PIECE_BYTES, Index
from checkpoint.reader import Absent, Checkpoint, Corrupt, Incomplete
from checkpoint.store import Store
from checkpoint.writer import Item, write_part

ATTEMPT = Attempt(1, 0, 100, 1)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]

PLAIN = (torch.complex32, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e8m0fnu)  # unknown to safetensors

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def item(name, tensor):
    flat = tensor.contiguous().reshape(-1)
    data = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    return Item(name, name_of(tensor.dtype), tuple(tensor.shape), data)


def tensors(seed):
    """Every dtype as a matrix, a scalar and an empty one, with awkward names and sizes."""
    draw = random.Random(seed)
    found = {}
    for dtype in DTYPES:
        size = dtype.itemsize
        for shape in [(3, 5), (), (0, 4), (draw.randrange(1, 40),)]:
            count = torch.Size(shape).numel()
            raw = bytes(
                draw.choice((0, 1)) if dtype == torch.bool else draw.randrange(256) for _ in range(count * size)
            )
            tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            found[f"a.b/{name_of(dtype)} é/{shape}#0"] = tensor.reshape(shape)
    return found


def raw(tensor):
    return bytes(item("", tensor).data)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def save(store, given, attempt=ATTEMPT, writers=("w",), meta=None):
    names = list(given)
    parts = [
        write_part(store, attempt, w, [item(n, given[n]) for n in names[i :: len(writers)]], {"writer": w})
        for i, w in enumerate(writers)
    ]
    return commit(store, attempt, parts, meta or {}, 1.5)


def flip(store, name, seed, low=0, high=None):
    data = bytearray(store.read(name))
    bit = random.Random(seed).randrange(low * 8, (high or len(data)) * 8)
    data[bit // 8] ^= 1 << bit % 8
    store.write(name, bytes(data))
    return bit // 8


@pytest.mark.scenario
def test_28_every_dtype_and_shape_comes_back(store, seed):
    given = tensors(seed)
    manifest = save(store, given, writers=("w-0", "w-1"), meta={"loss": 0.5})
    opened = Checkpoint.open(store, ATTEMPT)
    assert opened.meta == {"loss": 0.5}
    assert opened.metas() == {"w-0": {"writer": "w-0"}, "w-1": {"writer": "w-1"}}
    assert sorted(opened.names()) == sorted(given)
    assert sum(store.sizes(ATTEMPT.folder).values()) == manifest.total_bytes
    read = dict(opened.read_many(opened.names()))
    for name, tensor in given.items():
        entry = opened.entry(name)
        assert (entry.dtype, entry.shape) == (name_of(tensor.dtype), tuple(tensor.shape))
        assert read[name] == raw(tensor)
    some = random.Random(seed).choice(list(given))
    assert opened.read(some) == raw(given[some])
    opened.verify()


def test_packs_open_with_the_safetensors_library(store, seed):
    given = tensors(seed)
    given["big"] = torch.arange(PIECE_BYTES // 4 + 1000, dtype=torch.float32)
    given["big#1"] = torch.ones(3)
    given["__metadata__"] = torch.zeros(2)
    save(store, given)
    found = load(store.read(ATTEMPT.pack("w", 0)))
    assert raw(torch.cat([found.pop("big#0"), found.pop("big#1#")])) == raw(given.pop("big"))
    assert same(found.pop("__metadata__#"), given.pop("__metadata__"))
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        plain = tensor.dtype in PLAIN
        assert raw(found[name]) == raw(tensor) if plain else same(found[name], tensor)


def test_large_tensors_are_split_and_packs_are_bounded(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(writer, "PIECE_BYTES", 100)
    monkeypatch.setattr(writer, "PACK_BYTES", 250)
    monkeypatch.setattr(reader, "REQUEST_BYTES", 150)
    store = Store(str(tmp_path))
    given = {**tensors(seed), "long": torch.arange(300), "exact": torch.zeros(100, dtype=torch.uint8)}
    save(store, given)
    opened = Checkpoint.open(store, ATTEMPT)
    assert dict(opened.read_many(given, threads=2)).keys() == given.keys()
    assert len(opened.entry("long").pieces) == 24
    assert len(opened.entry("exact").pieces) == 1
    index = Index.from_bytes(store.read(ATTEMPT.index("w")))
    assert len(index.packs) > 10
    for pack, size in index.packs.items():
        assert size == len(store.read(pack))
        assert sum(t.nbytes for t in load(store.read(pack)).values()) <= 250
    for name, data in opened.read_many(given):
        assert data == raw(given[name])
    reads = []
    opened.verify(lambda done, total: reads.append((done, total)))
    assert reads[-1][0] == reads[-1][1] == sum(t.nbytes for t in given.values())


def test_neighbours_are_read_in_one_request(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    save(store, {f"t{i}": torch.full((10,), i) for i in range(100)})
    opened = Checkpoint.open(store, ATTEMPT)
    requests = []
    read_range = store.read_range
    monkeypatch.setattr(store, "read_range", lambda *args: requests.append(args) or read_range(*args))
    assert len(list(opened.read_many(opened.names()))) == 100
    assert len(requests) == 1
    opened.read("t5")
    assert requests[1][2] - requests[1][1] == 80


def test_nothing_at_all_is_a_checkpoint_too(store):
    save(store, {})
    opened = Checkpoint.open(store, ATTEMPT)
    assert opened.names() == []
    opened.verify()


@pytest.mark.scenario
def test_22_a_flipped_bit_in_a_pack_is_found_and_the_tensor_named(store, seed):
    given = {f"t{i}": torch.full((50,), float(i)) for i in range(20)}
    save(store, given)
    pack = ATTEMPT.pack("w", 0)
    opened = Checkpoint.open(store, ATTEMPT)
    start = min(opened.entry(name).pieces[0].offset for name in given)
    byte = flip(store, pack, seed, low=start)
    hit = next(n for n in given if 0 <= byte - opened.entry(n).pieces[0].offset < 200)
    opened = Checkpoint.open(store, ATTEMPT)
    for call in (lambda: opened.read(hit), opened.verify, lambda: list(opened.read_many(given))):
        with pytest.raises(Corrupt, match=f"tensor '{hit}'"):
            call()
    for name in given.keys() - {hit}:
        assert opened.read(name) == raw(given[name])


@pytest.mark.scenario
def test_22_a_flipped_bit_in_an_index_or_manifest_is_found(store, seed):
    save(store, {"t": torch.zeros(5)})
    for name in (ATTEMPT.index("w"), ATTEMPT.manifest):
        before = store.read(name)
        flip(store, name, seed)
        with pytest.raises(Corrupt):
            Checkpoint.open(store, ATTEMPT)
        store.write(name, before)
        Checkpoint.open(store, ATTEMPT).verify()


@pytest.mark.scenario
def test_22_what_is_truncated_empty_or_missing_is_found(store):
    save(store, {"t": torch.zeros(500)})
    pack, index = ATTEMPT.pack("w", 0), ATTEMPT.index("w")
    whole = store.read(pack)
    for data in (whole[:-1], whole[:50], b""):
        store.write(pack, data)
        with pytest.raises(Corrupt, match="tensor 't'"):
            Checkpoint.open(store, ATTEMPT).verify()
    store.delete(pack)
    with pytest.raises(Incomplete, match=f"{pack} is missing, and with it tensor 't'"):
        Checkpoint.open(store, ATTEMPT).verify()
    store.write(index, b"")
    with pytest.raises(Corrupt, match=index):
        Checkpoint.open(store, ATTEMPT)
    store.delete(index)
    with pytest.raises(Incomplete, match=index):
        Checkpoint.open(store, ATTEMPT)
    store.write(ATTEMPT.manifest, b"")
    with pytest.raises(Corrupt):
        Checkpoint.open(store, ATTEMPT)
    store.delete(ATTEMPT.manifest)
    with pytest.raises(Absent):
        Checkpoint.open(store, ATTEMPT)


def test_a_manifest_under_another_name_is_refused(tmp_path):
    store = Store(str(tmp_path))
    save(store, {})
    other = Attempt(1, 0, 200, 1)
    store.write(other.manifest, store.read(ATTEMPT.manifest))
    with pytest.raises(Corrupt, match="another attempt"):
        Checkpoint.open(store, other)


def test_two_writers_may_hold_the_same_tensor_but_not_two_of_a_name(tmp_path):
    store = Store(str(tmp_path))
    parts = [write_part(store, ATTEMPT, w, [item("t", torch.ones(3))], {}) for w in "ab"]
    commit(store, ATTEMPT, parts, {}, 0)
    opened = Checkpoint.open(store, ATTEMPT)
    assert opened.read("t") == raw(torch.ones(3))
    opened.verify()
    other = Attempt(1, 0, 200, 1)
    parts = [write_part(store, other, w, [item("t", torch.ones(n))], {}) for n, w in enumerate("ab")]
    commit(store, other, parts, {}, 0)
    with pytest.raises(Corrupt, match="twice"):
        Checkpoint.open(store, other)


def test_an_unknown_tensor_is_absent(tmp_path):
    store = Store(str(tmp_path))
    save(store, {})
    opened = Checkpoint.open(store, ATTEMPT)
    with pytest.raises(Absent, match="no tensor 'x'"):
        opened.read("x")


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([Item("x", "float32", (2,), b"1234")], "4 bytes is not float32"),
        ([Item("x", "quint8", (1,), b"1")], "'quint8'"),
        ([Item("x", "uint8", (1,), b"1"), Item("x", "uint8", (1,), b"2")], "two tensors named 'x'"),
    ],
)
def test_items_that_make_no_sense_are_refused(items, why, tmp_path):
    store = Store(str(tmp_path))
    with pytest.raises(ValueError, match=why):
        write_part(store, ATTEMPT, "w", items, {})
    assert store.list("") == []


@pytest.mark.scenario
def test_34_a_checkpoint_that_was_copied_elsewhere_restores(tmp_path, moto, seed):
    given = tensors(seed)
    here = Store(str(tmp_path))
    save(here, given)
    there = Store("s3://bucket/copied", moto)
    for name in here.list(""):
        there.write(name, here.read(name))
    opened = Checkpoint.open(there, ATTEMPT)
    assert all(data == raw(given[name]) for name, data in opened.read_many(given))


def test_readers_that_stop_early_leave_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "REQUEST_BYTES", 1)
    store = Store(str(tmp_path))
    save(store, {f"t{i}": torch.ones(3) for i in range(50)})
    opened = Checkpoint.open(store, ATTEMPT)
    stream = opened.read_many(opened.names(), threads=2)
    next(stream)
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint-read")]
