import errno
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpoint.store import Store, StoreError

ROOT = Path(__file__).parents[2]


def test_objects_round_trip(store):
    assert store.read("a/b") is None
    store.write("a/b", b"one")
    store.write("a/b", b"two", memoryview(b" and "), bytearray(b"three"))
    assert store.read("a/b") == b"two and three"
    assert store.read_range("a/b", 4, 7) == b"and"
    assert store.read_range("a/b", 8, 100) == b"three"
    assert store.read_range("a/b", 100, 200) == b""
    assert store.read_range("a/b", 3, 3) == b""
    assert store.read_range("a/c", 0, 1) is None
    store.delete("a/b")
    store.delete("a/b")
    assert store.read("a/b") is None


def test_listings_hold_what_is_there(store):
    assert store.list("a") == []
    for name in ("a/2", "a/1", "a/deep/er", "ab/1"):
        store.write(name, name.encode())
    assert store.list("a") == ["a/1", "a/2", "a/deep/er"]
    assert store.sizes("a") == {"a/1": 3, "a/2": 3, "a/deep/er": 9}
    store.write("a/3", b"")
    assert store.list("a") == ["a/1", "a/2", "a/3", "a/deep/er"]
    assert store.sizes("a")["a/3"] == 0
    store.delete_tree("a")
    store.delete_tree("a")
    assert store.list("a") == []
    assert store.read("ab/1") == b"ab/1"


def test_created_once(store):
    assert store.create("x/y", b"mine")
    assert not store.create("x/y", b"other")
    assert store.read("x/y") == b"mine"
    assert store.create("x/y", b"mine")  # as after a lost answer
    store.delete("x/y")
    assert store.create("x/y", b"other")
    assert store.list("x") == ["x/y"]


def test_of_many_that_create_one_wins(place):
    stores = [place.store() for _ in range(8)]
    if not stores[0].conditional:
        pytest.skip("this server ignores conditions")
    start = threading.Barrier(len(stores))

    def race(i):
        start.wait()
        return stores[i].create("claim", b"%d" % i)

    with ThreadPoolExecutor(len(stores)) as pool:
        won = list(pool.map(race, range(len(stores))))
    assert sum(won) == 1
    assert stores[0].read("claim") == b"%d" % won.index(True)


def test_it_is_known_whether_conditions_are_honoured(place, request):
    kind = request.node.callspec.params["place"]
    assert place.store().conditional == (kind != "rclone")
    assert place.store().list("") == []


def test_one_store_serves_several_threads(store):
    def work(i):
        store.write(f"t/{i}", bytes([i]) * 1000)
        return store.read(f"t/{i}") == bytes([i]) * 1000

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))
    assert len(store.list("t")) == 32


def test_a_new_reader_sees_an_object_written_after_it_looked(place):
    reader, writer = place.store(), place.store()
    assert reader.read("x/1") is None
    assert reader.list("x") == []
    writer.write("x/1", b"1")
    assert reader.read("x/1") == b"1"
    assert reader.list("x") == ["x/1"]


def test_what_cannot_be_reached_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be written"):
        Store(f"{tmp_path}/file/below").write("x", b"1")
    with pytest.raises(StoreError, match="nosuch"):
        Store("nosuch://bucket")
    memory = Store("memory://file-in-the-way")
    memory.write("x", b"1")
    for put in (memory.write, memory.create):
        with pytest.raises(StoreError, match="x/y cannot be written"):
            put("x/y", b"1")


def test_an_absent_bucket_is_not_an_absent_object(moto):
    store = Store("s3://no-such-bucket/run", moto)
    for call in (
        lambda: store.read("x"),
        lambda: store.read_range("x", 0, 1),
        lambda: store.list("x"),
        lambda: store.write("x", b""),
        lambda: store.create("x", b""),
    ):
        with pytest.raises(StoreError, match="create the bucket"):
            call()


def test_wrong_credentials_fail_at_once(rclone):
    store = Store("s3://bucket/run", {**rclone, "secret": "wrong-secret-key"}, patience_s=1e9)
    with pytest.raises(StoreError, match="check the credentials"):
        store.write("x", b"")


