"""A controller as a process of its own, in place of Ray; agents are started by the test.

python -m tests.recovery.controller_process ENDPOINT JOB NODES NAME
"""

from __future__ import annotations

import os
import sys

from elastic.control.controller import Controller
from elastic.engine.worker import die_with
from elastic.errors import EtcdUnreachable
from elastic.rendezvous import Fenced


class NoFleet:
    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def ensure(self) -> int:
        return self._nodes

    def resize(self, nodes: int) -> None:
        self._nodes = max(self._nodes, nodes)

    def release(self, node: str) -> None:
        self._nodes -= 1


def main(endpoint: str, job: str, nodes: str, name: str) -> int:
    die_with(os.getppid())
    try:
        Controller([endpoint], job, NoFleet(int(nodes)), name).run()
    except Fenced as error:
        print(f"fenced: {error}", flush=True)
        return 3
    except EtcdUnreachable as error:
        print(f"no etcd: {error}", flush=True)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
