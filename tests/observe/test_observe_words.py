"""Sentences, the result document, and the small pieces of text they are made of."""

from __future__ import annotations

import json
import math

import pytest

from elastic.errors import NonFinite, UserCodeError
from elastic.observe.sentences import sentence
from elastic.observe.summary import exit_code, finite, summarize
from elastic.observe.text import duration, number, one_line, short_time, shorten, sparkline

PLAN = {
    "kind": "plan",
    "epoch": 1,
    "pipelines": [["node-0", "node-1"], ["node-2", "node-3", "node-4"]],
    "spares": [],
    "reason": "5 nodes: 3 and 5 microbatches",
}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"kind": "started", "config": "a.yaml", "nodes": 4}, "started a.yaml on 4 nodes"),
        ({"kind": "started", "config": "a.yaml", "nodes": 1}, "started a.yaml on 1 node"),
        ({"kind": "node_joined", "node": "node-2", "incarnation": "x"}, "node-2 joined"),
        ({"kind": "node_left", "node": "node-2", "incarnation": "x"}, "node-2 left"),
        ({"kind": "node_refused", "node": "node-2", "reason": "no AVX"}, "node-2 was refused: no AVX"),
        ({"kind": "waiting", "reason": "2 nodes needed"}, "waiting: 2 nodes needed"),
        (PLAN, "epoch 1: 2 pipelines (2, 3): 5 nodes: 3 and 5 microbatches"),
        (
            {**PLAN, "pipelines": [["a"]] * 9 + [["a", "b"]]},
            "epoch 1: 10 pipelines (9 of 1, 1 of 2): " + PLAN["reason"],
        ),
        ({"kind": "formed", "epoch": 3}, "epoch 3 formed, training"),
        ({"kind": "stop_requested"}, "stopping at the next voted step"),
        (
            {"kind": "rollback", "lineage": 1, "manifest": "m", "to_step": 50, "lost_steps": 1},
            "no copy of some layers is left: back to the checkpoint of step 50, 1 step lost",
        ),
        (
            {"kind": "rollback", "lineage": 1, "manifest": "", "to_step": 0, "lost_steps": 7},
            "no copy of some layers is left: back to the start, 7 steps lost",
        ),
        ({"kind": "resumed", "lineage": 1, "manifest": "m", "step": 50}, "resumes from the checkpoint of step 50"),
        (
            {"kind": "checkpoint_saved", "step": 50, "bytes": 99620, "stall_s": 0.0014, "upload_s": 0.25},
            "checkpoint of step 50 saved: 97.3 KiB in 0.25 s, stalled for 1 ms",
        ),
        (
            {"kind": "checkpoint_failed", "step": 50, "reason": "the disk is full"},
            "checkpoint of step 50 failed, training goes on: the disk is full",
        ),
        (
            {"kind": "checkpoint_rejected", "step": 50, "manifest": "m", "reason": "pack 3 is missing"},
            "the checkpoint of step 50 is damaged, an older one is used: pack 3 is missing",
        ),
        (
            {"kind": "hung", "node": "node-1", "what": "reading sample 3", "for_s": 7.25, "runs": True},
            "node-1 hangs: no step for 7.2 s, it was at: reading sample 3",
        ),
        (
            {"kind": "standstill", "for_s": 7.0},
            "no step for 7.0 s though all nodes wait for each other: they form again",
        ),
        (
            {"kind": "recovered", "losses": [{"node": "n1", "cause": "node"}], "total_s": 0.312, "lost_steps": 0},
            "recovered from the loss of n1 (node) in 0.31 s, nothing lost",
        ),
        (
            {
                "kind": "recovered",
                "losses": [{"node": f"n{i}", "cause": cause} for i, cause in enumerate(("node", "hang", "node"))],
                "total_s": 0.312,
                "lost_steps": 1,
                "pipelines": [3, 3],
            },
            "n0 and n2 died, worker of n1 hung · 3 pipelines kept · 0.31 s · 1 step lost",
        ),
        ({"kind": "ended", "state": "done", "step": 200, "loss": 2.14321}, "done at step 200, loss 2.1432"),
        ({"kind": "ended", "state": "stopped", "step": 0, "loss": None}, "stopped at step 0"),
        (
            {"kind": "ended", "state": "failed", "step": 3, "node": "node-1", "error": {"message": "two\nlines"}},
            "failed at step 3 on node-1: two lines",
        ),
    ],
)
def test_every_kind_has_its_sentence(event: dict, expected: str) -> None:
    assert sentence({"seq": 1, "time": 0.0, **event}) == expected


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"kind": "spot_notice", "node": "node-1", "grace_s": 30}, "spot notice: node node-1, grace_s 30"),
        ({"kind": "snapshot"}, "snapshot"),
        ({"kind": "plan", "epoch": 2}, "plan: epoch 2"),
        ({"kind": "ended", "state": "failed", "step": 1, "error": "text"}, "ended: state failed, step 1, error text"),
        ({}, "event without a kind"),
    ],
)
def test_what_is_unknown_or_incomplete_lists_what_it_holds(event: dict, expected: str) -> None:
    assert sentence({"seq": 1, "time": 0.0, **event}) == expected


