"""What the views draw, as text: nothing wider than the terminal, nothing cut, nothing that crashes."""

from __future__ import annotations

import io
import json
import math
import os
import pty
from pathlib import Path

import pytest
from rich.console import Console

from elastic.observe import view as view_module
from elastic.observe.nodes import node_map
from elastic.observe.picture import Picture
from elastic.observe.view import EVENT_ROWS, LiveView, PlainView, view_for


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def event(kind: str, **data: object) -> dict:
    return {"seq": 0, "time": 1.7e9, "kind": kind, **data}


def step(number: int, **data: object) -> dict:
    record = {"epoch": 1, "step": number, "loss": 5 / number, "lr": 3e-4, "grad_norm": 1.5, "samples": 32 * number}
    return {**record, "lost": 0, "repeated": 0, "eval_loss": None, "weight": 4096.0, "seconds": 0.25, **data}


REASON = "6 nodes: pipelines of 2 and 3, 3 and 5 microbatches; 1 spare"
HISTORY = [
    event("started", config="configs/gpt-bytes-pipeline.yaml", nodes=6),
    *(event("node_joined", node=f"node-{i}", incarnation=str(i)) for i in range(7)),
    event(
        "plan",
        epoch=1,
        pipelines=[["node-0", "node-1"], ["node-2", "node-3", "node-4"]],
        spares=["node-5"],
        reason=REASON,
    ),
    event("formed", epoch=1),
]


def terminal(width: int) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None, legacy_windows=False
    )


