"""Layers from holder to reader over loopback: what arrives is what was held, or nothing is installed."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import threading
import time

import pytest
import torch
from torch import nn

import elastic
from elastic.engine import transfer
from elastic.engine.gate import Superseded
from elastic.engine.layers import build_layer
from elastic.engine.stage import ALIGNMENT
from elastic.engine.transfer import LayerServer, TransferFailed, fetch_layer

SECRET = "a secret"
PROGRESS = {"step": 3, "exponents": [44], "ledger": {"samples": 48, "lost": 0, "repeated": 0}, "recent": []}
VERSION = (0, 3, 0)
EPOCH = 2
PATIENCE_S = 20.0


class One:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return torch.zeros(2), torch.zeros(2)


class Odd(nn.Module):
    """Parameters of odd sizes, none, one that is not contiguous, a bf16 parameter that is frozen, and buffers."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.coarse = nn.Parameter(torch.randn(7).to(torch.bfloat16), requires_grad=False)
        self.flat = nn.Parameter(torch.randn(13))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scale", torch.full((3,), 0.5, dtype=torch.bfloat16))


class Counted(torch.optim.Optimizer):
    """Keeps numbers in its state, as older optimizers do."""

    def __init__(self, named):
        super().__init__([p for _, p in named], {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["decay"] = state.get("decay", 0.1) * 0.9
                p -= p.grad * (group["lr"] * (1 - 0.9 ** state["step"]) * (1 + state["decay"]))


def adamw(named):
    return torch.optim.AdamW(named, lr=1e-2)


OPTIMIZERS = {
    "adamw": adamw,
    "amsgrad": lambda named: torch.optim.AdamW(named, amsgrad=True),
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-2),
    "momentum": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda named: torch.optim.NAdam(named),
    "adafactor": lambda named: torch.optim.Adafactor(named),
    "groups": lambda named: torch.optim.AdamW(
        [{"params": [p for n, p in named if n == "bias"], "lr": 1e-3}, {"params": [p for n, p in named if n != "bias"]}]
    ),
}


def job_of(*layers, optimizer=adamw):
    return elastic.Job(list(layers), lambda output, target: (output.sum(), 1), One(), optimizer)


def linear_job(optimizer=adamw):
    return job_of(elastic.Layer("a", lambda: nn.Linear(37, 11)), optimizer=optimizer)


def advance(layer, steps, seed=1):
    made = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for _, parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=made)
        for group in layer.optimizer.param_groups if layer.optimizer else []:
            group["lr"] *= 0.9
        if layer.optimizer:
            layer.optimizer.step()


def trained(job, index=0, steps=3):
    layer = build_layer(job, index, seed=5)
    advance(layer, steps)
    layer.version = VERSION
    return layer


def find_in(*layers):
    held = {layer.index: layer for layer in layers}

    def find(index, version, epoch):
        layer = held.get(index)
        return (layer, PROGRESS) if layer is not None and version in (None, layer.version) else None

    return find


def serve(*layers):
    return LayerServer("127.0.0.1", SECRET, find_in(*layers)).address


def fetch(blank, sources, version=VERSION, secret=SECRET, patience_s=PATIENCE_S, superseded=None):
    return fetch_layer(blank, version, EPOCH, sources, secret, patience_s, superseded or threading.Event())


def blank_of(job, index=0):
    return build_layer(job, index, seed=5)


def everything(layer):
    """All of a layer that matters, as bytes and plain values."""
    groups = layer.optimizer.param_groups if layer.optimizer else []
    plain = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return layer.digest(), json.dumps(plain, default=str)


class Proxy:
    """Between a reader and a holder. ``change(connection number, offset, data)`` gets what the holder sends and returns
    what arrives, or ``None`` to hang up."""

    def __init__(self, target, change):
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed = []  # bytes per connection
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            self.passed.append(0)
            threading.Thread(target=self._serve, args=(reader, len(self.passed) - 1), daemon=True).start()

    def _serve(self, reader, number):
        host, _, port = self._target.rpartition(":")
        with reader, socket.create_connection((host, int(port))) as holder:
            threading.Thread(target=self._ask, args=(reader, holder), daemon=True).start()
            with contextlib.suppress(OSError):
                while data := holder.recv(4096):
                    data = self._change(number, self.passed[number], data)
                    if data is None:
                        break
                    self.passed[number] += len(data)
                    reader.sendall(data)
            for end in (reader, holder):  # closing alone says nothing while the other thread still reads
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _ask(reader, holder):
        with contextlib.suppress(OSError):
            while data := reader.recv(4096):
                holder.sendall(data)

    def close(self):
        self._listener.close()


