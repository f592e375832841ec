from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import elastic

_LOADS = """
import os, sys, threading
before = dict(os.environ)
from elastic.rendezvous.shim import load_etcd3
assert "etcd3" not in sys.modules
found = []
threads = [threading.Thread(target=lambda: found.append(load_etcd3())) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(found) == 8 and len({id(m) for m in found}) == 1 and load_etcd3() is found[0]
rpc = found[0].etcdrpc
again = rpc.RangeRequest.FromString(rpc.RangeRequest(key=b"k", sort_order=rpc.RangeRequest.DESCEND).SerializeToString())
assert again.key == b"k" and again.sort_order == rpc.RangeRequest.DESCEND and rpc.NOSPACE == 1
assert dict(os.environ) == before
# The descriptors are ours alone: another package may bring its own rpc.proto.
from google.protobuf import descriptor_pool
try:
    descriptor_pool.Default().FindFileByName("rpc.proto")
except KeyError:
    print("fine")
"""


def test_eight_threads_load_one_package_in_a_fresh_process() -> None:
    shown = subprocess.run([sys.executable, "-c", _LOADS], capture_output=True, text=True, timeout=30, check=False)
    assert (shown.stdout.strip(), shown.returncode) == ("fine", 0), shown.stderr


def test_nothing_else_imports_etcd3() -> None:
    for path in Path(elastic.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "etcd3" for name in names), path
