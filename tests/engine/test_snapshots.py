"""A worker's share of a checkpoint: written in the background, and layers filled from it."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from checkpoint.commit import commit
from checkpoint.layout import Attempt
from checkpoint.manifest import Part
from checkpoint.store import Store, StoreError
from elastic.engine.layers import build_layer
from elastic.engine.snapshots import Damaged, Snapshots
from elastic.errors import JobError
from tests.engine.processes import load, small_config

PROGRESS = {"step": 5, "exponents": [1, 2], "ledger": {}, "recent": []}
VERSION = (0, 5, 0)


def trained(index=1, seed=3):
    """A layer with optimizer state."""
    layer = build_layer(load(small_config()), index, seed)
    torch.manual_seed(7)
    for parameter in layer.module.parameters():
        parameter.grad = torch.randn_like(parameter)
    layer.optimizer.step()
    layer.optimizer.param_groups[0]["lr"] = 0.125
    layer.version = VERSION
    return layer


def snapshots(url, heard, fingerprint=None):
    return Snapshots(str(url), {}, 1, "node-0-a", fingerprint or {"torch": "2"}, heard.put)


@pytest.fixture
def saved(tmp_path):
    """``(url, manifest, digest)`` of a checkpoint with one layer."""
    heard = queue.Queue()
    layer = trained()
    snapshots(tmp_path, heard).save([layer], PROGRESS, 4, wait=True)
    said = heard.get_nowait()
    assert (said["ev"], said["version"], said["layers"], said["writer"]) == ("saved", VERSION, [1], "node-0-a-4")
    assert said["digests"] == {"block.0": layer.digest()}
    attempt = Attempt(1, *VERSION)
    commit(Store(str(tmp_path)), attempt, [Part.from_json(said["part"])], {}, 0.0)
    return tmp_path, attempt.manifest, layer.digest()


def test_a_layer_is_filled_with_its_bits_its_optimizer_and_the_progress(saved):
    url, manifest, digest = saved
    blank = build_layer(load(small_config()), 1, 9)
    assert snapshots(url, queue.Queue()).restore(blank, manifest, (2, 5, 0), exact=True) == PROGRESS
    assert (blank.digest(), blank.version) == (digest, (2, 5, 0))
    assert blank.optimizer.param_groups[0]["lr"] == 0.125


def test_training_goes_on_with_the_layer_while_its_copy_is_written(tmp_path, monkeypatch):
    heard, go = queue.Queue(), threading.Event()
    write = Store.write
    monkeypatch.setattr(Store, "write", lambda self, *args: (go.wait(30), write(self, *args)))
    shots, layer = snapshots(tmp_path, heard), trained()
    before = layer.digest()
    shots.save([layer], PROGRESS, 4, wait=False)
    with torch.no_grad():
        next(layer.module.parameters()).add_(1.0)
    layer.version = (0, 10, 0)
    shots.save([layer], PROGRESS, 4, wait=False)  # the one before is still being written
    said = heard.get(timeout=10)
    assert (said["ev"], said["version"]) == ("unsaved", (0, 10, 0))
    assert "still being written" in said["reason"]
    go.set()
    said = heard.get(timeout=30)
    assert (said["ev"], said["version"], said["digests"]) == ("saved", VERSION, {"block.0": before})
    shots.save([layer], PROGRESS, 4, wait=True)  # the last one waits instead
    assert heard.get_nowait()["version"] == (0, 10, 0)
    shots.save([layer], PROGRESS, 5, wait=True)
    assert heard.empty()  # it is there already


def test_a_store_that_fails_is_told_and_raises_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise StoreError("no space left on device")

    heard = queue.Queue()
    monkeypatch.setattr(Store, "write", fail)
    snapshots(tmp_path, heard).save([trained()], PROGRESS, 4, wait=True)
    said = heard.get_nowait()
    assert (said["ev"], said["reason"]) == ("unsaved", "no space left on device")


def test_a_flipped_bit_is_found(saved):
    url, manifest, _ = saved
    (pack,) = url.glob("g*/attempts/*/*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Damaged, match=r"block\.0"):
        snapshots(url, queue.Queue()).restore(build_layer(load(small_config()), 1, 9), manifest, (2, 5, 0), exact=True)


def test_a_layer_that_is_not_there_and_one_of_another_shape_are_told_by_name(saved):
    url, manifest, _ = saved
    with pytest.raises(JobError, match=r"'block\.1'"):
        snapshots(url, queue.Queue()).restore(build_layer(load(small_config()), 2, 9), manifest, VERSION, exact=True)
    blank = build_layer(load(small_config()), 1, 9)
    blank.module.up = torch.nn.Linear(16, 8)
    with pytest.raises(JobError, match=r"up\.weight"):
        snapshots(url, queue.Queue()).restore(blank, manifest, VERSION, exact=True)


def test_exact_refuses_other_numerics_by_name(saved):
    url, manifest, _ = saved
    other = snapshots(url, queue.Queue(), {"torch": "3"})
    with pytest.raises(JobError, match="torch: 3 here, 2 there"):
        other.restore(build_layer(load(small_config()), 1, 9), manifest, VERSION, exact=True)
    other.restore(build_layer(load(small_config()), 1, 9), manifest, VERSION, exact=False)
