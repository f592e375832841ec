"""Which samples a step trains on."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engine.cursor import Cursor


def stream(cursor, steps):
    """Indices of the first steps in order, microbatch by microbatch."""
    per_step = cursor.global_batch // cursor.microbatch
    return [i for step in range(steps) for m in range(per_step) for i in cursor.samples(step, m)]


def passes(cursor, count):
    steps = -(-count * cursor.size // cursor.global_batch)
    indices = stream(cursor, steps)
    return [indices[p * cursor.size : (p + 1) * cursor.size] for p in range(count)]


@pytest.mark.scenario
@pytest.mark.parametrize("size", [1, 2, 3, 37, 1000])
@pytest.mark.parametrize(("global_batch", "microbatch"), [(16, 2), (6, 3), (64, 64), (1, 1)])
def test_scenario_20_every_pass_visits_each_sample_once(size, global_batch, microbatch, seed):
    cursor = Cursor(size, global_batch, microbatch, seed)
    for order in passes(cursor, 3):
        assert sorted(order) == list(range(size))


@pytest.mark.scenario
@given(
    size=st.integers(1, 300),
    microbatch=st.integers(1, 9),
    microbatches=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=60, deadline=None)
def test_scenario_20_any_size_and_any_batch(size, microbatch, microbatches, seed):
    cursor = Cursor(size, microbatch * microbatches, microbatch, seed)
    for order in passes(cursor, 2):
        assert sorted(order) == list(range(size))


@pytest.mark.scenario
def test_scenario_20_a_dataset_smaller_than_the_batch_repeats_evenly(seed):
    seen = Counter(stream(Cursor(5, 32, 4, seed), 5))  # 160 samples of 5
    assert seen == dict.fromkeys(range(5), 32)


def test_passes_differ(seed):
    orders = [tuple(order) for order in passes(Cursor(37, 16, 2, seed), 20)]
    assert len(set(orders)) == 20
    assert tuple(range(37)) not in orders


def test_every_order_of_three_samples_comes():
    orders = Counter(tuple(order) for order in passes(Cursor(3, 3, 1, 5), 600))
    assert set(orders) == set(permutations(range(3)))
    assert min(orders.values()) > 50  # 100 expected


def test_no_place_in_a_pass_prefers_a_sample():
    firsts = Counter(order[0] for order in passes(Cursor(10, 10, 1, 7), 2000))
    chi_squared = sum((firsts[i] - 200) ** 2 / 200 for i in range(10))
    assert chi_squared < 33.7  # 9 degrees of freedom, p = 0.0001; the seed is fixed


def test_a_step_does_not_depend_on_what_was_asked_before(seed):
    asked = [(step, m) for step in range(12) for m in range(8)]
    cursor = Cursor(37, 16, 2, seed)
    in_order = {at: cursor.samples(*at) for at in asked}
    random.Random(seed).shuffle(asked)
    assert {at: cursor.samples(*at) for at in asked} == in_order
    assert Cursor(37, 16, 2, seed).samples(11, 7) == in_order[11, 7]


@given(data=st.data(), pipelines=st.integers(1, 4), step=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_any_distribution_of_microbatches_reads_the_same_global_batch(data, pipelines, step):
    cursor = Cursor(1000, 24, 3, 11)
    at = data.draw(st.lists(st.integers(0, pipelines - 1), min_size=8, max_size=8))
    shares = [[m for m in range(8) if at[m] == pipeline] for pipeline in range(pipelines)]
    read = [[cursor.samples(step, m) for m in share] for share in shares]
    together = sorted(chain.from_iterable(chain.from_iterable(read)))
    assert together == sorted(Cursor(1000, 24, 24, 11).samples(step, 0))


def test_microbatches_are_disjoint_within_a_pass():
    cursor = Cursor(1000, 40, 4, 2)
    for step in range(25):  # exactly one pass
        batch = [i for m in range(10) for i in cursor.samples(step, m)]
        assert len(set(batch)) == 40


def test_the_size_of_a_microbatch_does_not_change_the_order(seed):
    orders = [stream(Cursor(37, 24, microbatch, seed), 4) for microbatch in (1, 2, 3, 8, 24)]
    assert all(order == orders[0] for order in orders)


def test_another_seed_is_another_order(seed):
    orders = {tuple(stream(Cursor(1000, 50, 10, seed + i), 20)) for i in range(10)}
    assert len(orders) == 10


def test_late_steps_of_a_large_dataset_are_cheap_and_in_range():
    cursor = Cursor(10**12 + 1, 1024, 4, 3)
    indices = cursor.samples(10**9, 200)
    assert len(set(indices)) == 4
    assert all(0 <= i < 10**12 + 1 for i in indices)
