"""Layers from worker to worker: pulled over TCP, striped over all holders, verified, installed as a whole.

A request names (layer, version); a holder answers when it holds exactly that, which may be after it has applied the
outcome of the open step. The transport knows nothing of process groups, so a drained node or a spare can hand over its
layers too, and a superseded epoch is left by closing sockets.

Wire: the secret of the job and one JSON line from the reader; one JSON line ``{digest, entries, groups}`` or
``{refused}`` from the holder, then the bytes asked for.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from elastic.engine.gate import Superseded
from elastic.engine.layers import LayerState, Version

Json = dict[str, Any]
Find = Callable[[int, "Version | None", int], "tuple[LayerState, Json] | None"]
POLL_S = 0.002
CONNECT_TIMEOUT_S = 2.0
MAX_LINE = 16 * 1024 * 1024
CHUNK = 1 << 20


class TransferFailed(Exception):
    """A layer could not be had; the message names it and its holders."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a layer: a parameter (``key`` empty) or an item of its optimizer state.

    ``number`` is a state item that is no tensor, which has no bytes.
    """

    path: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    number: float | None = None

    @property
    def bytes(self) -> int:
        if self.number is not None:
            return 0
        return int(torch.tensor([], dtype=getattr(torch, self.dtype)).element_size() * torch.Size(self.shape).numel())


def entries_of(layer: LayerState) -> list[tuple[Entry, Tensor]]:
    """Every tensor of a layer, in a fixed order: each parameter, then its optimizer state by key."""
    out = []
    for path, parameter in layer.parameters():
        out.append(_entry(path, "", parameter.detach()))
        state = layer.optimizer.state.get(parameter, {}) if layer.optimizer else {}
        for key in sorted(state):
            value = state[key]
            if isinstance(value, Tensor):
                out.append(_entry(path, key, value.detach()))
            else:
                out.append((Entry(path, key, "", (), value), torch.empty(0)))
    return out


def _entry(path: str, key: str, tensor: Tensor) -> tuple[Entry, Tensor]:
    return Entry(path, key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; a view into it where it is contiguous and on the CPU."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(data)


class LayerServer:
    """Serves the layers of this worker on a free port of ``host``.

    Args:
        secret: of the job; a reader without it is dropped.
        find: ``(layer, version, epoch) -> (layer, progress)`` when it can be handed over for that epoch at that
            version (``None``: whichever the epoch starts from), else ``None``.
    """

    def __init__(self, host: str, secret: str, find: Find) -> None:
        self._secret, self._find = secret.encode(), find
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="layer-server", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="layer-reader", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, KeyError):  # the reader tries another holder
            connection.settimeout(30)
            lines = connection.makefile("rb")
            if not hmac.compare_digest(lines.readline(256).strip(), self._secret):
                return
            request = json.loads(lines.readline(MAX_LINE))
            found = self._wait_for(request)
            if found is None:
                connection.sendall(_line({"refused": "not held"}))
                return
            layer, progress = found
            tensors = entries_of(layer)
            head: Json = {"entries": [entry.__dict__ for entry, _ in tensors], "groups": groups_of(layer)}
            head |= {"version": layer.version, "progress": progress}
            if request["want"] == "head":
                head["digest"] = layer.digest()
                connection.sendall(_line(head))
                return
            connection.sendall(_line({}))
            start, stop, at = request["start"], request["stop"], 0
            for entry, tensor in tensors:
                size = entry.bytes
                if at + size > start and at < stop:
                    data = raw_bytes(tensor)
                    data = data[max(0, start - at) : min(size, stop - at)]
                    for begin in range(0, len(data), CHUNK):  # the timeout bounds one call as a whole
                        connection.sendall(data[begin : begin + CHUNK])
                at += size

    def _wait_for(self, request: Json) -> tuple[LayerState, Json] | None:
        """The holder may still have to apply the step that makes this version."""
        version = version_of(request["version"]) if request["version"] is not None else None
        deadline = time.monotonic() + request["patience_s"]
        while (found := self._find(request["layer"], version, request["epoch"])) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        return found


def _line(head: Json) -> bytes:
    """With a checksum in front: the digest of a layer does not cover versions, progress and optimizer settings."""
    line = json.dumps(head).encode()
    return xxhash.xxh3_128_hexdigest(line).encode() + b" " + line + b"\n"


def groups_of(layer: LayerState) -> list[Json]:
    """Plain settings of the optimizer's groups, such as a learning rate that was changed on the way."""
    groups = layer.optimizer.param_groups if layer.optimizer else []
    return [{k: v for k, v in group.items() if isinstance(v, bool | int | float | str)} for group in groups]


def version_of(value: Sequence[int]) -> Version:
    return (int(value[0]), int(value[1]), int(value[2]))