@pytest.fixture
def proxy():
    made = []

    def make(target, change=lambda number, offset, data: data):
        made.append(Proxy(target, change))
        return made[-1]

    yield make
    for one in made:
        one.close()


# What arrives


@pytest.mark.parametrize("holders", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_arrives_and_goes_on_bit_for_bit(name, holders):
    job = linear_job(OPTIMIZERS[name])
    original = trained(job)
    sources = [serve(copy.deepcopy(original)) for _ in range(holders)]
    blank = blank_of(job)
    assert blank.digest() != original.digest()
    layer, progress = fetch(blank, sources)
    assert layer is blank
    assert progress == PROGRESS
    assert layer.version == VERSION
    assert everything(layer) == everything(original)
    for _ in range(3):
        for one in (original, layer):
            advance(one, 1, seed=9)
        assert everything(layer) == everything(original)


def test_numbers_in_the_optimizer_state_stay_numbers():
    job = linear_job(Counted)
    original = trained(job)
    layer, _ = fetch(blank_of(job), [serve(original)])
    assert everything(layer) == everything(original)
    for one in (original, layer):
        advance(one, 3, seed=9)
    assert everything(layer) == everything(original)
    state = layer.optimizer.state[layer.module.weight]
    assert {key: type(value) for key, value in state.items()} == {"step": int, "decay": float}


@pytest.mark.parametrize("steps", [0, 2])
def test_odd_parameters_and_buffers(steps):
    job = job_of(elastic.Layer("odd", Odd))
    original = trained(job, steps=steps)
    layer, _ = fetch(blank_of(job), [serve(original), serve(copy.deepcopy(original)), serve(original)])
    assert everything(layer) == everything(original)
    assert layer.module.coarse.dtype == torch.bfloat16
    assert torch.equal(layer.module.coarse, original.module.coarse)
    assert layer.module.turned.stride() == original.module.turned.stride()
    for (name, ours), (_, theirs) in zip(layer.module.named_buffers(), original.module.named_buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    for one in (original, layer):
        advance(one, 3, seed=9)
    assert everything(layer) == everything(original)


def test_tied_layers_arrive_with_equal_weights():
    job = job_of(
        elastic.Layer("a", lambda: nn.Linear(4, 4)), elastic.Layer("b", lambda: nn.Linear(4, 4), {"weight": "a.weight"})
    )
    held = [trained(job, 0), trained(job, 1)]
    with torch.no_grad():
        held[1].module.weight.copy_(held[0].module.weight)
    source = serve(*held)
    got = [fetch(blank_of(job, i), [source])[0] for i in range(2)]
    assert torch.equal(got[0].module.weight, got[1].module.weight)
    assert [layer.digest() for layer in got] == [layer.digest() for layer in held]


@pytest.mark.parametrize("holders", [1, 3])
def test_a_layer_without_parameters(holders):
    job = job_of(elastic.Layer("act", nn.Tanh))
    original = trained(job)
    layer, progress = fetch(blank_of(job), [serve(original) for _ in range(holders)])
    assert (layer.version, progress) == (VERSION, PROGRESS)
    assert layer.optimizer is None


def test_the_state_lies_in_memory_as_a_new_tensor_would():
    # An optimizer that multiplies matrices of its state gives other bits on other alignments.
    job = linear_job()
    layer, _ = fetch(blank_of(job), [serve(trained(job))])
    for state in layer.optimizer.state.values():
        for key, value in state.items():
            assert value.data_ptr() % ALIGNMENT == 0, key


def test_no_two_tensors_share_memory():
    job = linear_job()
    original = trained(job)
    layer, _ = fetch(blank_of(job), [serve(original)])
    ours = {value.data_ptr() for state in layer.optimizer.state.values() for value in state.values()}
    theirs = {value.data_ptr() for state in original.optimizer.state.values() for value in state.values()}
    assert len(ours) == 6
    assert not ours & theirs


def test_the_holder_says_the_version_when_the_reader_does_not_know_it():
    job = linear_job()
    layer, _ = fetch(blank_of(job), [serve(trained(job))], version=None)
    assert layer.version == VERSION


def test_every_holder_gives_its_part(proxy):
    job = job_of(elastic.Layer("a", lambda: nn.Linear(200, 150)))
    original = trained(job)
    proxies = [proxy(serve(original)) for _ in range(3)]
    layer, _ = fetch(blank_of(job), [one.address for one in proxies])
    assert layer.digest() == original.digest()
    total = 3 * 4 * (200 * 150 + 150) + 2 * 4  # parameters and two moments, two step counters
    parts = [max(one.passed) for one in proxies]
    assert all(len(one.passed) == 2 for one in proxies)  # once for the head, once for the bytes
    assert all(abs(part - total / 3) < 1000 for part in parts), (parts, total)


def test_many_readers_at_once():
    job = linear_job()
    original = trained(job)
    sources = [serve(original), serve(copy.deepcopy(original))]
    digests = []
    threads = [
        threading.Thread(target=lambda: digests.append(fetch(blank_of(job), sources)[0].digest())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert digests == [original.digest()] * 8


# What does not


def failed(job, sources, index=0, **options):
    """The message of the failure; the blank layer has no version that anybody could take for held."""
    blank = blank_of(job, index)
    blank.version = None
    started = time.monotonic()
    with pytest.raises(TransferFailed) as caught:
        fetch(blank, sources, **options)
    assert blank.version is None
    return str(caught.value), time.monotonic() - started


def test_holders_that_disagree_are_named_with_the_layer():
    job = linear_job()
    one, other = trained(job), trained(job)
    with torch.no_grad():
        other.module.bias[3] += 1e-3
    sources = [serve(one), serve(other)]
    message, _ = failed(job, sources)
    assert "'a'" in message
    assert all(source in message for source in sources)


def test_holders_with_other_learning_rates_disagree():
    job = linear_job()
    one, other = trained(job), trained(job)
    other.optimizer.param_groups[0]["lr"] *= 2
    assert "disagree" in failed(job, [serve(one), serve(other)])[0]


def test_holders_of_other_versions_disagree():
    job = linear_job()
    one, other = trained(job), trained(job)
    other.version = (0, 2, 0)
    assert "disagree" in failed(job, [serve(one), serve(other)], version=None)[0]


def test_a_wrong_secret_gets_nothing(proxy):
    job = linear_job()
    between = proxy(serve(trained(job)))
    for secret in ("another secret", "", SECRET[:-1], SECRET + "x"):
        _, seconds = failed(job, [between.address], secret=secret)
        assert seconds < 5.0
    assert between.passed == [0] * 4


def test_a_holder_that_is_not_there():
    job = linear_job()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    message, seconds = failed(job, [address])
    assert address in message
    assert seconds < 5.0


def test_a_layer_that_is_not_held_is_refused_after_the_patience():
    job = linear_job()
    started = time.monotonic()
    message, _ = failed(job, [serve(trained(job))], version=(1, 3, 0), patience_s=0.3)
    assert "not held" in message
    assert 0.3 <= time.monotonic() - started < 5.0


@pytest.mark.parametrize(("request_number", "after"), [(0, 0), (0, 5), (1, 0), (1, 5), (1, 40_000)])
def test_a_holder_that_dies_in_mid_stream(request_number, after, proxy):
    job = job_of(elastic.Layer("a", lambda: nn.Linear(200, 150)))

    def die(number, offset, data):
        if number != request_number:
            return data
        return data[: after - offset] or None

    between = proxy(serve(trained(job)), die)
    message, seconds = failed(job, [between.address])
    assert between.address in message
    assert seconds < 5.0


def test_one_of_three_holders_dies(proxy):
    job = job_of(elastic.Layer("a", lambda: nn.Linear(200, 150)))
    original = trained(job)
    between = proxy(
        serve(original), lambda number, offset, data: data if number == 0 else data[: 9000 - offset] or None
    )
    sources = [serve(original), between.address, serve(original)]
    message, seconds = failed(job, sources)
    assert between.address in message
    assert seconds < 5.0
    # the same blank could be tried again without it
    assert fetch(blank_of(job), [sources[0], sources[2]])[0].digest() == original.digest()


def test_a_layer_of_another_shape_is_not_installed():
    source = serve(trained(linear_job()))
    other = job_of(elastic.Layer("a", lambda: nn.Linear(37, 12)))
    assert "'a'" in failed(other, [source])[0]


@pytest.mark.parametrize("flips", [1, 2])
def test_a_bit_flipped_in_a_layer_on_the_wire_is_seen(flips, proxy, seed):
    job = linear_job()
    original = trained(job)
    draw = random.Random(seed)
    total = 3 * 4 * (37 * 11 + 11) + 2 * 4
    first = len(transfer._line({}))
    for _ in range(15):
        places = {draw.randrange(first, first + total): 1 << draw.randrange(8) for _ in range(flips)}

        def flip(number, offset, data, places=places):
            changed = bytearray(data)
            for place, bit in places.items() if number == 1 else ():
                if offset <= place < offset + len(data):
                    changed[place - offset] ^= bit
            return bytes(changed)

        message, _ = failed(job, [proxy(serve(original), flip).address])
        assert "digest" in message


def test_a_bit_flipped_in_what_comes_with_a_layer_is_seen(proxy, seed):
    job = linear_job()
    original = trained(job)
    draw = random.Random(seed)
    lengths = []

    def count(number, offset, data):
        lengths.append(len(data) if number == 0 else 0)
        return data

    fetch(blank_of(job), [proxy(serve(original), count).address])
    unseen = []
    for _ in range(60):
        at, bit = draw.randrange(sum(lengths)), 1 << draw.randrange(8)

        def flip(number, offset, data, at=at, bit=bit):
            changed = bytearray(data)
            if number == 0 and offset <= at < offset + len(data):
                changed[at - offset] ^= bit
            return bytes(changed)

        try:
            layer, progress = fetch(blank_of(job), [proxy(serve(original), flip).address], patience_s=0.3)
        except TransferFailed:
            continue
        if (everything(layer), layer.version, progress) != (everything(original), VERSION, PROGRESS):
            unseen.append((at, bit))
    assert unseen == []


# Waiting


def test_a_holder_that_only_later_has_the_version():
    job = linear_job()
    layer = trained(job, steps=2)
    layer.version = (0, 2, 0)
    asked = threading.Event()
    find = find_in(layer)

    def asking(*request):
        asked.set()
        return find(*request)

    def apply():
        assert asked.wait(PATIENCE_S)
        time.sleep(0.2)
        layer.version = None  # torn while the optimizer runs
        advance(layer, 1, seed=3)
        layer.version = VERSION

    thread = threading.Thread(target=apply)
    thread.start()
    got, _ = fetch(blank_of(job), [LayerServer("127.0.0.1", SECRET, asking).address])
    thread.join()
    assert got.digest() == layer.digest()
    assert got.version == VERSION


def test_the_epoch_of_the_reader_is_asked_for():
    job = linear_job()
    layer = trained(job)
    asked = []

    def find(index, version, epoch):
        asked.append((index, version, epoch))
        return layer, PROGRESS

    fetch(blank_of(job), [LayerServer("127.0.0.1", SECRET, find).address])
    assert set(asked) == {(0, VERSION, EPOCH)}


@pytest.mark.parametrize("where", ["head", "bytes", "silence"])
def test_a_newer_epoch_ends_the_waiting_at_once(where, proxy):
    job = linear_job()
    waiting = threading.Event()

    def stall(number, offset, data):
        if number == 1:
            waiting.set()
            time.sleep(3.0)
            return None
        return data

    if where == "head":  # the holder does not have the version yet

        def find(*request):
            waiting.set()

        source = LayerServer("127.0.0.1", SECRET, find).address
    elif where == "bytes":
        source = proxy(serve(trained(job)), stall).address
    else:  # nobody answers: the connection waits in the backlog
        listener = socket.create_server(("127.0.0.1", 0))
        source = f"127.0.0.1:{listener.getsockname()[1]}"
        waiting.set()
    superseded = threading.Event()
    times = []

    def supersede():
        assert waiting.wait(PATIENCE_S)
        time.sleep(0.1)
        times.append(time.monotonic())
        superseded.set()

    threading.Thread(target=supersede).start()
    blank = blank_of(job)
    blank.version = None
    with pytest.raises(Superseded):
        fetch(blank, [source, source], superseded=superseded)
    assert time.monotonic() - times[0] < 1.0
    assert blank.version is None


def test_a_reader_of_an_epoch_that_is_over_asks_nobody(proxy):
    job = linear_job()
    superseded = threading.Event()
    superseded.set()
    with pytest.raises(Superseded):
        fetch(blank_of(job), [serve(trained(job))], superseded=superseded)


def test_garbage_does_not_end_the_server():
    job = linear_job()
    layer = trained(job)
    source = serve(layer)
    host, _, port = source.rpartition(":")
    secret = SECRET.encode() + b"\n"
    for garbage in (b"", b"\n", b"\0" * 5000, secret, secret + b"{}\n", secret + b"not json\n"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
    assert fetch(blank_of(job), [source])[0].digest() == layer.digest()
