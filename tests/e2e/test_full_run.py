"""The shipped example, whole: it learns, and what it learns is what a plain loop learns."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.e2e.harness import CONFIGS, plain_digest

BYTES = CONFIGS / "gpt-bytes.yaml"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gpt_bytes(elastic):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        plain = pool.apply_async(plain_digest, (BYTES,))  # meanwhile: each would leave processors idle alone
        ended = elastic.train(BYTES).wait(800)
        digest, losses = plain.get(800)
    assert ended.code == 0, ended
    document = ended.document
    print(f"loss after {document['step']} steps: {document['loss']:.4f} nats per byte, plain loop {losses[-1]:.4f}")
    assert document["step"] == len(losses) == 200
    assert document["loss"] < 2.6
    assert document["loss"] == pytest.approx(losses[-1], rel=1e-6)
    assert document["params_digest"] == digest
