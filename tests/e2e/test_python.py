"""`elastic.run` from Python, twice in one process: the result document, and errors as exceptions."""

from __future__ import annotations

import json
import subprocess
import sys

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import elastic

def job(params):
    inputs = torch.arange(64.0).reshape(16, 4)
    return elastic.Job(
        layers=elastic.layers_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))),
        loss=lambda output, target: (((output - target) ** 2).sum(), target.numel()),
        dataset=TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-6),
    )
"""
SCRIPT = """
import json, sys
import elastic

seen = []
class Watcher:
    def event(self, record): seen.append(record["kind"])
    def step(self, record): seen.append(record["step"])
    def note(self, text): pass
    def tick(self): pass

config = {"name": "linear", "job": "linear.py:job", "train": {"steps": 3, "global_batch": 4, "microbatch": 2}}
document = elastic.run(config, set=["cluster.nodes=2"], watcher=Watcher())
try:
    elastic.run({**config, "name": "other"}, set=["job=linear.py:nothing"])
except elastic.ElasticError as error:
    document["second"] = error.as_json()
print(json.dumps({**document, "seen": seen}))
"""


def test_run_from_python(tmp_path):
    (tmp_path / "linear.py").write_text(JOB)
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["state"], document["step"], document["samples"]) == ("done", 3, 12)
    assert [one for one in document["seen"] if isinstance(one, int)] == [1, 2, 3]
    assert document["seen"][-1] == "ended"
    assert document["second"]["message"] == "linear.py has no function 'nothing'"
