"""Draws docs/live.svg, the live view of a run in which a node is killed:

python docs/picture.py
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
from pathlib import Path

from rich.console import Console

from elastic.config import load_config
from elastic.observe.view import LiveView
from elastic.runfiles import RunFiles
from elastic.runner import execute, read_status

HERE = Path(__file__).parent
KILL_AT, DRAW_AT = 40, 75


class Photographer(LiveView):
    """Watches without drawing, kills a node at one step, and keeps what a terminal would show at another."""

    def __init__(self, files: RunFiles, steps: int) -> None:
        super().__init__(Console(file=io.StringIO(), force_terminal=True, width=100, height=40), "gpt-bytes", steps)
        self.files, self.killed = files, False

    def _draw(self) -> None:
        self._drawn = self._clock()

    def step(self, record) -> None:
        super().step(record)
        if record["step"] >= KILL_AT and not self.killed:
            self.killed = True
            node = next(n for n in read_status(self.files)["nodes"] if n["id"] == "node-2")
            os.killpg(node["agent_pid"], signal.SIGKILL)
        if record["step"] == DRAW_AT:
            paper = Console(file=io.StringIO(), record=True, width=100)
            paper.print(self.render())
            (HERE / "live.svg").write_text(paper.export_svg(title="elastic run configs/gpt-bytes.yaml"))


def main() -> None:
    config = load_config(HERE.parent / "configs" / "gpt-bytes.yaml", ["train.steps=80", "checkpoint.every=60"])
    with tempfile.TemporaryDirectory() as folder:
        files = RunFiles(Path(folder) / "run")
        document = execute(config, run_dir=files.path, watcher=Photographer(files, 200))
    print(document["state"], document["recoveries"])


if __name__ == "__main__":
    main()
