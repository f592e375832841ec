"""The commit vote: what travels, and what is decided from the sum."""

from __future__ import annotations

import json
import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engine.units import Unit
from elastic.engine.vote import FLAGS, Ballot, Layout, Verdict, bits, decide, double

# Two layers and a weight that they share: three units, four leaves. Four microbatches of two samples, two pipelines.
UNITS = (Unit("a", (0,)), Unit("b", (1,)), Unit("a.w", (0, 1), ((0, "w"), (1, "w"))))
LAYOUT = Layout.of(4, 2, UNITS, 2)
EXPONENTS = (30, 30, 30)


def ballot_of(losses=(2.0, 4.0, 6.0, 8.0), weights=(2, 2, 2, 2), counts=(2, 2, 2, 2), squares=(9.0, 16.0, 0.0)):
    ballot = Ballot(LAYOUT)
    for m in range(4):
        ballot.loss(m, losses[m], float(weights[m]))
        ballot.samples(m, counts[m])
    for unit in range(3):
        ballot.norm(unit, squares[unit])
    for pipeline in range(2):
        for leaf in range(4):
            ballot.largest(pipeline, leaf, 1.0 + leaf)
    return ballot


def verdict_of(ballot, **changes):
    options = {
        "microbatch_size": 2, "exponents": EXPONENTS, "exact": True, "clip_norm": None, "non_finite": "stop",
    }  # fmt: skip
    return decide(ballot.values, ballot.layout, **{**options, **changes})


# Doubles as integers


@given(st.floats())
def test_every_double_travels_unchanged(value):
    assert struct.pack("<d", double(bits(value))) == struct.pack("<d", value)
    assert -(2**63) <= bits(value) < 2**63


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_int64_that_is_no_signalling_nan_is_a_double(value):
    if not math.isnan(double(value)):
        assert bits(double(value)) == value


def test_the_doubles_that_are_easily_lost():
    assert math.copysign(1.0, double(bits(-0.0))) == -1.0
    assert bits(0.0) == 0  # so that ranks without a say contribute nothing
    assert math.isnan(double(bits(math.nan)))
    assert double(bits(-math.inf)) == -math.inf
    assert double(bits(5e-324)) == 5e-324


# Layout


@given(
    microbatches=st.integers(1, 6),
    evaluations=st.integers(0, 4),
    pipelines=st.integers(1, 4),
    units=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6),
)
@settings(max_examples=100)
def test_every_place_of_the_vector_has_one_meaning(microbatches, evaluations, pipelines, units):
    layout = Layout.of(microbatches, evaluations, [Unit("u", tuple(sorted(u))) for u in units], pipelines)
    places = [layout.flag(name) for name in FLAGS]
    places += [layout.loss(m) + k for m in range(microbatches) for k in range(3)]
    places += [layout.evaluation(m) + k for m in range(evaluations) for k in range(2)]
    places += [layout.norm(u) for u in range(len(units))]
    places += [layout.largest(p, leaf) for p in range(pipelines) for leaf in range(len(layout.leaves))]
    assert sorted(places) == list(range(layout.size))
    assert len(layout.leaves) == sum(len(u) for u in units)


def test_any_partition_of_the_entries_sums_to_the_same_vector(seed):
    draw = random.Random(seed)
    whole = ballot_of(losses=(2.0, -4.5, 1e300, 8.0))
    whole.flag("stop_requested")
    expected = verdict_of(whole)
    for ranks in (2, 3, 7):
        parts = [Ballot(LAYOUT) for _ in range(ranks)]
        for at, value in enumerate(whole.values):
            draw.choice(parts).values[at] = value
        summed = Ballot(LAYOUT)
        summed.values = [sum(column) for column in zip(*(part.values for part in parts), strict=True)]
        assert summed.values == whole.values
        assert verdict_of(summed) == expected


def test_flags_of_several_ranks_are_counts():
    ballot = ballot_of()
    ballot.values[LAYOUT.flag("stop_requested")] = 3
    ballot.values[LAYOUT.flag("switch_ready")] = 2
    assert verdict_of(ballot).stop_requested
    assert verdict_of(ballot).switch_ready == 2
    assert not verdict_of(ballot_of()).stop_requested
    assert verdict_of(ballot_of()).switch_ready == 0


