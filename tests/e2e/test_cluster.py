"""A job on somebody's cluster: Ray and etcd by address, a job module that only this machine's folder has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from elastic.control.agent import PROBE, Agent, AgentSpec
from elastic.rendezvous import Etcd, Keys
from elastic.rendezvous.server import EtcdServer
from tests.e2e.harness import ROOT, Elastic, plain_digest

JOB = """
import torch
from torch import nn
import elastic
from beside import loss  # as is this module, it is nowhere but here


class Rows:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8) * (index + 1.0))
        return x, x.sum(0, keepdim=True)


def job(params):
    if "note" in params:
        with open(params["note"], "a") as file:
            print(elastic.__file__, file=file)
    return elastic.Job(
        layers=elastic.layers_of(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))),
        loss=loss,
        dataset=Rows(),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )
"""
BESIDE = """
def loss(output, target):
    return ((output - target) ** 2).sum(), target.numel()
"""
CONFIG = """
name: shipped
job: shipped_job:job
train: {steps: 12, global_batch: 16, microbatch: 4}
"""
TOKEN = "3f" * 32
# Two raylets; prints the address, ends with its stdin. Asked for a line it says what still lives in the cluster.
CLUSTER = """
import json, sys, ray
from ray.cluster_utils import Cluster
cluster = Cluster()
cluster.add_node(num_cpus=1, include_dashboard=False, temp_dir=sys.argv[1])
cluster.add_node(num_cpus=1, temp_dir=sys.argv[1])
cluster.wait_for_nodes()
print(json.dumps(cluster.address), flush=True)
for _ in sys.stdin:
    ray.init(address=cluster.address, log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    ran = ray.get([ray.remote(num_cpus=1)(lambda: 7).remote() for _ in nodes], timeout=60)
    print(json.dumps({"nodes": nodes, "actors": ray.util.list_named_actors(all_namespaces=True), "ran": ran}))
    sys.stdout.flush()
    ray.shutdown()
cluster.shutdown()
"""


class Cluster:
    """A Ray cluster of two raylets on this machine, in a process of its own."""

    def __init__(self, folder, environment):
        self._temp = tempfile.mkdtemp(prefix="e2e-", dir="/tmp")  # short, for the names of sockets
        self._log = folder / "cluster.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CLUSTER, self._temp],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.address = self._answer()

    def _answer(self):
        for line in self._process.stdout:
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue  # Ray says something
        raise AssertionError(self._log.read_text())

    def ask(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)
        shutil.rmtree(self._temp, ignore_errors=True)


@pytest.fixture
def etcd(tmp_path):
    with EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log", throwaway=True) as server:
        yield server


def keys_of_ours(server):
    with Etcd([server.endpoint]) as client:
        return [kv.key for kv in client.range("/elastic/")[0]]


def test_two_raylets_and_an_etcd_by_address(tmp_path, etcd):
    job, here, there = (tmp_path / name for name in ("a", "b", "c"))
    for folder in (job, here, there):
        folder.mkdir()
    (job / "shipped_job.py").write_text(JOB)
    (job / "beside.py").write_text(BESIDE)
    (job / "shipped.yaml").write_text(CONFIG)
    # The nodes know of our packages no more than of the job: both must be shipped.
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    elastic = Elastic(here, **token)
    cluster = Cluster(there, {**bare, **token})
    try:
        before = cluster.ask()
        settings = {"params__note": tmp_path / "note", "cluster__etcd": etcd.endpoint, "cluster__ray": cluster.address}
        ended = elastic.train(job / "shipped.yaml", **settings).wait()
        assert ended.code == 0, ended
        assert not elastic.left()
        after = cluster.ask()
        assert keys_of_ours(etcd) == []
    finally:
        elastic.end()
        cluster.close()
    document = ended.document
    assert document["params_digest"] == plain_digest(job / "shipped.yaml")[0]
    (plan,) = document["plans"]
    names = sorted(node for pipeline in plan["pipelines"] for node in pipeline)
    assert names == sorted(f"node-{node[:8]}" for node in before["nodes"])
    assert len(set(names)) == 2
    # The command, which inspects the job, and a worker per node: those have what was shipped.
    ours, *theirs = sorted((tmp_path / "note").read_text().splitlines(), key=lambda path: "runtime_resources" in path)
    assert (str(ROOT) in ours, len(theirs)) == (True, 2)
    assert all("runtime_resources" in path for path in theirs)
    assert after == {"nodes": before["nodes"], "actors": [], "ran": [7, 7]}


def test_a_cluster_that_wants_a_token(tmp_path, etcd):
    """Refused without it, in words, and not after minutes."""
    (tmp_path / "shipped_job.py").write_text(JOB)
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "shipped.yaml").write_text(CONFIG)
    here = tmp_path / "b"
    here.mkdir()
    elastic = Elastic(here)
    cluster = Cluster(tmp_path, {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN})
    try:
        command = elastic.train(tmp_path / "shipped.yaml", cluster__etcd=etcd.endpoint, cluster__ray=cluster.address)
        ended = command.wait()
        assert ended.code == 3, ended
        error = ended.document["error"]
        assert (error["code"], "RAY_AUTH_TOKEN" in error["hint"]) == ("ray_unreachable", True)
        assert not elastic.left()
        assert keys_of_ours(etcd) == []
    finally:
        elastic.end()
        cluster.close()


def test_a_store_that_the_node_does_not_see(tmp_path, etcd):
    """What an agent does where ``checkpoint.url`` is another folder than the supervisor's."""
    keys = Keys("small")
    url = str(tmp_path / "elsewhere")
    config = {"detection": {"lease_s": 2, "orphan_s": 5}, "checkpoint": {"storage_options": {}}}
    spec = {"config": config, "checkpoint_url": url}
    with Etcd([etcd.endpoint]) as client:
        client.put(keys.spec, json.dumps(spec).encode())
        agent = Agent(AgentSpec((etcd.endpoint,), "small", "node-0", "127.0.0.1", str(tmp_path), str(tmp_path)))
        client.put(keys.result, b"{}")  # so that it reports and returns
        agent.run()
        report = json.loads(client.get(keys.report(0, "node-0")).value)
    assert report["ev"] == "refused"
    assert report["reason"] == f"checkpoint.url {url} is not shared with this node"
    assert PROBE not in os.listdir(tmp_path)
