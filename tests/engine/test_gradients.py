"""Fixed-point sums: exact, in any grouping, with room for every microbatch."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.engine.gradients import (
    BLOCK,
    FIRST_EXPONENT,
    MAX_EXPONENT,
    Gradients,
    add_fixed_point,
    from_fixed_point,
    limit,
    local_units,
    next_exponent,
)
from elastic.engine.layers import LayerState
from elastic.engine.units import Unit
from elastic.engine.vote import Layout
from elastic.errors import JobError

LARGEST_FLOAT = torch.finfo(torch.float32).max
SMALLEST_FLOAT = 2.0**-149  # subnormal

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def fixed(gradient, exponent):
    total = torch.zeros(gradient.shape, dtype=torch.int64)
    add_fixed_point(total, gradient, exponent)
    return total


def exactly(value, exponent):
    """The same rounding over rationals: `round` of a Fraction goes to even."""
    return round(Fraction(value) * Fraction(2) ** exponent)


def layer_of(module, index=0, name="l"):
    return LayerState(index, name, module, None, None)


def gradients_of(*modules, units=None, microbatches=4, exponent=FIRST_EXPONENT, exact=True):
    """The gradients of a single rank that holds a layer per module, and these layers."""
    layers = [layer_of(module, i, f"l{i}") for i, module in enumerate(modules)]
    units = units or [Unit(layer.name, (layer.index,)) for layer in layers]
    local = local_units(units, dict(enumerate(layers)), exact)
    buckets = [(None, tuple(range(len(units))))]
    terms = [microbatches * unit.copies for unit in units]
    return Gradients(local, buckets, [exponent] * len(units), terms, exact), layers


def below(value):
    """The largest float32 below ``value``."""
    near = torch.tensor(min(value, LARGEST_FLOAT), dtype=torch.float32)
    while float(near) >= value:
        near = torch.nextafter(near, torch.tensor(0.0))
    return float(near)


def one_parameter(*values):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(len(values) or 3))
    return module


# Rounding


@given(values=st.lists(floats, min_size=1, max_size=20), exponent=st.integers(-82, MAX_EXPONENT))
@settings(max_examples=300, deadline=None)
def test_rounding_is_exact_with_ties_to_even(values, exponent):
    fitting = [v for v in values if abs(v) < limit(exponent, 1)]
    assert fixed(torch.tensor(fitting), exponent).tolist() == [exactly(v, exponent) for v in fitting]


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (-2.5, -2), (0.75, 1), (-0.0, 0)]
)
def test_ties(value, rounded):
    assert fixed(torch.tensor([value]), 0).tolist() == [rounded]
    assert fixed(torch.tensor([value / 1024]), 10).tolist() == [rounded]


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7])
def test_blocks_leave_nothing_out(size):
    gradient = torch.arange(size, dtype=torch.float32) - 5
    total = torch.full((size,), 3, dtype=torch.int64)
    add_fixed_point(total, gradient, 1)
    assert torch.equal(total, (torch.arange(size) - 5) * 2 + 3)


def test_gradients_may_have_any_layout():
    gradient = torch.randn(6, 10)
    for view in (gradient.t(), gradient[::2, 1::3], gradient[0].expand(4, 10), gradient.select(1, 3)):
        assert not view.is_contiguous()
        assert torch.equal(fixed(view, 20), fixed(view.clone(memory_format=torch.contiguous_format), 20))
    scalar = torch.tensor(1.25)
    assert fixed(scalar, 2) == 5


@given(
    parts=st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=8),
    exponent=st.integers(-70, 60),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_any_grouping_and_order_is_the_same_integer(parts, exponent, data):
    top = limit(exponent, len(parts))
    gradients = [torch.tensor([v if abs(v) < top else 0.0 for v in part]) for part in parts]
    expected = [sum(exactly(float(g[k]), exponent) for g in gradients) for k in range(3)]
    order = data.draw(st.permutations(range(len(parts))))
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts)))
    partial = torch.zeros(3, 3, dtype=torch.int64)
    for i in order:
        add_fixed_point(partial[owner[i]], gradients[i], exponent)
    assert partial.sum(0).tolist() == expected


def test_a_float_sum_would_depend_on_the_order():
    # What the integers are for: with these the float32 sum is 0 or 1.
    big, one = torch.tensor([2.0**25]), torch.tensor([1.0])
    assert (big + one) - big != (big - big) + one
    total = fixed(big, 10)
    add_fixed_point(total, one, 10)
    add_fixed_point(total, -big, 10)
    assert total.tolist() == [1024]


@given(total=st.integers(-(2**62), 2**62), exponent=st.integers(-50, MAX_EXPONENT))
@settings(max_examples=300, deadline=None)
def test_back_to_float_rounds_once(total, exponent):
    out = torch.empty(1)
    from_fixed_point(torch.tensor([total]), exponent, out)
    # float32 of the integer is the only rounding: the power of two after it is exact.
    assert Fraction(float(out)) == Fraction(float(torch.tensor(total).to(torch.float32))) * Fraction(2) ** -exponent


def test_there_and_back_is_the_identity_for_values_on_the_grid(seed):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    exponent = next_exponent(0, float(values.abs().max()), 1)
    out = torch.empty(1000)
    from_fixed_point(fixed(values, exponent), exponent, out)
    coarse = values.abs() < values.abs().max() / 2**28  # those may lose bits, the others have all 24 within the grid
    assert torch.equal(out[~coarse], values[~coarse])


# Scale


def depth_and_terms():
    """How far below the largest gradient an element may lie, as a power of two, so that it keeps 24 bits, and for how
    many summands: 20, with the next gradients 2^8 smaller as well up to 32 summands and 2^(13-k) smaller for 2^k."""
    return [(28, 1), (28, 2), (28, 16), (28, 31), (28, 32), (27, 33), (27, 64), (24, 2**9), (21, 2**12), (20, 2**13)]


@given(
    largest=st.floats(SMALLEST_FLOAT, LARGEST_FLOAT, width=32),
    terms=st.one_of(st.integers(1, 2**17), st.sampled_from([2**k for k in range(18)])),
    old=st.integers(),
)
@settings(max_examples=500)
def test_the_next_exponent_gives_room_and_precision(largest, terms, old):
    exponent = next_exponent(old, largest, terms)
    assert -88 <= exponent <= MAX_EXPONENT
    assert largest * 2**5 < limit(exponent, terms)  # gradients 32 times larger are no overflow
    if largest >= 2.0**-74:
        depth = next((depth for depth, most in reversed(depth_and_terms()) if most == terms), None)
        depth = min(28, 33 - (terms - 1).bit_length()) if depth is None else depth
        assert Fraction(largest) / 2**depth * Fraction(2) ** exponent >= 2**23  # 24 significant bits
        assert depth >= 20 or terms > 2**13


@pytest.mark.parametrize(("depth", "terms"), depth_and_terms())
def test_how_deep_24_bits_go(depth, terms, seed):
    draw = random.Random(seed)
    for _ in range(200):
        mantissa = draw.randrange(2**23, 2**24)
        largest = math.ldexp(mantissa, draw.randrange(-60, 40))
        exponent = next_exponent(0, largest, terms)
        element = torch.tensor([math.ldexp(draw.randrange(mantissa, 2**24) | 1, -depth)], dtype=torch.float32)
        element *= largest / mantissa  # a power of two: the element is odd in its last bit
        back = torch.empty(1)
        from_fixed_point(fixed(element, exponent), exponent, back)
        assert torch.equal(back, element)
    # and no deeper: a largest gradient that is a power of two leaves the last bit of this element out
    element = torch.tensor([math.ldexp(2**23 + 1, -23 - depth - 1)])
    exponent = next_exponent(0, 1.0, terms)
    from_fixed_point(fixed(element, exponent), exponent, back)
    assert not torch.equal(back, element)


def test_exponents_of_extreme_magnitudes():
    assert next_exponent(17, 0.0, 8) == 17
    assert next_exponent(17, SMALLEST_FLOAT, 8) == MAX_EXPONENT
    assert next_exponent(17, LARGEST_FLOAT, 8) == 52 - 128
    assert next_exponent(17, LARGEST_FLOAT, 2**17) == 40 - 128
    assert next_exponent(17, 1.0, 8) == 51
    assert next_exponent(17, math.nextafter(1.0, 0.0), 8) == 52
    assert [next_exponent(17, 1.0, terms) for terms in (1, 32, 33, 64, 65, 2**12)] == [51, 51, 50, 50, 49, 44]
    # The scale and its inverse are normal float32 numbers, so multiplying by them is exact.
    for exponent in (MAX_EXPONENT, -88):
        for scale in (math.ldexp(1.0, exponent), math.ldexp(1.0, -exponent)):
            assert torch.finfo(torch.float32).tiny <= scale <= LARGEST_FLOAT


@given(
    exponent=st.integers(-60, MAX_EXPONENT),  # below, every float32 fits
    terms=st.one_of(st.integers(1, 5000), st.sampled_from([2**k for k in range(20)])),
)
@settings(max_examples=300)
def test_the_limit_keeps_the_worst_sum_below_2_to_the_62(exponent, terms):
    top = below(limit(exponent, terms))
    worst = exactly(top, exponent) * terms
    assert worst < 2**62
    # and it does not throw room away: one more float32 is too much
    above = float(torch.nextafter(torch.tensor(top), torch.tensor(math.inf)))
    if math.isfinite(above):
        assert exactly(above, exponent) * terms >= 2**62


def test_a_redo_ends_for_any_number_of_terms():
    for terms in (1, 16, 33, 2**12, 2**17):
        largest = 1.5 * limit(FIRST_EXPONENT, terms)
        assert largest < limit(next_exponent(FIRST_EXPONENT, largest, terms), terms)
    assert limit(next_exponent(FIRST_EXPONENT, LARGEST_FLOAT, 2**17), 2**17) > LARGEST_FLOAT


def test_the_first_exponent_has_room():
    # The gradients of a first step are seldom above 2^9 per microbatch, and if they are, it is done again.
    assert limit(FIRST_EXPONENT, 2**9) == 2**9


# One rank's gradients


def test_largest_and_sum_over_microbatches():
    gradients, layers = gradients_of(one_parameter())
    weight = layers[0].module.weight
    for values in ([1.0, -2.0, 0.0], [0.5, 0.5, -3.5]):
        weight.grad = torch.tensor(values)
        gradients.add_microbatch(layers)
        assert weight.grad is None  # taken: autograd must not add to it
    assert gradients.largest == {(0, 0): 3.5}
    gradients.reduce(lambda: None)
    (slot,) = gradients.units[0].slots
    assert slot.gradient.tolist() == [1.5, -1.5, -3.5]
    assert gradients.squared_norm(gradients.units[0]) == pytest.approx(2.25 + 2.25 + 12.25)
    gradients.apply_factor(0.5)
    assert weight.grad.tolist() == [0.75, -0.75, -1.75]
    gradients.clear()
    assert weight.grad is None
    assert gradients.largest == {}
    gradients.reduce(lambda: None)
    assert slot.gradient.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.scenario
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_scenario_37_what_is_not_finite_is_seen_and_never_converted(bad, at):
    gradients, layers = gradients_of(one_parameter())
    weight = layers[0].module.weight
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    gradients.add_microbatch(layers)
    spoiled = torch.tensor([1.0, 1.0, 1.0])
    spoiled[at] = bad
    weight.grad = spoiled
    gradients.add_microbatch(layers)
    weight.grad = torch.tensor([1.0, 1.0, 1.0])
    gradients.add_microbatch(layers)
    assert gradients.largest == {(0, 0): math.inf}
    gradients.reduce(lambda: None)
    assert gradients.units[0].slots[0].gradient.tolist() == [2.0, 3.0, 4.0]


def test_too_large_for_the_scale_is_told_and_not_added():
    gradients, layers = gradients_of(one_parameter(), microbatches=4)
    top = limit(FIRST_EXPONENT, 4)
    layers[0].module.weight.grad = torch.tensor([0.0, -top, 1.0])
    gradients.add_microbatch(layers)
    assert gradients.largest == {(0, 0): top}
    assert gradients.units[0].slots[0].sum.tolist() == [0, 0, 0]


def test_largest_is_per_unit_and_layer():
    gradients, layers = gradients_of(one_parameter(), one_parameter())
    for layer, value in zip(layers, (2.0, 5.0), strict=True):
        layer.module.weight.grad = torch.full((3,), value)
    gradients.add_microbatch(layers)
    assert gradients.largest == {(0, 0): 2.0, (1, 1): 5.0}


@pytest.mark.parametrize("exact", [True, False])
def test_an_unused_parameter_contributes_zero(exact):
    gradients, layers = gradients_of(nn.Linear(2, 2), exact=exact)
    module = layers[0].module
    module.weight.grad = torch.ones(2, 2)  # the bias got none
    gradients.add_microbatch(layers)
    gradients.reduce(lambda: None)
    assert [slot.gradient.tolist() for slot in gradients.units[0].slots] == [[[1.0, 1.0], [1.0, 1.0]], [0.0, 0.0]]
    gradients.apply_factor(1.0)
    assert module.bias.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("exact", [True, False])
def test_a_tied_slot_sums_its_leaves(exact):
    units = [Unit("l0", (0,)), Unit("l1", (1,)), Unit("l0.weight", (0, 1), ((0, "weight"), (1, "weight")))]
    modules = [nn.Linear(2, 1), nn.Linear(2, 1, bias=False)]
    gradients, layers = gradients_of(*modules, units=units, exact=exact)
    modules[0].weight.grad, modules[0].bias.grad = torch.tensor([[1.0, 2.0]]), torch.tensor([7.0])
    modules[1].weight.grad = torch.tensor([[10.0, -20.0]])
    gradients.add_microbatch(layers)
    gradients.reduce(lambda: None)
    own, _, shared = gradients.units
    assert [slot.gradient.tolist() for slot in own.slots] == [[7.0]]
    assert [slot.gradient.tolist() for slot in shared.slots] == [[[11.0, -18.0]]]
    assert gradients.squared_norm(shared) == pytest.approx(121 + 324)  # counted once
    if exact:
        assert gradients.largest == {(0, 0): 7.0, (2, 0): 2.0, (2, 1): 20.0}
    gradients.apply_factor(2.0)
    assert modules[0].weight.grad.tolist() == modules[1].weight.grad.tolist() == [[22.0, -36.0]]


def tied_units(leaves):
    """The units of ``leaves`` layers that share the one parameter they have."""
    units = [Unit(f"l{i}", (i,)) for i in range(leaves)]
    return [*units, Unit("l0.weight", tuple(range(leaves)), tuple((i, "weight") for i in range(leaves)))]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_weight_tied_many_times_does_not_wrap_around(microbatches):
    leaves = 5
    top = limit(FIRST_EXPONENT, microbatches * leaves)
    for value, fits in ((below(top), True), (top, False), (below(limit(FIRST_EXPONENT, microbatches)), False)):
        gradients, layers = gradients_of(
            *(one_parameter() for _ in range(leaves)), units=tied_units(leaves), microbatches=microbatches
        )
        for _ in range(microbatches):
            for layer in layers:
                layer.module.weight.grad = torch.full((3,), value)
            gradients.add_microbatch(layers)
        voted = set(gradients.largest.values())
        assert voted == {float(torch.tensor(value))}
        assert (max(voted) < top) == fits  # what the vote sees
        (slot,) = gradients.units[-1].slots
        expected = exactly(value, FIRST_EXPONENT) * leaves * microbatches
        assert slot.sum.tolist() == [expected if fits else 0] * 3
        assert not fits or 0 < expected < 2**62


def test_the_vote_and_the_gradients_agree_on_the_terms():
    # Else a gradient that one of them takes for too large is left out of a sum that the other lets pass. The last
    # unit is a weight that is used three times in one layer and once in another.
    leaves = ((0, "a"), (0, "b"), (0, "c"), (1, "w"))
    units = [*tied_units(3), Unit("l0.a", (0, 1), leaves)]
    assert list(Layout.of(4, 0, units, 1).terms) == [4 * unit.copies for unit in units] == [4, 4, 4, 12, 16]


def test_what_one_optimizer_does_to_a_tied_gradient_does_not_reach_the_other_leaf():
    units = [Unit("l0", (0,)), Unit("l1", (1,)), Unit("l0.weight", (0, 1), ((0, "weight"), (1, "weight")))]
    gradients, layers = gradients_of(one_parameter(), one_parameter(), units=units)
    for layer in layers:
        layer.module.weight.grad = torch.ones(3)
    gradients.add_microbatch(layers)
    gradients.reduce(lambda: None)
    gradients.apply_factor(1.0)
    for layer in layers:
        torch.optim.SGD([layer.module.weight], lr=1.0, momentum=0.9, nesterov=True, foreach=True).step()
    assert torch.equal(layers[0].module.weight, layers[1].module.weight)


@pytest.mark.parametrize("exact", [True, False])
def test_a_frozen_parameter_has_no_slot_and_stays_as_it_is(exact):
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    before = module.weight.clone()
    gradients, layers = gradients_of(module, exact=exact)
    assert [path for slot in gradients.units[0].slots for _, path, _ in slot.leaves] == ["bias"]
    assert gradients.units[0].numel == 2
    module.bias.grad = torch.ones(2)
    gradients.add_microbatch(layers)
    gradients.reduce(lambda: None)
    gradients.apply_factor(1.0)
    assert module.weight.grad is None
    assert module.bias.grad.tolist() == [1.0, 1.0]
    torch.optim.AdamW(module.parameters(), lr=0.1).step()
    assert torch.equal(module.weight, before)


def test_a_layer_that_is_frozen_whole():
    module = nn.Linear(2, 2).requires_grad_(False)
    gradients, layers = gradients_of(module)
    gradients.add_microbatch(layers)
    gradients.reduce(lambda: None)
    gradients.apply_factor(1.0)
    assert gradients.units[0].slots == []
    assert gradients.squared_norm(gradients.units[0]) == 0.0
    assert gradients.largest == {}


def test_a_frozen_parameter_may_have_any_dtype():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(module.weight.detach().to(torch.bfloat16), requires_grad=False)
    gradients, _ = gradients_of(module)
    assert len(gradients.units[0].slots) == 1


def test_a_parameter_without_elements_is_fine():
    module = nn.Module()
    module.empty = nn.Parameter(torch.zeros(0, 4))
    gradients, layers = gradients_of(module)
    module.empty.grad = torch.zeros(0, 4)
    gradients.add_microbatch(layers)
    gradients.reduce(lambda: None)
    assert gradients.squared_norm(gradients.units[0]) == 0.0


def test_sparse_gradients_are_refused_by_name():
    gradients, layers = gradients_of(nn.Embedding(4, 2, sparse=True))
    layers[0].module(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(JobError, match="parameter 'weight' of layer 'l0' has a sparse gradient"):
        gradients.add_microbatch(layers)


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(JobError, match=r"parameter 'weight' of layer 'l0' is torch.float64, not float32"):
        gradients_of(nn.Linear(2, 2).double())


def test_a_parameter_that_is_not_contiguous():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 3).t())
    gradients, layers = gradients_of(module)
    weights = torch.arange(12.0).view(3, 4)
    for _ in range(2):
        (module.weight * weights).sum().backward()
        gradients.add_microbatch(layers)
    gradients.reduce(lambda: None)
    assert torch.equal(gradients.units[0].slots[0].gradient, 2 * weights)


def test_only_the_units_that_a_rank_holds():
    units = [Unit("l0", (0,)), Unit("l1", (1,)), Unit("l0.weight", (0, 1), ((0, "weight"), (1, "weight")))]
    held = {1: layer_of(nn.Linear(2, 1), 1, "l1")}
    local = local_units(units, held, exact=True)
    assert [(unit.index, unit.numel) for unit in local] == [(1, 1), (2, 2)]
    assert [path for unit in local for slot in unit.slots for _, path, _ in slot.leaves] == ["bias", "weight"]


def test_fast_mode_leaves_the_sum_to_autograd(seed):
    draw = random.Random(seed)
    gradients, layers = gradients_of(one_parameter(), exact=False)
    weight = layers[0].module.weight
    expected = torch.zeros(3)
    for _ in range(4):
        factor = torch.tensor([draw.uniform(-1, 1) for _ in range(3)])
        (weight * factor).sum().backward()
        gradients.add_microbatch(layers)
        expected += factor
    gradients.reduce(lambda: None)
    assert torch.equal(gradients.units[0].slots[0].gradient, expected)
    assert gradients.largest == {}
