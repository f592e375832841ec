"""Layers as workers hold them: what they are built from, ties, and digests."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import elastic
from elastic.engine.layers import LayerState, build_layer, resolve_tied
from elastic.errors import JobError


class One:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return torch.zeros(2), torch.zeros(2)


def adamw(named):
    return torch.optim.AdamW(named, lr=1e-2)


def job_of(*layers, optimizer=adamw):
    return elastic.Job(list(layers), lambda output, target: (output.sum(), 1), One(), optimizer)


def linear(name, tied=None, size=(3, 3)):
    return elastic.Layer(name, lambda: nn.Linear(*size), tied or {})


def weight_of(job, name, seed=0, path="weight"):
    index = [layer.name for layer in job.layers].index(name)
    return dict(build_layer(job, index, seed).parameters())[path]


# Building


def test_a_layer_is_a_function_of_seed_and_name_alone(seed):
    job = job_of(linear("a"), linear("b"))
    alone = build_layer(job_of(linear("b")), 0, seed)
    torch.randn(13)  # whatever ran before
    second = build_layer(job, 1, seed)
    build_layer(job, 0, seed)
    again = build_layer(job, 1, seed)
    assert alone.digest() == second.digest() == again.digest()
    assert (second.index, second.name) == (1, "b")
    others = [build_layer(job, 0, seed).digest(), build_layer(job, 1, seed + 1).digest()]
    assert second.digest() not in others


def test_a_layer_is_built_for_training():
    layer = build_layer(job_of(elastic.Layer("a", lambda: nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).eval())), 0, 0)
    assert all(part.training for part in layer.module.modules())


def test_the_optimizer_gets_names_and_a_layer_without_parameters_has_none():
    seen = []

    def optimizer(named):
        seen.append([name for name, _ in named])
        return adamw(named)

    job = job_of(linear("a"), elastic.Layer("act", nn.Tanh), optimizer=optimizer)
    assert build_layer(job, 0, 0).optimizer is not None
    bare = build_layer(job, 1, 0)
    assert bare.optimizer is None
    assert seen == [["weight", "bias"]]
    assert len(bare.digest()) == 32


# Ties


def test_a_tied_parameter_starts_as_its_owner():
    job = job_of(linear("a"), linear("b", {"weight": "a.weight"}))
    assert torch.equal(weight_of(job, "b"), weight_of(job, "a"))
    assert not torch.equal(weight_of(job, "b", path="bias"), weight_of(job, "a", path="bias"))
    assert torch.equal(weight_of(job, "b", path="bias"), weight_of(job_of(linear("a"), linear("b")), "b", path="bias"))


def test_a_tie_may_point_forward_and_chains_end_at_the_last():
    job = job_of(
        linear("a", {"weight": "b.weight"}),
        linear("b", {"weight": "c.weight"}),
        linear("c"),
        linear("d", {"weight": "a.weight"}),
    )
    assert resolve_tied(job, "a.weight") == resolve_tied(job, "b.weight") == ("c", "weight")
    for name in "abd":
        assert torch.equal(weight_of(job, name), weight_of(job, "c"))


def test_layer_names_with_dots_the_longest_wins():
    job = job_of(
        linear("block"), linear("block.0"), linear("block.0.up"),
        linear("head", {"weight": "block.0.up.weight"}), linear("tail", {"weight": "block.0.weight"}),
    )  # fmt: skip
    assert resolve_tied(job, "block.0.up.weight") == ("block.0.up", "weight")
    assert torch.equal(weight_of(job, "head"), weight_of(job, "block.0.up"))
    assert torch.equal(weight_of(job, "tail"), weight_of(job, "block.0"))


def test_a_path_with_dots():
    job = job_of(
        elastic.Layer("block", lambda: nn.Sequential(nn.Tanh(), nn.Linear(3, 3))),
        linear("b", {"weight": "block.1.weight"}),
    )
    assert torch.equal(weight_of(job, "b"), weight_of(job, "block", path="1.weight"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([linear("a", {"weight": "a.weight"})], "'a.weight' is tied to itself"),
        ([linear("a", {"weight": "b.weight"}), linear("b", {"weight": "a.weight"})], "is tied to itself"),
        ([linear("a", {"weight": "nowhere.weight"})], "'nowhere.weight' names no layer of the job"),
        ([linear("a", {"weight": "weight"}), linear("b")], "'weight' names no layer of the job"),
        ([linear("a", {"weight": "b"}), linear("b")], "'b' names no layer of the job"),
        (
            [linear("a", {"weight": "b.wait"}), linear("b")],
            "layer 'a' ties 'weight' to 'b.wait', which is missing or has another shape",
        ),
        (
            [linear("a", {"wait": "b.weight"}), linear("b")],
            "layer 'a' ties 'wait' to 'b.weight', which is missing or has another shape",
        ),
        (
            [linear("a", {"weight": "b.weight"}), linear("b", size=(3, 4))],
            "layer 'a' ties 'weight' to 'b.weight', which is missing or has another shape",
        ),
    ],
)
def test_ties_that_do_not_resolve_are_refused_by_name(layers, message):
    with pytest.raises(JobError, match=message):
        build_layer(job_of(*layers), 0, 0)


def test_a_chain_of_ties_inside_one_layer():
    ties = {"0.weight": "a.1.weight", "1.weight": "a.2.weight", "2.weight": "a.3.weight"}
    job = job_of(elastic.Layer("a", lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), ties))
    assert resolve_tied(job, "a.0.weight") == ("a", "3.weight")


# Digests


def trained(optimizer=adamw):
    layer = build_layer(job_of(elastic.Layer("a", lambda: nn.Linear(4, 3)), optimizer=optimizer), 0, 5)
    for parameter in layer.module.parameters():
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
    layer.optimizer.step()
    return layer


def flip(tensor, at, bit):
    """Flips one bit of the element at position ``at`` in place."""
    data = tensor.detach().reshape(-1)[at : at + 1].view(torch.int32)
    data ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)


def tensors_of(layer):
    for path, parameter in layer.parameters():
        yield path, parameter
        for key, value in layer.optimizer.state[parameter].items():
            yield f"{path}/{key}", value


@pytest.mark.scenario
@pytest.mark.parametrize("bit", [0, 15, 31])
def test_scenario_37_one_flipped_bit_shows_wherever_it_is(bit):
    layer = trained()
    original, digests = layer.digest(), set()
    places = [(name, tensor, at) for name, tensor in tensors_of(layer) for at in {0, tensor.numel() - 1}]
    assert {name for name, _, _ in places} == {
        f"{path}{part}" for path in ("weight", "bias") for part in ("", "/step", "/exp_avg", "/exp_avg_sq")
    }
    for name, tensor, at in places:
        flip(tensor, at, bit)
        digests.add(layer.digest())
        flip(tensor, at, bit)
        assert layer.digest() == original, name
    assert len(digests) == len(places)
    assert original not in digests


def test_a_digest_sees_the_sign_of_zero_and_the_bits_of_a_nan():
    layer = trained()
    digests = set()
    for value in (0.0, -0.0, float("nan"), float("inf")):
        with torch.no_grad():
            layer.module.bias[0] = value
        digests.add(layer.digest())
    assert len(digests) == 4


@pytest.mark.parametrize("offset", [0, 1, 7, 64])
def test_a_digest_depends_on_values_not_on_where_they_lie(offset):
    layer = trained()
    expected = layer.digest()
    moved = copy.deepcopy(layer.module)
    optimizer = torch.optim.AdamW(moved.parameters(), lr=1e-2)
    for old, new in zip(layer.module.parameters(), moved.parameters(), strict=True):
        storage = torch.empty(offset + 2 * old.numel())
        strided = storage[offset::2][: old.numel()] if offset else storage[: old.numel()]
        new.data = strided.view(old.shape) if strided.is_contiguous() else strided.unflatten(0, old.shape)
        new.data.copy_(old.data)
        optimizer.state[new] = {key: value.clone() for key, value in reversed(layer.optimizer.state[old].items())}
    assert LayerState(3, "other", moved, optimizer, None).digest() == expected


def test_a_digest_does_not_depend_on_memory_order():
    layer = trained()
    expected = layer.digest()
    layer.module.weight.data = layer.module.weight.data.t().contiguous().t()
    assert not layer.module.weight.is_contiguous()
    assert layer.digest() == expected


def test_a_digest_knows_names_shapes_and_dtypes():
    def digest(name, tensor):
        module = nn.Module()
        module.register_parameter(name, nn.Parameter(tensor))
        return LayerState(0, "l", module, None, None).digest()

    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, 1), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(0)]
    assert len({digest("a", tensor) for tensor in zeros} | {digest("b", torch.zeros(4))}) == 6
    assert digest("a", torch.tensor(1.0)) != digest("a", torch.tensor([1.0]))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda named: torch.optim.SGD(named, lr=1e-2),
        lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9),
        lambda named: torch.optim.AdamW(named, amsgrad=True),
        lambda named: torch.optim.NAdam(named),
        lambda named: torch.optim.ASGD(named),
        lambda named: torch.optim.Rprop(named),
        lambda named: torch.optim.Adafactor(named),
    ],
    ids=["sgd", "momentum", "amsgrad", "nadam", "asgd", "rprop", "adafactor"],
)
def test_every_optimizer_has_a_digest(optimizer):
    one, two = trained(optimizer), trained(optimizer)
    assert one.digest() == two.digest()
    one.optimizer.step()
    assert one.digest() != two.digest()


def test_state_that_is_no_tensor_counts():
    layer = trained()
    before = layer.digest()
    state = layer.optimizer.state[layer.module.weight]
    state["warm"] = 3
    three = layer.digest()
    state["warm"] = 4
    assert len({before, three, layer.digest()}) == 3
