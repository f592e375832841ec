"""What a user writes: `Job`, `layers_of`, `load_job`."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import elastic
from elastic.engine.layers import build_layer
from elastic.engine.units import units_of
from elastic.errors import JobError
from elastic.job import layers_of, load_job


class Pairs:
    def __init__(self, size=4):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.zeros(3), torch.zeros(3)


def job_of(layers, dataset=None):
    return elastic.Job(
        layers=layers,
        loss=lambda output, target: (output.sum(), 1),
        dataset=Pairs() if dataset is None else dataset,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


# Job


@pytest.mark.parametrize("name", ["embed", "block.0", "a-b_c.D9", "0"])
def test_layer_names(name):
    assert job_of([elastic.Layer(name, nn.Tanh)]).layers[0].name == name


@pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "a\n", "a:b", "a\0"])
def test_layer_names_that_no_store_could_hold(name):
    with pytest.raises(JobError, match="has characters other than") as caught:
        job_of([elastic.Layer(name, nn.Tanh)])
    assert repr(name) in caught.value.message


def test_a_job_needs_layers_with_different_names_and_samples():
    with pytest.raises(JobError, match="no layers"):
        job_of([])
    with pytest.raises(JobError, match="two layers are called 'twin'"):
        job_of([elastic.Layer("twin", nn.Tanh), elastic.Layer("other", nn.Tanh), elastic.Layer("twin", nn.Tanh)])
    with pytest.raises(JobError, match="dataset is empty"):
        job_of([elastic.Layer("a", nn.Tanh)], Pairs(0))


# layers_of


def run(layers, x):
    job = job_of(layers)
    for i in range(len(layers)):
        x = build_layer(job, i, 99).module(x)
    return x


def test_children_become_layers_with_the_weights_they_have():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    layers = layers_of(model)
    assert [layer.name for layer in layers] == ["0", "1", "2"]
    assert all(layer.tied == {} for layer in layers)
    x = torch.randn(4, 3)
    assert torch.equal(run(layers, x), model(x))  # the seed of the run does not matter


def test_named_children_keep_their_names():
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(3, 3))
    model.add_module("head", nn.Linear(3, 3))
    assert [layer.name for layer in layers_of(model)] == ["embed", "head"]


def test_every_build_is_a_module_of_its_own():
    model = nn.Sequential(nn.Linear(3, 3))
    (layer,) = layers_of(model)
    one, two = layer.build(), layer.build()
    with torch.no_grad():
        one.weight.zero_()
    assert torch.equal(two.weight, model[0].weight)
    assert two.weight.abs().max() > 0


def test_shared_parameters_become_ties():
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    middle = nn.Sequential(nn.Tanh(), nn.Linear(3, 3))
    middle[1].bias = first.bias
    layers = layers_of(nn.Sequential(first, middle, last))
    assert [layer.tied for layer in layers] == [{}, {"1.bias": "0.bias"}, {"weight": "0.weight"}]
    job = job_of(layers)
    assert [unit.name for unit in units_of(job)] == ["0", "1", "2", "0.bias", "0.weight"]
    assert torch.equal(build_layer(job, 2, 0).module.weight, first.weight)


def test_a_parameter_used_twice_inside_one_child_stays_one():
    child = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    child[1].weight = child[0].weight
    (layer,) = layers_of(nn.Sequential(child))
    assert layer.tied == {}
    built = layer.build()
    assert built[1].weight is built[0].weight


def test_a_module_used_twice_is_two_layers():
    act, twice = nn.Tanh(), nn.Linear(3, 3)
    model = nn.Sequential(twice, act, nn.Linear(3, 3), act, twice)
    layers = layers_of(model)
    assert [layer.name for layer in layers] == ["0", "1", "2", "3", "4"]
    assert layers[4].tied == {"weight": "0.weight", "bias": "0.bias"}
    x = torch.randn(2, 3)
    assert torch.equal(run(layers, x), model(x))


# load_job

GOOD = """
import torch
from torch import nn
import elastic

