"""What is summed together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import elastic
from elastic.engine.gradients import local_units
from elastic.engine.layers import build_layer
from elastic.engine.units import Unit, units_of
from elastic.errors import JobError
from tests.engine.test_layers import job_of, linear


def test_one_unit_per_layer_in_order_also_for_layers_without_parameters():
    job = job_of(linear("b"), elastic.Layer("act", nn.Tanh), linear("a"))
    assert units_of(job) == (Unit("b", (0,)), Unit("act", (1,)), Unit("a", (2,)))


def test_a_tied_weight_is_a_unit_of_all_its_layers():
    job = job_of(linear("a"), linear("b"), linear("c", {"weight": "a.weight"}))
    assert units_of(job)[3:] == (Unit("a.weight", (0, 2), ((0, "weight"), (2, "weight"))),)


def test_chains_and_stars_are_one_unit():
    job = job_of(
        linear("a", {"weight": "b.weight"}), linear("b", {"weight": "d.weight"}), linear("c"), linear("d"),
        linear("e", {"weight": "d.weight"}), linear("f", {"weight": "a.weight"}),
    )  # fmt: skip
    assert units_of(job)[6:] == (Unit("d.weight", (0, 1, 3, 4, 5), tuple((i, "weight") for i in (0, 1, 3, 4, 5))),)


def test_two_ties_of_the_same_layers_are_two_units():
    ties = {"weight": "a.weight", "bias": "a.bias"}
    job = job_of(linear("a"), linear("b", ties))
    assert [unit.name for unit in units_of(job)] == ["a", "b", "a.bias", "a.weight"]
    job = job_of(linear("a"), linear("b", dict(reversed(ties.items()))))
    assert [unit.name for unit in units_of(job)] == ["a", "b", "a.bias", "a.weight"]  # not by the order of the mapping


def test_a_tie_inside_one_layer():
    job = job_of(
        elastic.Layer("a", lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"1.weight": "a.0.weight"})
    )
    assert units_of(job)[1:] == (Unit("a.0.weight", (0,), ((0, "0.weight"), (0, "1.weight"))),)


def test_names_with_dots_keep_their_layers_apart():
    job = job_of(linear("a"), linear("a.b"), linear("c", {"weight": "a.b.weight"}), linear("d", {"weight": "a.weight"}))
    shared = units_of(job)[4:]
    assert [(unit.name, unit.layers) for unit in shared] == [("a.weight", (0, 3)), ("a.b.weight", (1, 2))]


@pytest.mark.parametrize("target", ["x.weight", "weight", "a.weight"])
def test_bad_ties_are_refused(target):
    with pytest.raises(JobError, match=target):
        units_of(job_of(linear("a", {"weight": target})))


@pytest.mark.parametrize("held", [[0, 1, 2, 3], [0], [1, 2], [3]])
def test_every_parameter_of_a_held_layer_is_in_exactly_one_slot(held):
    job = job_of(
        linear("a"), linear("b", {"weight": "a.weight"}), elastic.Layer("act", nn.Tanh),
        linear("c", {"weight": "b.weight", "bias": "b.bias"}),
    )  # fmt: skip
    layers = {i: build_layer(job, i, 0) for i in held}
    units = units_of(job)
    local = local_units(units, layers, exact=True)
    leaves = [(layer.index, path) for unit in local for slot in unit.slots for layer, path, _ in slot.leaves]
    assert sorted(leaves) == sorted((i, path) for i in held for path, _ in layers[i].parameters())
    assert all(set(units[unit.index].layers) & set(held) for unit in local)
    assert all(isinstance(slot.sum, torch.Tensor) for unit in local for slot in unit.slots)
