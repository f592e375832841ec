"""A real etcd for every test; tests that stop or restart it get one of their own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.rendezvous import Etcd, EtcdServer, Keys, find_etcd


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if find_etcd() is None:
        pytest.skip("no etcd binary on this machine")
    folder = tmp_path_factory.mktemp("etcd")
    with EtcdServer(folder / "data", folder / "log", throwaway=True) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    if find_etcd() is None:
        pytest.skip("no etcd binary on this machine")
    with EtcdServer(tmp_path / "data", tmp_path / "log", throwaway=True) as server:
        yield server


@pytest.fixture
def etcd(server: EtcdServer) -> Iterator[Etcd]:
    with Etcd([server.endpoint]) as etcd:
        yield etcd


@pytest.fixture
def own_etcd(own_server: EtcdServer) -> Iterator[Etcd]:
    with Etcd([own_server.endpoint], timeout_s=0.5) as etcd:
        yield etcd


@pytest.fixture
def keys() -> Keys:
    """Of a job that no other test has."""
    return Keys(uuid.uuid4().hex)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for a condition, up to a deadline in seconds."""

    def wait(condition: Callable[[], object], within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s} s"
            time.sleep(0.01)

    return wait