def test_terminal_codes_in_an_event_have_no_effect() -> None:
    assert sentence({"kind": "waiting", "reason": "\x1b[31mred\x1b[0m\r\x1bnot"}) == "waiting: red not"


STEPS = [
    {"step": 1, "loss": 5.0, "samples": 32, "lost": 0, "repeated": 0},
    {"step": 2, "loss": 4.0, "samples": 64, "lost": 1, "repeated": 0},
]
EVENTS = [
    {"kind": "started", "config": "a.yaml", "nodes": 5},
    PLAN,
    {"kind": "formed", "epoch": 1},
    {**PLAN, "epoch": 2},
]


def test_the_document_of_a_finished_run() -> None:
    result = {"state": "done", "step": 2, "loss": 4.0, "params_digest": "ab", "samples": 64, "lost": 1, "repeated": 2}
    assert summarize("gpt", EVENTS, STEPS, result) == {
        "job": "gpt",
        "state": "done",
        "step": 2,
        "loss": 4.0,
        "params_digest": "ab",
        "generation": 1,
        "resumed_from": None,
        "steps_trained": 2,
        "samples": 64,
        "samples_lost": 1,
        "samples_repeated": 2,
        "epoch": 1,  # the second plan never formed
        "recoveries": [],
        "reconfigurations": [],
        "checkpoints": [],
        "plans": [
            {"epoch": 1, "pipelines": PLAN["pipelines"], "reason": PLAN["reason"]},
            {"epoch": 2, "pipelines": PLAN["pipelines"], "reason": PLAN["reason"]},
        ],
    }


def test_a_failed_run_counts_the_steps_committed_before() -> None:
    error = UserCodeError("ValueError in the loss", "hint", "Traceback").as_json()
    result = {"state": "failed", "step": 0, "loss": None, "params_digest": None, "error": error, "node": "node-1"}
    document = summarize("gpt", EVENTS, STEPS, result)
    assert (document["step"], document["loss"], document["samples"], document["error"]) == (2, 4.0, 64, error)


def test_a_resumed_run_counts_its_own_steps() -> None:
    result = {"state": "done", "step": 60, "loss": 1.0, "params_digest": "ab"}
    resumed = {"kind": "resumed", "lineage": 1, "manifest": "m", "step": 50}
    document = summarize("gpt", [resumed], [], result, generation=2)
    assert (document["generation"], document["steps_trained"]) == (2, 10)
    assert document["resumed_from"] == {"generation": 2, "step": 50}
    undone = {"kind": "rollback", "lineage": 2, "manifest": "", "to_step": 40, "lost_steps": 13}
    assert summarize("gpt", [resumed, undone], [], result)["steps_trained"] == 20


def test_a_run_without_a_result_goes_on() -> None:
    document = summarize("gpt", EVENTS, STEPS, None)
    assert (document["state"], document["step"], document["params_digest"]) == ("running", 2, None)


def test_numbers_that_json_does_not_have_become_null() -> None:
    document = summarize("gpt", [], [], {"state": "stopped", "step": 1, "loss": math.nan})
    assert json.loads(json.dumps(document, allow_nan=False))["loss"] is None
    assert finite({"a": [math.inf, 1.0, {"b": math.nan}], "c": (1,)}) == {"a": [None, 1.0, {"b": None}], "c": [1]}


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ({"state": "done"}, 0),
        ({"state": "stopped"}, 0),
        ({"state": "running"}, 0),
        ({"state": "interrupted"}, 130),
        ({"state": "failed"}, 1),
        ({"state": "failed", "error": NonFinite("nan").as_json()}, 1),
        ({"state": "failed", "error": {"code": "etcd_unreachable", "message": "m"}}, 3),
        ({"state": "failed", "error": {"code": "too_few_nodes", "message": "m"}}, 2),
    ],
)
def test_the_exit_code_follows_the_state(document: dict, code: int) -> None:
    assert exit_code(document) == code


def test_a_sparkline_fits_and_shows_the_shape() -> None:
    assert sparkline([1.0, 2.0, 3.0], 10) == "▁▅█"  # half-way rounds to even
    assert sparkline([5.0] * 4, 10) == "▁▁▁▁"
    assert sparkline([float(i) for i in range(800)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, None, 2.0], 10) == "▁××█"
    assert sparkline([math.nan], 5) == "×"
    assert sparkline([], 5) == ""


def test_short_forms() -> None:
    assert [number(x) for x in (None, 0, 2.43123, 123.45, 12345.6, 3e-5, math.nan)] == [
        "–", "0", "2.4312", "123.5", "12,346", "3e-05", "nan",
    ]  # fmt: skip
    assert [duration(x) for x in (0.2, 42, 723, 3723, 200_000)] == ["0:00", "0:42", "12:03", "1:02:03", "2d 7:33:20"]
    assert [short_time(x) for x in (8.5e-4, 0.0123, 4.56)] == ["850 µs", "12.3 ms", "4.56 s"]
    assert shorten("ip-10-0-0-12.internal", 11) == "ip-10…ernal"
    assert one_line(7) == "7"
