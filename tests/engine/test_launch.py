"""Worker processes: how they start, report, and end with their parent."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from elastic.config import config_from
from elastic.engine.launch import Mailbox, WorkerProcess, interface_of
from tests.engine.processes import HERE

PATIENCE_S = 60


@pytest.fixture
def start(tmp_path):
    """Starts workers that end with the test: ``(worker, mailbox)``."""
    workers = []

    def starter(environment=None):
        box = Mailbox()
        workers.append(WorkerProcess("127.0.0.1", tmp_path / "worker.log", box, environment))
        return workers[-1], box

    yield starter
    for worker in workers:
        worker.close()


def init(params):
    config = config_from({"name": "faulty", "job": "faulty_job:job", "params": params}, folder=HERE)
    return {
        "op": "init", "config": config.to_dict(), "folder": config.folder, "boundaries": [], "host": "127.0.0.1",
        "secret": "test", "checkpoint_url": "memory://launch", "generation": 1, "writer": "node-0",
    }  # fmt: skip


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid):
    deadline = time.monotonic() + PATIENCE_S
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives"
        time.sleep(0.05)


def test_a_worker_that_is_killed_is_reported_with_its_code_once(start):
    worker, box = start()
    worker.process.send_signal(signal.SIGKILL)
    assert box.get(PATIENCE_S) == {"ev": "exit", "code": -signal.SIGKILL}
    assert gone(worker.pid)
    deadline = time.monotonic() + PATIENCE_S
    while worker.send({"op": "stop"}):
        assert time.monotonic() < deadline
    worker.close()
    worker.close()
    with pytest.raises(queue.Empty):
        box.get(0.1)


def test_a_job_that_raises_is_an_error_with_the_users_traceback(start):
    worker, box = start()
    worker.send(init({"fault": "job"}))
    message = box.get(PATIENCE_S)
    assert (message["ev"], message["epoch"]) == ("error", 0)
    error = message["error"]
    assert error["code"] == "user_code"
    assert "KeyError in the job function faulty_job:job: 'no such corpus'" in error["message"]
    assert "faulty_job.py" in error["detail"]
    assert 'raise KeyError("no such corpus")' in error["detail"]
    assert box.get(PATIENCE_S)["ev"] == "exit"


def test_sys_exit_in_the_job_function_is_an_error_of_the_user(start):
    worker, box = start()
    worker.send(init({"fault": "leave"}))
    error = box.get(PATIENCE_S)["error"]
    assert error["code"] == "user_code"
    assert "SystemExit in the job function faulty_job:job: no such corpus" in error["message"]
    assert 'sys.exit("no such corpus")' in error["detail"]
    assert box.get(PATIENCE_S)["ev"] == "exit"


def test_a_job_that_is_not_there_is_a_job_error(start):
    worker, box = start()
    wrong = init({})
    wrong["config"]["job"] = "faulty_jbo:job"
    worker.send(wrong)
    error = box.get(PATIENCE_S)["error"]
    assert error["code"] == "job"
    assert "'faulty_jbo' cannot be imported" in error["message"]
    assert box.get(PATIENCE_S)["ev"] == "exit"


def test_a_worker_gets_ready_and_ends_when_it_is_closed(start):
    worker, box = start({"OMP_NUM_THREADS": "3"})
    worker.send(init({}))
    ready = box.get(PATIENCE_S)
    assert (ready["ev"], ready["pid"]) == ("ready", worker.pid)
    ports = set()
    for server in ("store", "layers"):
        host, _, port = ready[server].rpartition(":")
        assert host == "127.0.0.1"
        ports.add(int(port))
    assert ready["fingerprint"]["threads"] == "1"  # as the job says, whatever the environment
    sockets = psutil.Process(worker.pid).net_connections("tcp")
    listening = {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
    assert listening >= {(host, port) for port in ports}
    assert {ip for ip, _ in listening} == {host}
    worker.close()
    assert gone(worker.pid)
    assert box.get(PATIENCE_S) == {"ev": "exit", "code": -signal.SIGKILL}


PARENT = """
    import json, sys, time
    from pathlib import Path
    from elastic.engine.launch import Mailbox, WorkerProcess

    box = Mailbox()
    worker = WorkerProcess("127.0.0.1", Path(sys.argv[1]), box)
    print(worker.pid, flush=True)
    if sys.argv[2]:
        worker.send(json.loads(sys.argv[2]))
        print(box.get(60)["ev"], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("when", ["at once", "when ready"])
def test_a_worker_dies_with_its_parent(when, tmp_path):
    message = json.dumps(init({})) if when == "when ready" else ""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path / "worker.log"), message],
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = None
    try:
        pid = int(parent.stdout.readline())
        if message:
            assert parent.stdout.readline().strip() == "ready"
        assert not gone(pid)
        parent.kill()
        parent.wait()
        wait_until_gone(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if pid is not None and not gone(pid):
            psutil.Process(pid).kill()


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") in psutil.net_if_addrs()
    assert interface_of("203.0.113.9") is None


def test_a_mailbox_keeps_the_order_and_does_not_wait_for_ever():
    box = Mailbox()
    box({"n": 1})
    box({"n": 2})
    assert [box.get(1)["n"], box.get(1)["n"]] == [1, 2]
    with pytest.raises(queue.Empty):
        box.get(0.01)