# Verdicts


def test_commit():
    verdict = verdict_of(ballot_of())
    assert verdict.kind == "commit"
    assert (verdict.loss, verdict.weight) == (20.0 / 8, 8.0)
    assert verdict.grad_norm == 5.0 / 8
    assert verdict.factor == 1.0 / 8
    assert verdict.largest == (1.0, 2.0, 4.0)
    assert (verdict.samples, verdict.lost, verdict.repeated) == (8, 0, 0)
    assert (verdict.eval_loss, verdict.stop_requested, verdict.reason) == (None, False, "")


@pytest.mark.scenario
def test_scenario_38_the_mean_is_over_samples_not_over_pipelines():
    # One pipeline computed three microbatches, the other one: the mean of the pipelines' means would be 4.0.
    assert verdict_of(ballot_of(losses=(2.0, 2.0, 2.0, 14.0))).loss == 20.0 / 8


@pytest.mark.scenario
@given(
    tokens=st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1000)), min_size=4, max_size=4).filter(
        lambda each: sum(weight for _, weight in each) > 0
    )
)
@settings(max_examples=100)
def test_scenario_38_token_weights(tokens):
    losses, weights = zip(*tokens, strict=True)
    verdict = verdict_of(ballot_of(losses=losses, weights=weights))
    assert verdict.kind == "commit"
    assert verdict.loss == pytest.approx(math.fsum(losses) / sum(weights))
    assert verdict.factor == 1.0 / sum(weights)


def test_a_microbatch_without_weight_is_fine():
    verdict = verdict_of(ballot_of(losses=(0.0, 4.0, 6.0, 8.0), weights=(0, 2, 2, 2)))
    assert (verdict.kind, verdict.loss) == ("commit", 3.0)


@pytest.mark.parametrize(
    ("clip_norm", "factor"), [(None, 1.0), (1.0, 1.0), (5.0 / 8, 1.0), (0.25, 0.25 / 0.625), (1e-9, 1e-9 / 0.625)]
)
def test_clipping_is_by_the_norm_of_the_mean_gradient(clip_norm, factor):
    verdict = verdict_of(ballot_of(), clip_norm=clip_norm)
    assert verdict.factor == factor / 8
    assert verdict.grad_norm == 0.625  # as it was before


def test_a_zero_gradient_is_not_divided_by():
    verdict = verdict_of(ballot_of(squares=(0.0, 0.0, 0.0)), clip_norm=1.0)
    assert (verdict.kind, verdict.factor) == ("commit", 1.0 / 8)


@pytest.mark.scenario
@pytest.mark.parametrize(("policy", "kind"), [("stop", "stop"), ("skip", "skip")])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("microbatch", [0, 3])
def test_scenario_37_one_bad_loss_is_enough(policy, kind, bad, microbatch):
    losses = [2.0, 4.0, 6.0, 8.0]
    losses[microbatch] = bad
    verdict = verdict_of(ballot_of(losses=losses), non_finite=policy)
    assert verdict.kind == kind
    assert verdict.reason == "the loss or a gradient is not finite"
    assert (verdict.samples, verdict.lost) == (8, 0)


@pytest.mark.scenario
def test_scenario_37_infinities_of_both_signs():
    verdict = verdict_of(ballot_of(losses=(math.inf, -math.inf, 1.0, 1.0)), non_finite="skip")
    assert verdict.kind == "skip"
    assert math.isnan(verdict.loss)


@pytest.mark.scenario
@pytest.mark.parametrize("pipeline", [0, 1])
@pytest.mark.parametrize("leaf", range(4))
def test_scenario_37_one_bad_gradient_on_one_rank(pipeline, leaf):
    ballot = ballot_of()
    ballot.largest(pipeline, leaf, math.inf)
    assert verdict_of(ballot).kind == "stop"
    assert verdict_of(ballot, non_finite="skip").kind == "skip"