def drawn(view: LiveView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(view.render(), soft_wrap=True)  # so that a line too wide is seen as such
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_whole_picture(width: int) -> None:
    clock = Clock()
    view = LiveView(terminal(width), "gpt-bytes-pipeline", 200, clock)
    for record in HISTORY:
        view.event(record)
    for number in range(1, 121):
        view.step(step(number))
    clock.now = 42.0
    lines = drawn(view, width)
    text = "\n".join(lines)
    for expected in ("gpt-bytes-pipeline", "● running", "epoch 1", "0:42, 0:20 left", "120/200   60 %", "0.0417"):
        assert expected in text
    assert "16,384 tokens/s   128 samples/s" in text
    assert "pipeline 0  ▐node-0▌▸▐node-1▌" in lines
    assert "pipeline 1  ▐node-2▌▸▐node-3▌▸▐node-4▌" in lines
    assert "spare       ▐node-5▌" in lines
    assert "waiting     ▐node-6▌" in lines
    assert "epoch 1 formed, training" in text
    assert REASON.split()[-1] in text  # a long sentence is folded, not cut
    assert "█" in lines[2]
    assert "▁" in lines[2]


def test_the_checkpoint_has_a_line() -> None:
    view = LiveView(terminal(80), "gpt", 200, Clock())
    view.event(HISTORY[0])
    assert "checkpoint  –" in drawn(view, 80)
    view.event(event("checkpoint_started", step=50))
    assert "checkpoint  writing that of step 50" in drawn(view, 80)
    view.event(event("checkpoint_saved", step=50, bytes=2048, stall_s=0.001, upload_s=0.2))
    assert "checkpoint  step 50, 2.0 KiB in 200 ms, stalled for 1 ms" in drawn(view, 80)
    assert not any("saved" in line for line in drawn(view, 80))  # or they would push all else out
    view.event(event("checkpoint_started", step=100))
    assert "checkpoint  step 50, 2.0 KiB   writing that of step 100" in drawn(view, 80)
    view.event(event("checkpoint_failed", step=100, reason="the disk is full"))
    lines = drawn(view, 80)
    assert "checkpoint  that of step 100 failed" in lines
    assert any("the disk is full" in line for line in lines)


def test_what_was_resumed_from_is_the_last_checkpoint() -> None:
    view = LiveView(terminal(80), "gpt", 200, Clock())
    view.event(event("resumed", step=150, lineage=1, manifest="m"))
    assert "checkpoint  step 150" in drawn(view, 80)
    view.event(event("rollback", to_step=100, lineage=2, manifest="m", lost_steps=50))
    assert "checkpoint  step 100" in drawn(view, 80)
    view.event(event("rollback", to_step=0, lineage=3, manifest="", lost_steps=100))
    assert "checkpoint  –" in drawn(view, 80)


def test_steps_told_again_move_nothing_back() -> None:
    picture = Picture(200)
    picture.add_event(event("resumed", step=100, lineage=1, manifest="m"))
    for number in (99, 100, 101, 101, 102):
        picture.add_step(step(number))
    assert (picture.step, list(picture.losses)) == (102, [5 / 101, 5 / 102])
    assert picture.samples_per_s == 128


def test_a_rollback_takes_its_steps_off_the_curve() -> None:
    picture = Picture(200)
    for number in range(1, 11):
        picture.add_step(step(number))
    picture.add_event(event("rollback", to_step=7, lineage=2, manifest="m", lost_steps=3))
    picture.add_step(step(8, loss=0.5))
    assert picture.step == 8
    assert list(picture.losses) == [*(5 / number for number in range(1, 8)), 0.5]


def test_a_recovery_is_told_in_one_sentence() -> None:
    view = LiveView(terminal(80), "gpt", 200, Clock())
    lost = {"node": "node-3", "incarnation": "3", "cause": "node", "detect_s": 0.0}
    for record in [
        *HISTORY,
        event("node_left", node="node-3", incarnation="3", cause="node"),
        event("plan", epoch=2, pipelines=[["node-0", "node-1"]], spares=[], reason="node-3 lost"),
        event("formed", epoch=2),
        event("recovered", epoch=2, losses=[lost], total_s=0.312, lost_steps=0),
    ]:
        view.event(record)
    lines = [line[12:] for line in drawn(view, 80)]
    assert "node-3 died · 2 pipelines → 1 · 0.31 s · nothing lost" in lines
    assert "epoch 1 formed, training" in lines
    assert not any("was lost" in line or "epoch 2 formed" in line for line in lines)


RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("width", [80, 120])
def test_a_recorded_run(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``GOLDEN=write`` rewrites what is expected, to be read as a diff."""
    monkeypatch.setattr(view_module, "clock_time", lambda time: f"12:00:{int(time) % 60:02}")
    clock, pages = Clock(), []
    view = LiveView(terminal(width), "my_job", 400, clock)
    told = 0
    events = [json.loads(line) for line in (RECORDED / "two-kills.jsonl").read_text().splitlines()]
    until = {"node_left": (81, 173), "checkpoint_saved": (100, 200, 243)}
    for record in events:
        reached = [number for number in until.get(record["kind"], ()) if number > told or number == record.get("step")]
        for number in range(told + 1, reached[0] + 1 if reached else 0):
            view.step(step(number, weight=128.0, samples=128 * number))
            told = number
        clock.now = record["time"] - events[0]["time"]
        view.event(record)
        if record["kind"] in ("plan", "node_left", "recovered", "checkpoint_saved", "ended"):
            pages.append(f"after {record['kind']}\n\n" + "\n".join(line.rstrip() for line in drawn(view, width)))
    text = "\n\n\n".join(pages) + "\n"
    path = RECORDED / f"two-kills-{width}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_before_the_first_event_there_is_one_line() -> None:
    view = LiveView(terminal(80), "gpt", 200, Clock())
    view.note("starting etcd")
    (line,) = drawn(view, 80)
    assert "starting etcd" in line


def test_the_height_never_shrinks() -> None:
    view = LiveView(terminal(80), "gpt", 200, Clock())
    heights = []
    for record in [*HISTORY, event("plan", epoch=2, pipelines=[["node-0"]], spares=[], reason="2 nodes")]:
        view.event(record)
        heights.append(len(drawn(view, 80)))
    assert heights == sorted(heights)


def test_a_lost_node_is_seen_without_colours() -> None:
    view = LiveView(terminal(80), "gpt", 200, Clock())
    for record in [*HISTORY, event("node_left", node="node-3", incarnation="3")]:
        view.event(record)
    assert "pipeline 1  ▐node-2▌▸▐✕node-3▌▸▐node-4▌" in drawn(view, 80)


def test_a_late_report_about_an_older_incarnation_removes_nothing() -> None:
    picture = Picture(10)
    picture.add_event(event("node_joined", node="node-0", incarnation="new"))
    picture.add_event(event("node_left", node="node-0", incarnation="old"))
    assert picture.members == {"node-0": "new"}


def test_strange_records_are_drawn() -> None:
    view = LiveView(terminal(80), "[red]" * 20, 10, Clock())
    plain = PlainView(io.StringIO(), 10)
    for record in (
        event("spot_notice", node="node-0", grace_s=30),
        event("plan"),
        event("ended"),
        {"kind": None},
        event("waiting", reason="[bold]" + "x" * 300),
        event("waiting", reason="word " * 400),
    ):
        view.event(record)
        plain.event(record)
        assert len(drawn(view, 80)) >= EVENT_ROWS
    for record in (step(1, loss=math.nan), step(2, loss=None), {"step": 11, "loss": 1.0}, {}):
        view.step(record)
        plain.step(record)
        drawn(view, 80)


def test_wide_and_many_pipelines_are_counted_where_they_do_not_fit() -> None:
    picture = Picture(10)
    names = [[f"machine-{p:02}-{s:02}" for s in range(20)] for p in range(30)]
    picture.add_event(event("plan", epoch=1, pipelines=names, spares=["a" * 90], reason=""))
    lines = [line.plain for line in node_map(picture, 80, 8)]
    assert len(lines) == 8
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("▸… 17 more …▸▐✕machine-00-19▌")
    assert lines[6].strip() == "… 24 more pipelines of 480 nodes"
    assert lines[7].startswith("spare")


def test_one_rate_is_shown_where_the_loss_weighs_samples_alike() -> None:
    view = LiveView(terminal(80), "gpt", 10, Clock())
    view.event(HISTORY[0])
    for number in (1, 2):
        view.step(step(number, weight=32.0))
    text = "\n".join(drawn(view, 80))
    assert "128 samples/s" in text
    assert "tokens/s" not in text


def test_the_first_step_of_a_resumed_run_does_not_count_all_samples_before() -> None:
    picture = Picture(200)
    for number in (101, 102, 103):
        picture.add_step(step(number))
    assert picture.samples_per_s == 128


def test_redraws_are_bounded() -> None:
    clock, console = Clock(), terminal(80)
    with LiveView(console, "gpt", 1000, clock) as view:
        view.event(HISTORY[0])
        before = console.file.tell()
        for number in range(1, 500):
            view.step(step(number))
        assert console.file.tell() == before
        clock.now += 1.0
        view.tick()
        assert console.file.tell() > before


def test_plain_lines() -> None:
    clock, stream = Clock(), io.StringIO()
    with PlainView(stream, 200, clock) as view:
        view.note("inspecting the job")
        for record in HISTORY[-2:]:
            view.event(record)
        for number in range(1, 51):
            view.step(step(number))
        clock.now = 1.5
        view.step(step(51, eval_loss=3.5))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "inspecting the job"
    assert lines[1].endswith(f"  epoch 1: 2 pipelines (2, 3): {REASON}")
    assert lines[3:] == [
        "step 1/200  loss 5.0000  16,384 tokens/s  128 samples/s",
        "step 20/200  loss 0.2500  16,384 tokens/s  128 samples/s",
        "step 40/200  loss 0.1250  16,384 tokens/s  128 samples/s",
        "step 51/200  loss 0.0980  evaluation 3.5000  16,384 tokens/s  128 samples/s",
    ]


def test_the_view_suits_the_console() -> None:
    assert isinstance(view_for(Console(file=io.StringIO()), "gpt", 10), PlainView)
    assert isinstance(view_for(terminal(40), "gpt", 10), PlainView)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        assert isinstance(view_for(Console(file=file, width=80, _environ={"TERM": "xterm"}), "gpt", 10), LiveView)
    os.close(master)
