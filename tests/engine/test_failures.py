"""What workers do when the user's code fails, a loss is not finite, or a gradient outgrows its scale."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from elastic.config import config_from
from elastic.digest import combined_digest
from elastic.engine.cursor import Cursor
from elastic.engine.gradients import FIRST_EXPONENT, next_exponent
from elastic.engine.layers import build_layer
from elastic.engine.randomness import seed_of, set_all_seeds, set_seed
from tests.engine.faulty_job import SAMPLES
from tests.engine.processes import HERE, load, train_on

TRAIN = {"steps": 5, "global_batch": 16, "microbatch": 2, "seed": 3}
STEP, MICROBATCH = 2, 5  # where things go wrong
SAMPLE = Cursor(SAMPLES, 16, 2, 3).samples(STEP, MICROBATCH)[1]


def config_of(fault, params=None, **train):
    params = {"fault": fault, "sample": SAMPLE, **(params or {})}
    return config_from(
        {"name": "faulty", "job": "faulty_job:job", "params": params, "train": {**TRAIN, **train}}, folder=HERE
    )


def careful_train(config, steps=TRAIN["steps"]):
    """``(digest, what each step came to)``: a plain loop that leaves out the update of a step that is not finite, and
    rounds the gradients of a step again, more coarsely, when one does not fit. For jobs without tied weights."""
    torch.set_num_threads(1)
    job, train = load(config), config.train
    layers = [build_layer(job, i, train.seed) for i in range(len(job.layers))]
    exponents = [FIRST_EXPONENT] * len(layers)
    terms = train.microbatches
    cursor = Cursor(len(job.dataset), train.global_batch, train.microbatch, train.seed)
    came_to = []
    for step in range(steps):
        gradients = []  # per microbatch, per layer: those of its parameters
        losses, weight = [], 0.0
        for m in range(train.microbatches):
            samples = []
            for place, i in enumerate(cursor.samples(step, m)):
                set_all_seeds(seed_of(train.seed, "sample", step, m, place))
                samples.append(job.dataset[i])
            x, y = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
            for layer in layers:
                set_seed(seed_of(train.seed, "forward", step, m, layer.name))
                x = layer.module(x)
            set_seed(seed_of(train.seed, "loss", step, m))
            loss, samples_in_loss = job.loss(x, y)
            loss.backward()
            losses.append(loss.item())
            weight += samples_in_loss
            gradients.append([[p.grad for p in layer.module.parameters()] for layer in layers])
            for layer in layers:
                layer.module.zero_grad()
        largest = [max(float(g.abs().max()) for each in gradients for g in each[k]) for k in range(len(layers))]
        if not all(map(math.isfinite, [*losses, *largest])):
            came_to.append("skip")
            continue
        redone = 0
        while any(
            Fraction(value) * train.microbatches >= Fraction(2) ** (62 - exponent)
            for value, exponent in zip(largest, exponents, strict=True)
        ):
            exponents = [next_exponent(e, value, terms) for e, value in zip(exponents, largest, strict=True)]
            redone += 1
        summed = []
        for k, exponent in enumerate(exponents):
            columns = zip(*(each[k] for each in gradients), strict=True)
            whole = [sum(torch.round(g * 2.0**exponent).to(torch.int64) for g in column) for column in columns]
            summed.append([w.to(torch.float32) * 2.0**-exponent for w in whole])
        squares = [math.fsum(float(torch.linalg.vector_norm(g)) ** 2 for g in each) for each in summed]
        norm = math.sqrt(sum(squares)) / weight
        clip = train.clip_norm / norm if norm > train.clip_norm else 1.0
        for layer, each in zip(layers, summed, strict=True):
            for parameter, gradient in zip(layer.module.parameters(), each, strict=True):
                parameter.grad = gradient * (clip / weight)
            set_seed(seed_of(train.seed, "optimize", step, layer.name))
            layer.optimizer.step()
            layer.module.zero_grad()
        exponents = [next_exponent(e, value, terms) for e, value in zip(exponents, largest, strict=True)]
        came_to.append(f"redo {redone}" if redone else "commit")
    return combined_digest([(layer.name, layer.digest()) for layer in layers]), came_to


def of_kind(messages, kind):
    return [m for got in messages.values() for m in got if m["ev"] == kind]


# The user's code


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("fault", "said", "line"),
    [
        ("loss", f"ArithmeticError in the loss, microbatch {MICROBATCH}: the loss is lost", "raise ArithmeticError"),
        (
            "sample",
            f"OSError in dataset[{SAMPLE}], microbatch {MICROBATCH}: sample {SAMPLE} cannot be read",
            "raise OSError",
        ),
        ("forward", "ValueError in the forward pass of layer 'middle'", "raise ValueError"),
        ("exit", f"SystemExit in the loss, microbatch {MICROBATCH}: 3", "sys.exit(3)"),
    ],
)
def test_scenario_5_and_20_an_exception_is_one_error_that_says_what_was_called(fault, said, line, tmp_path):
    calls = STEP * 8 + MICROBATCH + 1
    digest, messages = train_on(config_of(fault, {"calls": calls}), 1, tmp_path)
    assert digest is None
    assert of_kind(messages, "broken") == []
    (message,) = of_kind(messages, "error")
    assert message["error"]["code"] == "user_code"
    assert said in message["error"]["message"]
    assert line in message["error"]["detail"]
    # The last step is told only after the vote of the next one, which this one never reached.
    assert [m["step"] for m in of_kind(messages, "step")] == [1]


@pytest.mark.scenario
def test_scenario_5_one_error_among_several_ranks(tmp_path):
    digest, messages = train_on(config_of("loss"), 2, tmp_path, stages=2)
    assert digest is None
    (message,) = of_kind(messages, "error")
    assert message["error"]["code"] == "user_code"
    assert f"the loss, microbatch {MICROBATCH}" in message["error"]["message"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_loss_that_depends_on_no_parameter_is_a_job_error(nodes, tmp_path):
    digest, messages = train_on(config_of("detached"), nodes, tmp_path)
    assert digest is None
    assert of_kind(messages, "broken") == []
    error = of_kind(messages, "error")[0]["error"]
    assert (error["code"], error["message"]) == ("job", "the loss does not depend on any parameter")


# Losses that are not finite


@pytest.mark.scenario
def test_scenario_37_a_nan_on_one_rank_stops_all_at_the_same_step(tmp_path):
    config = config_of("nan")
    digest, messages = train_on(config, 3, tmp_path)
    ends = of_kind(messages, "end")
    assert [(end["kind"], end["step"]) for end in ends] == [("non_finite", STEP)] * 3
    assert {end["reason"] for end in ends} == {"the loss or a gradient is not finite"}
    assert digest == careful_train(config, steps=STEP)[0]  # untouched by the step that failed
    told = of_kind(messages, "step")
    assert [m["step"] for m in told] == [1, 2]
    assert all(math.isfinite(m["loss"]) for m in told)


@pytest.mark.scenario
@pytest.mark.parametrize(("nodes", "stages"), [(1, None), (2, 2)])
def test_scenario_37_a_nan_is_skipped(nodes, stages, tmp_path):
    config = config_of("nan", non_finite="skip")
    expected, came_to = careful_train(config)
    assert came_to == ["commit", "commit", "skip", "commit", "commit"]
    digest, messages = train_on(config, nodes, tmp_path, stages)
    assert digest == expected
    assert [(end["kind"], end["step"]) for end in of_kind(messages, "end")] == [("done", 5)] * nodes
    told = of_kind(messages, "step")
    assert [m["step"] for m in told] == [1, 2, 3, 4, 5]
    assert [m["step"] for m in told if not math.isfinite(m["loss"])] == [STEP + 1]


# Gradients that outgrow their scale


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_gradient_that_grows_a_million_times_is_redone_at_another_scale(nodes, tmp_path):
    config = config_of("grow")
    expected, came_to = careful_train(config)
    assert came_to == ["commit", "commit", "redo 1", "commit", "commit"]
    digest, messages = train_on(config, nodes, tmp_path)
    assert digest == expected
    told = of_kind(messages, "step")
    assert [m["step"] for m in told] == [1, 2, 3, 4, 5]
    assert max(told, key=lambda m: m["loss"])["step"] == STEP + 1
    # a redone step counts once
    assert [(m["samples"], m["lost"], m["repeated"]) for m in told] == [(16 * m["step"], 0, 0) for m in told]


# The same bits


def test_a_step_without_faults_is_that_of_the_careful_loop(tmp_path):
    config = config_of(None)
    expected, came_to = careful_train(config)
    assert came_to == ["commit"] * 5
    assert train_on(config, 2, tmp_path)[0] == expected


@pytest.mark.parametrize(
    ("params", "shape"),
    [
        pytest.param({"width": 37}, (3, None), id="features of an odd width"),
        pytest.param({"fault": "noise"}, (2, None), id="random augmentation"),
        pytest.param({"fault": "noise"}, (2, 2), id="random augmentation in a pipeline"),
        pytest.param({"fault": "twins"}, (2, 2), id="an optimizer that changes gradients"),
        pytest.param({"fault": "frozen"}, (2, 2), id="frozen parameters"),
    ],
)
def test_shape_does_not_show_in_jobs_that_are_less_tidy(params, shape, tmp_path):
    config = config_of(None, params)
    alone = train_on(config, 1, tmp_path)[0]
    assert alone is not None
    assert alone == train_on(config, shape[0], tmp_path, shape[1])[0]
    if params.get("fault") not in ("twins", "frozen"):
        assert alone == careful_train(config)[0]
