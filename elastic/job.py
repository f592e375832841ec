"""What a user writes: a `Job` made of `Layer`s.

    def job(params) -> elastic.Job:
        return elastic.Job(
            layers=elastic.layers_of(nn.Sequential(...)),
            loss=lambda output, target: (F.cross_entropy(output, target, reduction="sum"), target.numel()),
            dataset=MyDataset(),
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        )

The job function is called once in every worker process, always under the same random seed.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic.errors import JobError

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class Samples(Protocol):
    """A map-style dataset: ``dataset[i]`` is one sample ``(input, target)``, each a tensor of a fixed shape."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Layer:
    """The atom of a model: built from its own seed, owned by one stage of each pipeline, never split.

    Args:
        name: unique in the job; parameters, optimizer state and checkpoint entries are stored under it.
        build: returns a new module that maps one tensor to one tensor, both with the batch in dimension 0.
        tied: parameters shared with an earlier layer, as ``{"weight": "embed.token.weight"}``: path inside this
            module to ``layer.path`` of the layer that owns the initial value. Every layer keeps a copy of its own;
            the gradients of all copies are summed, so the copies stay equal.
    """

    name: str
    build: Callable[[], nn.Module]
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Metrics:
    """One committed step: mean loss over the weights of the global batch; ``grad_norm`` is before clipping."""

    step: int
    loss: float
    lr: float | None
    grad_norm: float | None
    samples: int
    eval_loss: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Forward passes over held-out samples, in evaluation mode, every ``every`` steps and at the end.

    The mean loss over the first ``samples`` samples of ``dataset`` is reported as ``Metrics.eval_loss``. ``samples``
    is rounded down to whole microbatches, and must hold at least one.
    """

    dataset: Samples
    every: int
    samples: int


@dataclass(frozen=True)
class Job:
    """A training job. Nothing in it knows of nodes, ranks or stages.

    Args:
        layers: in forward order.
        loss: ``(output, target) -> (sum, weight)``: the *sum* of the losses of one microbatch, a 0-dim tensor, and
            the weight it stands for (samples, or tokens). The gradient of a step is the sum over all microbatches
            divided by the sum of the weights, so token-weighted losses come out right.
        dataset: any size; it wraps, reshuffled in every pass.
        optimizer: called once per layer with its ``(name, parameter)`` pairs; returns a ``torch.optim.Optimizer``.
            It may not look across layers.
        lr: learning rate as a function of the number of steps committed before; ``None`` keeps the optimizer's own.
        evaluation: held-out loss, see `Evaluation`.
        on_metrics: called with `Metrics` after each committed step, in one worker, in order.
    """

    layers: Sequence[Layer]
    loss: Callable[[Any, Any], tuple[Tensor, Any]]
    dataset: Samples
    optimizer: Callable[[NamedParameters], torch.optim.Optimizer]
    lr: Callable[[int], float] | None = None
    evaluation: Evaluation | None = None
    on_metrics: Callable[[Metrics], None] | None = None

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names:
            raise JobError("the job has no layers", "give Job(layers=[...]) at least one Layer")
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise JobError(f"layer name {name!r} has characters other than letters, digits, '_', '.', '-'")
            if names.count(name) > 1:
                raise JobError(f"two layers are called {name!r}", "layer names must be unique")
        if len(self.dataset) < 1:
            raise JobError("the dataset is empty")


def layers_of(model: nn.Sequential) -> list[Layer]:
    """The children of an ``nn.Sequential`` as layers, with the weights they have now.

    The model is held whole on the CPU of every worker until its layers are built; for a model larger than that,
    write `Layer` factories. A parameter used by two children becomes a tied one.
    """
    owners: dict[int, str] = {}
    layers = []
    for name, child in model._modules.items():  # named_children() leaves out a module that is used twice
        assert child is not None
        tied = {}
        for path, parameter in child.named_parameters():
            owner = owners.setdefault(id(parameter), f"{name}.{path}")
            if owner != f"{name}.{path}":
                tied[path] = owner
        layers.append(Layer(name, lambda child=child: _copy(child), tied))  # type: ignore[misc]
    return layers


def _copy(module: nn.Module) -> nn.Module:
    # Buffers by hand: a deep copy of a plain tensor copies its storage, which fake tensors do not have.
    return copy.deepcopy(module, {id(buffer): buffer.detach().clone() for buffer in module.buffers()})


def load_job(reference: str, params: Mapping[str, Any], seed: int, folder: str = "") -> Job:
    """Imports ``package.module:function`` or ``path/to/file.py:function`` and calls it with ``params``.

    Args:
        folder: where a relative path starts, and a place to import modules from (the config's folder).

    Raises:
        JobError: the reference cannot be imported, is no function, or returns something else than a `Job`.
        Exception: whatever the user's function itself raises.
    """
    where, _, name = reference.partition(":")
    if not where or not name:
        raise JobError(f"job {reference!r} is not of the form module:function", "example: my_job:job")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    torch.manual_seed(seed)  # for weights made while the module is imported
    try:
        if where.endswith(".py"):
            path = Path(folder, where).resolve()
            spec = importlib.util.spec_from_file_location(f"elastic_job_{path.stem}", path)
            if not path.is_file() or spec is None or spec.loader is None:
                raise JobError(f"job file {path} does not exist", "the path is relative to the config's folder")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        # Only "the module itself is missing" is a wrong reference; a missing import inside it is the user's code.
        if error.name is not None and (where == error.name or where.startswith(error.name + ".")):
            raise JobError(
                f"job module {where!r} cannot be imported", f"put it beside the config ({folder or 'this folder'})"
            ) from None
        raise
    function = getattr(module, name, None)
    if not callable(function):
        raise JobError(f"{where} has no function {name!r}", f"define `def {name}(params) -> elastic.Job` there")
    torch.manual_seed(seed)
    job = function(dict(params))
    if not isinstance(job, Job):
        raise JobError(f"{reference} returned {type(job).__name__}, not an elastic.Job")
    return job
