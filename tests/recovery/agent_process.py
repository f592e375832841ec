"""An agent as a process of its own: ``python -m tests.recovery.agent_process SPEC``, in place of Ray."""

from __future__ import annotations

import json
import os
import signal
import sys

from elastic.control.agent import Agent, AgentSpec
from elastic.engine.worker import die_with


def main(spec: dict) -> None:
    os.setpgid(0, 0)  # the node is this process group, as with Ray
    die_with(os.getppid())  # the thread of the fleet that starts agents
    agent = Agent(AgentSpec(**{**spec, "endpoints": tuple(spec["endpoints"])}))
    signal.signal(signal.SIGTERM, lambda *_: agent.drain())
    agent.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