def test_the_flag_alone_and_a_norm_that_overflowed():
    flagged = ballot_of()
    flagged.flag("non_finite")
    assert verdict_of(flagged).kind == "stop"
    for value in (math.inf, math.nan):
        assert verdict_of(ballot_of(squares=(1.0, value, 1.0)), exact=False).kind == "stop"


def test_no_weight_at_all():
    verdict = verdict_of(ballot_of(losses=(0.0,) * 4, weights=(0,) * 4), non_finite="skip")
    assert (verdict.kind, verdict.factor) == ("skip", 0.0)
    assert verdict.reason == "the loss weights sum to zero"
    assert math.isnan(verdict.loss)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_that_make_no_mean(weight):
    assert verdict_of(ballot_of(weights=(weight, 0.0, 0.0, 0.0))).kind == "stop"


@pytest.mark.parametrize("leaf", range(4))
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gradient_too_large_for_its_scale_is_redone(leaf, policy):
    copies = 1 if leaf < 2 else 2
    top = 2.0**32 / (4 * copies)  # 2^62 / 2^30 / microbatches, and half of it for the shared weight
    ballot = ballot_of()
    ballot.largest(1, leaf, math.nextafter(top, 0.0))
    assert verdict_of(ballot, non_finite=policy).kind == "commit"
    ballot.largest(1, leaf, top)
    verdict = verdict_of(ballot, non_finite=policy, clip_norm=1e-3)
    assert verdict.kind == "redo"
    assert max(verdict.largest) == top
    assert verdict_of(ballot, exact=False).kind == "commit"  # float32 has no such limit


def test_terms_are_microbatches_times_copies():
    assert LAYOUT.terms == (4, 4, 8)


def test_a_verdict_goes_through_json_unchanged():
    for ballot in (ballot_of(), ballot_of(losses=(math.inf, 1.0, 1.0, 1.0)), ballot_of(weights=(0,) * 4)):
        verdict = verdict_of(ballot)
        again = Verdict.from_json(json.loads(json.dumps(verdict.to_json())))
        assert repr(again) == repr(verdict)  # == would not do for NaN


def test_every_unit_has_its_own_scale():
    ballot = ballot_of()
    ballot.largest(0, 1, 2.0**29)
    assert LAYOUT.leaves[1] == (1, 1)
    assert verdict_of(ballot, exponents=(30, 30, 30)).kind == "commit"
    assert verdict_of(ballot, exponents=(30, 31, 30)).kind == "redo"
    assert verdict_of(ballot, exponents=(31, 30, 31)).kind == "commit"


def test_not_finite_outranks_too_large():
    ballot = ballot_of()
    ballot.largest(0, 0, 2.0**40)
    ballot.largest(0, 1, math.inf)
    assert verdict_of(ballot, non_finite="skip").kind == "skip"


def test_a_norm_that_is_garbage_because_of_an_overflow_does_not_stop_the_job():
    ballot = ballot_of(squares=(1.0, math.inf, 1.0))
    ballot.largest(0, 1, 2.0**40)
    assert verdict_of(ballot).kind == "redo"


def test_lost_and_repeated_samples_do_not_cancel():
    verdict = verdict_of(ballot_of(counts=(2, 4, 0, 1)))
    assert (verdict.samples, verdict.lost, verdict.repeated) == (7, 3, 2)


def test_held_out_loss_rides_along():
    ballot = ballot_of()
    ballot.evaluation(0, 6.0, 2.0)
    ballot.evaluation(1, 4.0, 8.0)
    verdict = verdict_of(ballot)
    assert verdict.eval_loss == 1.0
    assert verdict.loss == 2.5


def test_held_out_loss_alone_in_the_closing_vote():
    ballot = Ballot(LAYOUT)
    ballot.evaluation(0, math.nan, 2.0)
    ballot.evaluation(1, 4.0, 2.0)
    assert math.isnan(verdict_of(ballot).eval_loss)
    assert verdict_of(Ballot(LAYOUT)).eval_loss is None