def test_a_server_that_is_gone_is_waited_for_only_so_long():
    store = Store("s3://bucket/run", {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"}, patience_s=0.3)
    with pytest.raises(StoreError, match="can be reached"):
        store.read("x")


def test_a_full_disk_fails_at_once(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store = Store(str(tmp_path), patience_s=1e9)
    with pytest.raises(StoreError, match=r"x cannot be written: .*No space left on device; free some space"):
        store.write("x", b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EBUSY, "SlowDown"),
        TimeoutError(),
        ConnectionResetError(),
        type("ClientError", (Exception,), {"response": {"ResponseMetadata": {"HTTPStatusCode": 503}}})(),
        type("HttpError", (Exception,), {"code": 429})(),
    ],
)
def test_what_may_pass_is_tried_again(error, monkeypatch):
    store = Store("memory://flaky")
    calls = []

    def flaky(path, **_):
        calls.append(path)
        if len(calls) < 3:
            raise error
        return b"data"

    monkeypatch.setattr(store._fs, "cat_file", flaky)
    assert store.read("x") == b"data"
    assert len(calls) == 3


@pytest.mark.parametrize("error", [PermissionError(), ValueError("bad"), OSError(errno.ENOSPC, "full")])
def test_what_will_not_pass_is_not_tried_again(error, monkeypatch):
    store = Store("memory://flaky", patience_s=1e9)
    calls = []

    def broken(path, **_):
        calls.append(path)
        raise error

    monkeypatch.setattr(store._fs, "cat_file", broken)
    with pytest.raises(StoreError):
        store.read("x")
    assert len(calls) == 1


@pytest.mark.scenario
def test_31_the_answer_to_a_conditional_write_is_lost(moto, monkeypatch):
    store = Store("s3://bucket/lost-answer", moto)
    assert store.conditional
    store.delete("claim")
    put = store._fs.pipe_file
    calls = []

    def lossy(*args, **kwargs):
        calls.append(args)
        put(*args, **kwargs)
        raise ConnectionResetError

    def once(*args, **kwargs):
        return (put if calls else lossy)(*args, **kwargs)

    monkeypatch.setattr(store._fs, "pipe_file", once)
    assert store.create("claim", b"ours")
    assert calls


KILLED = """
import os, signal, sys
from checkpoint.store import Store

module, name, call, folder = sys.argv[1:]
store = Store(folder)
store.write("kept", b"before")
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, name, die)
getattr(store, call)("kept" if call == "write" else "new", b"after" * 1000)
"""


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("name", "call"), [("fsync", "write"), ("replace", "write"), ("fsync", "create"), ("link", "create")]
)
def test_23_a_writer_killed_midway_leaves_nothing_visible(name, call, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, "os", name, call, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    store = Store(str(tmp_path))
    assert store.sizes("") == {"kept": 6}
    assert store.read("kept") == b"before"
    assert store.read("new") is None


OVERWRITES = """
import sys
from checkpoint.store import Store

store = Store(sys.argv[1])
for i in range(10**9):
    store.write("a/x", *[bytes([i % 256]) * 65536] * 16)
    print(i, flush=True)
"""


def test_a_writer_killed_at_any_time_leaves_one_of_its_objects(tmp_path, seed):
    draw = random.Random(seed)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", OVERWRITES, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
        for _ in range(draw.randrange(1, 20)):
            process.stdout.readline()
        threading.Event().wait(draw.uniform(0, 0.01))
        process.kill()
        process.wait()
        process.stdout.close()
        data = Store(str(tmp_path)).read("a/x")
        assert len(data) == 2**20
        assert len(set(data)) == 1
    assert Store(str(tmp_path)).list("a") == ["a/x"]


def test_files_are_readable_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0o022)
    try:
        Store(str(tmp_path)).write("x", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


def test_large_objects_go_up_in_pieces(moto, seed):
    data = random.Random(seed).randbytes(1000) * 110_000  # more than s3fs sends at once
    store = Store("s3://bucket/large", moto)
    store.write("x", data[:50], data[50:])
    assert store.sizes("") == {"x": len(data)}
    assert store.read_range("x", 109_999_000, 110_000_000) == data[-1000:]
