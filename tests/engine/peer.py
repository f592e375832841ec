"""A process that forms groups and reduces in them as it is told on stdin; ``python -m tests.engine.peer``.

One thread does what may block (``form``, ``reduce``), another reads the commands, so that ``supersede`` and ``abort``
reach a blocked thread, as in a worker.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time


class Peer:
    """The end that the test holds."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # torch prints long traces of what is expected here
            text=True,
        )
        self._said = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._said.put(json.loads(line))

    def tell(self, op, **more):
        self.process.stdin.write(json.dumps({"op": op, **more}) + "\n")
        self.process.stdin.flush()

    def hear(self, timeout_s=60.0):
        return self._said.get(timeout=timeout_s)

    def has_said_nothing(self):
        return self._said.empty()

    def is_idle(self):
        """Whether it lives and has nothing left to do; forgets what it said before."""
        with contextlib.suppress(OSError, queue.Empty):
            self.tell("sync")
            while self.hear(5.0)["said"] != "synced":
                pass
            return True
        return False

    def close(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # what was never read
            self.process.stdin.close()


def main():
    import torch
    import torch.distributed as dist

    from elastic.engine.comm import FormFailed, form
    from elastic.engine.gate import Superseded
    from elastic.engine.units import Unit
    from elastic.planning import Plan

    torch.set_num_threads(1)
    superseded = threading.Event()
    groups = None
    blocking = queue.Queue()

    def say(**message):
        print(json.dumps({**message, "at": time.monotonic()}), flush=True)

    def formed(message):
        plan = Plan.from_json(message["plan"])
        units = [Unit(f"l{i}", (i,)) for i in range(plan.layers)]
        timeouts = [message["meet_s"], message["connect_s"], 60.0]
        return form(plan, message["rank"], units, message["store"], message["prefix"], *timeouts, superseded)

    def reduced(message):
        chosen = {"world": [groups.world], "pipeline": [groups.pipeline], "buckets": [g for g, _ in groups.buckets]}
        out = []
        for group in chosen[message["group"]]:
            x = torch.full((message["size"],), float(2**groups.rank))
            if group is not None:
                dist.all_reduce(x, group=group)
            out.append(int(x[-1]))
        return out

    def work():
        nonlocal groups
        while True:
            message = blocking.get()
            started = time.monotonic()
            try:
                if message["op"] == "form":
                    if groups is not None:
                        groups.close()
                    groups = formed(message)
                    say(said="formed", took=time.monotonic() - started, units=[u for _, u in groups.buckets])
                elif message["op"] == "reduce":
                    say(said="reduced", sums=reduced(message))
                else:
                    say(said="synced")
            except Superseded:
                say(said="superseded", took=time.monotonic() - started)
            except FormFailed as error:
                say(said="failed", reason=str(error), took=time.monotonic() - started)
            except RuntimeError as error:
                say(said="broken", reason=str(error))

    threading.Thread(target=work, daemon=True).start()
    say(said="ready")
    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "supersede":
            superseded.set()
        elif message["op"] == "abort":
            groups.abort()
        else:
            if message["op"] == "form":
                superseded.clear()
            blocking.put(message)


if __name__ == "__main__":
    main()
