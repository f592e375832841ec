"""Scenarios on a real job, by the command."""

from __future__ import annotations

import pytest
import yaml

from tests.e2e.harness import CONFIGS, Elastic


def shortened(tmp_path, **changes):
    scenario = yaml.safe_load((CONFIGS / "chaos/single-node.yaml").read_text()) | changes
    scenario["config"] = str(CONFIGS / "gpt-tiny.yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(scenario))
    return path


@pytest.mark.timeout(300)
def test_a_killed_node_is_survived_and_a_promise_too_high_is_not_kept(tmp_path):
    elastic = Elastic(tmp_path)
    faults = [
        {"at": {"step": 10}, "do": "kill", "to": "node"},
        {"at": {"event": "recovered"}, "do": "kill", "to": "controller"},
        {"at": {"step": 100000}, "do": "kill", "to": "worker"},
    ]
    path = shortened(tmp_path, faults=faults[:2], set=["train.steps=60"])
    ended = elastic("chaos", "run", path, "--seed", "3", "--json", timeout_s=200)
    assert ended.code == 0, ended
    document = ended.document
    assert document["passed"] is True
    assert [(one["do"], one["to"]) for one in document["faults"]] == [("kill", "node"), ("kill", "controller")]
    assert len(document["recoveries"]) == 1

    path = shortened(tmp_path, faults=[faults[2]], set=["train.steps=4"])
    ended = elastic("chaos", "run", path, "--seed", "3", timeout_s=200)
    assert ended.code == 1, ended
    assert "FAIL  faults fired" in ended.out
    assert f"elastic chaos run {path} --seed 3" in ended.out


def test_the_list_and_a_scenario_that_is_none(tmp_path):
    elastic = Elastic(tmp_path)
    listed = elastic("chaos", "list", "--folder", CONFIGS / "chaos")
    assert listed.code == 0, listed
    assert "one node dies, and comes back" in listed.out
    (tmp_path / "bad.yaml").write_text("name: x\n")
    refused = elastic("chaos", "run", "bad.yaml")
    assert refused.code == 2, refused
    assert "Traceback" not in refused.err