def fetch_layer(
    blank: LayerState,
    version: Version | None,
    epoch: int,
    sources: Sequence[str],
    secret: str,
    patience_s: float,
    superseded: threading.Event,
) -> tuple[LayerState, Json]:
    """Fills a freshly built layer from its holders; returns it, and how far training is (`Progress` as JSON).

    Every holder gives an equal part of the bytes. Holders must agree on the digest, and the installed layer must have
    it.

    Raises:
        TransferFailed: a holder did not answer, refused, or holders disagree.
        Superseded: a newer epoch has begun.
    """
    request = {"layer": blank.index, "version": version, "epoch": epoch, "patience_s": patience_s}
    with ThreadPoolExecutor(max_workers=max(1, min(8, len(sources)))) as pool:

        def ask(source: str, **more: Any) -> tuple[Json, bytearray]:
            return _ask(source, secret, {**request, **more}, patience_s, superseded)

        heads = [head for head, _ in pool.map(lambda source: ask(source, want="head"), sources)]
        # All but the progress, which holds times that differ.
        if len({json.dumps([head[k] for k in ("digest", "entries", "groups", "version")]) for head in heads}) > 1:
            raise TransferFailed(f"holders of layer {blank.name!r} disagree: {', '.join(sources)}")
        entries = [Entry(**{**e, "shape": tuple(e["shape"])}) for e in heads[0]["entries"]]
        total = sum(entry.bytes for entry in entries)
        cuts = [total * i // len(sources) for i in range(len(sources) + 1)]
        parts = pool.map(
            lambda i: ask(sources[i], want="bytes", start=cuts[i], stop=cuts[i + 1])[1], range(len(sources))
        )
        data = bytearray().join(parts)
    install(blank, entries, heads[0]["groups"], data)
    if blank.digest() != heads[0]["digest"]:
        raise TransferFailed(f"layer {blank.name!r} from {', '.join(sources)} does not have the digest they gave")
    blank.version = version_of(heads[0]["version"])
    return blank, heads[0]["progress"]


def install(layer: LayerState, entries: Sequence[Entry], groups: Sequence[Json], data: bytearray) -> None:
    """Writes the bytes of ``entries`` into a layer.

    Raises:
        TransferFailed: the layer has other parameters than the entries name.
    """
    named = dict(layer.parameters())
    at = 0
    for entry in entries:
        if entry.number is not None:
            if layer.optimizer is not None and entry.path in named:
                layer.optimizer.state[named[entry.path]][entry.key] = entry.number
            continue
        kind = getattr(torch, entry.dtype)
        raw = data[at : at + entry.bytes]
        tensor = torch.frombuffer(raw, dtype=kind).reshape(entry.shape) if raw else torch.empty(entry.shape, dtype=kind)
        at += entry.bytes
        parameter = named.get(entry.path)
        if parameter is None or (not entry.key and parameter.shape != tensor.shape):
            raise TransferFailed(f"layer {layer.name!r} has no parameter {entry.path!r} of shape {entry.shape}")
        if not entry.key:
            with torch.no_grad():
                parameter.copy_(tensor)
        elif layer.optimizer is not None:
            # Step counters stay on the CPU, as torch wants them. A copy is aligned as torch's own tensors are.
            device = torch.device("cpu") if tensor.dim() == 0 else parameter.device
            layer.optimizer.state[parameter][entry.key] = tensor.to(device, copy=True)
    for group, values in zip(layer.optimizer.param_groups if layer.optimizer else [], groups, strict=True):
        group.update(values)


def _ask(
    source: str, secret: str, request: Json, patience_s: float, superseded: threading.Event
) -> tuple[Json, bytearray]:
    host, _, port = source.rpartition(":")
    wanted = request.get("stop", 0) - request.get("start", 0)
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(secret.encode() + b"\n" + json.dumps(request).encode() + b"\n")
            connection.settimeout(0.1)
            head, rest = _read_head(connection, superseded, time.monotonic() + patience_s + CONNECT_TIMEOUT_S)
            data = rest
            while len(data) < wanted:
                part = _receive(connection, superseded, time.monotonic() + patience_s + CONNECT_TIMEOUT_S)
                data += part
    except (OSError, ValueError) as error:
        raise TransferFailed(f"layer {request['layer']} from {source}: {error}") from error
    if "refused" in head:
        raise TransferFailed(f"layer {request['layer']} from {source}: {head['refused']}")
    return head, data


def _read_head(connection: socket.socket, superseded: threading.Event, deadline: float) -> tuple[Json, bytearray]:
    data = bytearray()
    while b"\n" not in data:
        data += _receive(connection, superseded, deadline)
    line, _, rest = data.partition(b"\n")
    checksum, _, line = line.partition(b" ")
    if checksum != xxhash.xxh3_128_hexdigest(bytes(line)).encode():
        raise ValueError("what came is not what was sent")
    head: Json = json.loads(line)
    return head, rest


def _receive(connection: socket.socket, superseded: threading.Event, deadline: float) -> bytes:
    while True:
        if superseded.is_set():
            raise Superseded
        try:
            data = connection.recv(CHUNK)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
            continue
        if not data:
            raise ConnectionError("the holder closed the connection")
        return data