class Data:
    def __len__(self): return 3
    def __getitem__(self, index): return torch.zeros(2), torch.zeros(2)

def job(params):
    return elastic.Job([elastic.Layer("a", nn.Tanh)], lambda o, t: (o.sum(), params["weight"]), Data(), None)

def number(params): return 7
def drawn(params):
    made = job({"weight": 1})
    made.dataset.value = torch.rand(3)
    return made
def clumsy(params): raise LookupError("no corpus")
NOT_A_FUNCTION = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for job modules, and interpreter state as it was afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(folder)


@pytest.mark.parametrize("reference", ["loaded_job:job", "loaded_job.py:job"])
def test_a_module_or_a_file(reference, folder):
    job = load_job(reference, {"weight": 5}, 0, write(folder, "loaded_job.py", GOOD))
    assert [layer.name for layer in job.layers] == ["a"]
    assert job.loss(torch.ones(2), None)[1] == 5


def test_a_file_in_a_folder_below_may_import_from_beside_the_config(folder):
    write(folder, "helper_of_job.py", "from loaded_job import job")
    write(folder, "loaded_job.py", GOOD)
    write(folder, "sub/entry.py", "from helper_of_job import job")
    assert load_job("sub/entry.py:job", {}, 0, str(folder)).layers[0].name == "a"
    write(folder, "package/__init__.py", "")
    write(folder, "package/entry.py", "from helper_of_job import job")
    assert load_job("package.entry:job", {}, 0, str(folder)).layers[0].name == "a"


def test_the_function_is_called_under_the_seed(folder):
    where = write(folder, "loaded_job.py", GOOD)
    values = []
    for seed in (1, 1, 2):
        torch.rand(5)
        values.append(load_job("loaded_job:drawn", {}, seed, where).dataset.value)
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_the_function_gets_a_copy_of_the_params(folder):
    greedy = "def greedy(params): return job({'weight': params.pop('weight')})"
    where = write(folder, "loaded_job.py", f"{GOOD}\n{greedy}\n")
    params = {"weight": 2}
    load_job("loaded_job:greedy", params, 0, where)
    assert params == {"weight": 2}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("loaded_job", "'loaded_job' is not of the form module:function"),
        (":job", "':job' is not of the form"),
        ("loaded_job:", "'loaded_job:' is not of the form"),
        ("missing_job:job", "module 'missing_job' cannot be imported"),
        ("missing.package.entry:job", "module 'missing.package.entry' cannot be imported"),
        ("loaded_job.inner:job", "module 'loaded_job.inner' cannot be imported"),
        ("missing.py:job", r"missing\.py does not exist"),
        ("loaded_job:jbo", "loaded_job has no function 'jbo'"),
        ("loaded_job:NOT_A_FUNCTION", "loaded_job has no function 'NOT_A_FUNCTION'"),
        ("loaded_job:number", "loaded_job:number returned int, not an elastic.Job"),
    ],
)
def test_wrong_references_are_named(reference, message, folder):
    with pytest.raises(JobError, match=message):
        load_job(reference, {}, 0, write(folder, "loaded_job.py", GOOD))


def test_a_hint_says_where_a_module_is_looked_for(folder):
    with pytest.raises(JobError) as caught:
        load_job("missing_job:job", {}, 0, str(folder))
    assert str(folder) in caught.value.hint


@pytest.mark.parametrize("reference", ["loaded_job:job", "loaded_job.py:job"])
def test_a_missing_import_inside_the_users_module_is_the_users_error(reference, folder):
    where = write(folder, "loaded_job.py", "import surely_not_installed\n" + GOOD)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_job(reference, {}, 0, where)


def test_what_the_users_function_raises_passes(folder):
    where = write(folder, "loaded_job.py", GOOD)
    with pytest.raises(LookupError, match="no corpus"):
        load_job("loaded_job:clumsy", {}, 0, where)
    with pytest.raises(SyntaxError):
        load_job("broken_job:job", {}, 0, write(folder, "broken_job.py", "def job(:"))
