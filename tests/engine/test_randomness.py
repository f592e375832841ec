"""Seeds as a function of names."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engine.randomness import seed_of, set_seed

parts = st.one_of(st.integers(), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8))


@given(st.lists(parts, min_size=1, max_size=5))
def test_a_seed_has_63_bits_and_no_memory(key):
    value = seed_of(*key)
    assert 0 <= value < 2**63
    assert seed_of(*key) == value


@given(st.lists(parts, min_size=1, max_size=4), st.lists(parts, min_size=1, max_size=4))
def test_other_keys_are_other_seeds(one, other):
    assert (seed_of(*one) == seed_of(*other)) == (one == other)


def test_seeds_are_the_same_in_every_release():
    # A change here changes the bits of every job: checkpoints of older versions could not be continued exactly.
    assert seed_of(0, "build", "embed") == 3378086160509669443
    assert seed_of(1) != seed_of("1")
    assert seed_of("a", "b") != seed_of("ab")
    assert seed_of(1, 23) != seed_of(12, 3)


def test_set_seed_decides_what_torch_draws(seed):
    set_seed(seed)
    first = torch.randn(100)
    torch.randn(7)  # whatever ran in between
    set_seed(seed)
    assert torch.equal(torch.randn(100), first)
    set_seed(seed + 1)
    assert not torch.equal(torch.randn(100), first)


def test_the_largest_seed_is_accepted():
    set_seed(2**63 - 1)
    assert torch.initial_seed() == 2**63 - 1
