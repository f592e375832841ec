"""One job on every shape of cluster, through the whole product: one digest, that of a plain loop."""

from __future__ import annotations

import pytest

from tests.e2e.harness import CONFIGS, DOCUMENT_KEYS, plain_digest

STEPS = 4
MICROBATCHES = 8  # of a step
WHOLE, HALF = CONFIGS / "gpt-bytes.yaml", CONFIGS / "gpt-bytes-pipeline.yaml"


@pytest.fixture(scope="module")
def plain():
    return plain_digest(WHOLE, f"train.steps={STEPS}")


@pytest.mark.parametrize(
    ("config", "nodes", "settings", "sizes"),
    [
        (WHOLE, 1, {}, [1]),
        (WHOLE, 4, {}, [1, 1, 1, 1]),
        (HALF, 2, {}, [2]),
        (HALF, 5, {}, [2, 3]),
        (HALF, 7, {}, [2, 2, 3]),
        (HALF, 1, {"cluster__device_memory": "null"}, [1]),
    ],
)
def test_one_digest(elastic, plain, config, nodes, settings, sizes):
    ended = elastic.train(config, train__steps=STEPS, cluster__nodes=nodes, **settings).wait()
    assert ended.code == 0, ended
    document = ended.document
    digest, losses = plain
    assert document["params_digest"] == digest
    assert document["loss"] == pytest.approx(losses[-1], rel=1e-6)
    assert sorted(map(len, document["plans"][0]["pipelines"])) == sizes
    assert sorted(node for p in document["plans"][0]["pipelines"] for node in p) == [f"node-{i}" for i in range(nodes)]
    check_document(document, config.stem)


def check_document(document, job):
    assert document.keys() == DOCUMENT_KEYS
    samples = STEPS * MICROBATCHES * 4
    expected = {
        "job": job, "state": "done", "step": STEPS, "generation": 1, "resumed_from": None, "steps_trained": STEPS,
        "samples": samples, "samples_lost": 0, "samples_repeated": 0, "epoch": 1, "recoveries": [],
        "reconfigurations": [],
    }  # fmt: skip
    assert {key: document[key] for key in expected} == expected
    assert isinstance(document["checkpoints"], list)
    (plan,) = document["plans"]
    assert plan.keys() == {"epoch", "pipelines", "reason"}
    assert plan["epoch"] == 1
    assert plan["reason"]


def test_another_seed_gives_another_digest(elastic, plain):
    ended = elastic.train(WHOLE, train__steps=STEPS, train__seed=1, cluster__nodes=2).wait()
    assert ended.code == 0, ended
    assert ended.document["params_digest"] not in (None, plain[0])
    assert ended.document["loss"] != plain[1][-1]
