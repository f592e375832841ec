"""The promise that makes everything else testable: one digest, whatever the shape, and that of a plain loop."""

from __future__ import annotations

import math

import pytest

from tests.engine.plain import plain_train
from tests.engine.processes import load, small_config, train_on

SHAPES = [(1, None), (2, None), (3, None), (2, 2), (5, 2), (3, 3)]


@pytest.fixture(scope="module")
def plain():
    cache = {}

    def digest(config):
        key = str(config.to_dict())
        if key not in cache:
            cache[key] = plain_train(load(config), config.train)
        return cache[key]

    return digest


@pytest.mark.parametrize(("nodes", "stages"), SHAPES)
def test_shape_does_not_show(nodes, stages, plain, tmp_path):
    config = small_config()
    digest, messages = train_on(config, nodes, tmp_path, stages)
    expected, losses = plain(config)
    assert digest == expected
    told = [m for m in messages[0] if m["ev"] == "step"]
    assert [m["loss"] for m in told] == losses
    assert [m["step"] for m in told] == list(range(1, 7))
    assert (told[-1]["samples"], told[-1]["lost"], told[-1]["repeated"]) == (6 * 16, 0, 0)


@pytest.mark.parametrize(
    ("params", "train"),
    [({"tied": True}, {}), ({"weighted": True}, {}), ({}, {"precision": "bf16"}), ({}, {"clip_norm": 0.05})],
    ids=["tied", "weighted", "bf16", "clipped"],
)
def test_variants(params, train, plain, tmp_path):
    config = small_config(params, **train)
    expected, _ = plain(config)
    for nodes, stages in ((1, None), (5, 2)):
        assert train_on(config, nodes, tmp_path, stages)[0] == expected, (nodes, stages)


def test_seed_and_step_count_show(plain):
    digests = [plain(small_config(**train))[0] for train in ({}, {"seed": 4}, {"steps": 5}, {"clip_norm": 0.05})]
    assert len(set(digests)) == len(digests)


def test_fast_agrees_with_plain_float32(plain, tmp_path):
    config = small_config(reduction="fast")
    digest, messages = train_on(config, 5, tmp_path, 2)
    assert digest is not None
    losses = [m["loss"] for m in messages[0] if m["ev"] == "step"]
    for step, (ours, theirs) in enumerate(zip(losses, plain(config)[1], strict=True)):
        assert math.isclose(ours, theirs, rel_tol=1e-5), step


def test_evaluation_is_the_same_on_every_shape(tmp_path):
    config = small_config({"evaluate": True})
    seen = []
    for nodes, stages in ((1, None), (2, None), (5, 2)):
        _, messages = train_on(config, nodes, tmp_path, stages)
        seen.append({m["step"]: m["eval_loss"] for m in messages[0] if m["ev"] == "step"})
    assert seen[0] == seen[1] == seen[2]
    assert [step for step, value in seen[0].items() if value is not None] == [3, 6]
