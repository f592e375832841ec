"""Training inside one epoch: cursor → schedule → gradient sum → vote → optimizer, step after step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from elastic.config import Train
from elastic.engine.comm import Groups
from elastic.engine.cursor import Cursor
from elastic.engine.gradients import Gradients, local_units, next_exponent
from elastic.engine.layers import LayerState
from elastic.engine.stage import Stage, StageModule
from elastic.engine.units import units_of
from elastic.engine.usercode import user_code
from elastic.engine.vote import Ballot, Layout, Verdict, decide
from elastic.errors import JobError
from elastic.job import Job, Metrics, Samples
from elastic.planning import Plan

Boundary = tuple[tuple[int, ...], str]  # shape with the batch in front, name of the dtype


@dataclass(frozen=True)
class Ledger:
    """Samples over all committed steps of the surviving lineage."""

    samples: int = 0
    lost: int = 0
    repeated: int = 0

    def plus(self, verdict: Verdict) -> Ledger:
        return Ledger(self.samples + verdict.samples, self.lost + verdict.lost, self.repeated + verdict.repeated)


@dataclass(frozen=True)
class Announcement:
    """One committed step, told only after the next vote has passed."""

    metrics: Metrics
    ledger: Ledger
    weight: float
    seconds: float


@dataclass(frozen=True)
class End:
    """Why an epoch's training returned: all steps done, a voted stop, or a non-finite step under policy ``stop``."""

    kind: Literal["done", "stopped", "non_finite"]
    step: int
    reason: str = ""


@dataclass
class Progress:
    """What every rank of an epoch knows alike and hands on: the next epoch starts from it.

    Attributes:
        step: committed steps.
        exponents: fixed-point exponent per unit.
        loss: mean loss of the last committed step.
    """

    step: int
    exponents: list[int]
    loss: float | None = None
    ledger: Ledger = field(default_factory=Ledger)


class Epoch:
    """One rank's part in one plan. Built, trained, thrown away.

    Args:
        boundaries: input of the first layer, then the output of every layer.
        layers: the held layers of this rank's stage, by index.
        announce: called on rank 0 with each committed step, in order.
        stop_requested: asked before each vote; a voted stop ends all ranks after the same step.
    """

    def __init__(
        self,
        job: Job,
        train: Train,
        boundaries: Sequence[Boundary],
        plan: Plan,
        groups: Groups,
        layers: Mapping[int, LayerState],
        progress: Progress,
        device: torch.device,
        announce: Callable[[Announcement], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._job, self._train, self._progress = job, train, progress
        self._groups, self._device = groups, device
        self._announce, self._stop_requested = announce, stop_requested
        places = plan.ranks()
        self._place = next(place for place in places if place.rank == groups.rank)
        pipeline = plan.pipelines[self._place.pipeline]
        self._layers = [layers[i] for i in range(self._place.start, self._place.stop)]
        self._microbatches = pipeline.microbatches
        self._cursor = Cursor(len(job.dataset), train.global_batch, train.microbatch, train.seed)
        self._exact = train.reduction == "exact"
        units = units_of(job)
        held = {layer.index: layer for layer in self._layers}
        self._gradients = Gradients(
            local_units(units, held, self._exact), groups.buckets, progress.exponents, plan.microbatches, self._exact
        )
        self._evaluations = evaluation_microbatches(job, train)
        self._layout = Layout.of(plan.microbatches, self._evaluations, units, len(plan.pipelines))
        self._leaf = {leaf: i for i, leaf in enumerate(self._layout.leaves)}
        # One contributor per unit's norm: the lowest rank of its owners.
        owners = [{rank for layer in unit.layers for rank in plan.owners(layer)} for unit in units]
        self._norms = [unit for unit in self._gradients.units if min(owners[unit.index]) == groups.rank]

        shapes = [(torch.Size(shape), getattr(torch, dtype)) for shape, dtype in boundaries]
        here = shapes[self._place.start + 1 : self._place.stop + 1]
        autocast = torch.bfloat16 if train.precision == "bf16" else None
        self._module = StageModule(self._layers, here, train.seed, autocast, device)
        self._pending: Announcement | None = None  # applied here, not yet known to be decided everywhere
        self._weights: list[float] = []
        self._losses: list[float] = []
        self._schedule = self._make_schedule(
            shapes,
            len(pipeline.stages),
            self._microbatches,
            Schedule1F1B if pipeline.schedule == "1f1b" else ScheduleGPipe,
        )
        mine = tuple(m for m in range(self._evaluations) if m % len(plan.pipelines) == self._place.pipeline)
        self._evaluation_ids = mine
        self._evaluation = self._make_schedule(shapes, len(pipeline.stages), mine, ScheduleGPipe) if mine else None

    def _make_schedule(
        self,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        stages: int,
        microbatches: Sequence[int],
        kind: Callable[..., Any],
    ) -> Any:
        def example(at: int) -> Tensor:
            shape, dtype = shapes[at]
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point and at > 0)

        stage = Stage(
            self._module,
            microbatches,
            lambda: self._gradients.add_microbatch(self._layers),
            stage_index=self._place.stage,
            num_stages=stages,
            device=self._device,
            input_args=(example(self._place.start),),
            output_args=(example(self._place.stop),),
            group=self._groups.pipeline,
        )
        return kind(stage, len(microbatches), loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        with self._module.precision(), user_code(f"the loss, microbatch {self._module.microbatch}"):
            total, weight = self._job.loss(output, target)
        if not isinstance(total, Tensor) or total.dim() != 0:
            raise JobError("the loss must return (sum, weight) with sum a 0-dim tensor", "use reduction='sum'")
        self._losses.append(float(total.detach()))
        self._weights.append(float(weight))
        return total

    def train(self) -> End:
        """Trains from ``progress.step`` to the last step, keeping ``progress`` and the layers up to date.

        Raises:
            UserCodeError, JobError: from the user's code or about it.
            RuntimeError: a collective failed.
        """
        end = self.step()
        while end is None:
            end = self.step()
        return end

    def step(self) -> End | None:
        """One step up to its vote and what follows from that, or the closing vote after the last step; see `train`."""
        progress = self._progress
        started = time.perf_counter()
        last = progress.step >= self._train.steps
        ballot = Ballot(self._layout)
        if self._stop_requested():
            ballot.flag("stop_requested")
        if self._pending is not None and self._evaluate_now(progress.step):
            self._run_evaluation(progress.step, ballot)
        if not last:
            self._forward_backward(progress.step, ballot)
        verdict = self._vote(ballot)
        self._tell(verdict.eval_loss)  # the step before is now known to be decided
        if last:
            return End("done", progress.step)
        if verdict.kind == "stop":
            return End("non_finite", progress.step, verdict.reason)
        if verdict.kind != "redo":
            self._commit(verdict, started)
        if verdict.kind != "skip":
            self._rescale(verdict)
        if verdict.kind != "redo" and verdict.stop_requested and progress.step < self._train.steps:
            self._vote(Ballot(self._layout))  # nobody leaves before all know that the step is decided
            self._tell(None)
            return End("stopped", progress.step)
        return None

    def _commit(self, verdict: Verdict, started: float) -> None:
        progress = self._progress
        rate = self._learning_rate(progress.step)
        if verdict.kind == "commit":
            self._apply(verdict, rate)
        for layer in self._layers:
            layer.step = progress.step + 1
        progress.step += 1
        progress.loss = verdict.loss
        progress.ledger = progress.ledger.plus(verdict)
        metrics = Metrics(progress.step, verdict.loss, rate, verdict.grad_norm, progress.ledger.samples)
        self._pending = Announcement(metrics, progress.ledger, verdict.weight, time.perf_counter() - started)

    def _forward_backward(self, step: int, ballot: Ballot) -> None:
        """Fills the ballot with this rank's part of the step; gradients are summed when it returns."""
        self._gradients.clear()
        self._losses.clear()
        self._weights.clear()
        self._module.step = step
        stage = self._schedule._stage
        wanted = [(m, self._cursor.samples(step, m)) for m in self._microbatches]
        inputs, targets = load(self._job.dataset, wanted, stage.is_first, stage.is_last, self._device)
        self._schedule.step(*inputs, target=targets, return_outputs=False)
        self._gradients.reduce(before=lambda: None)
        if stage.is_first:
            for microbatch, indices in wanted:
                ballot.samples(microbatch, len(indices))
        for microbatch, total, weight in zip(self._microbatches, self._losses, self._weights, strict=False):
            ballot.loss(microbatch, total, weight)
        for (unit, layer), magnitude in self._gradients.largest.items():
            ballot.largest(self._place.pipeline, self._leaf[unit, layer], magnitude)
        for unit_ in self._norms:
            squared = self._gradients.squared_norm(unit_)
            ballot.norm(unit_.index, squared)
            if not math.isfinite(squared):
                ballot.flag("non_finite")

    def _vote(self, ballot: Ballot) -> Verdict:
        vector = torch.tensor(ballot.values, dtype=torch.int64)
        dist.all_reduce(vector, group=self._groups.world)
        return decide(
            vector.tolist(),
            self._layout,
            microbatch_size=self._train.microbatch,
            exponents=self._gradients.exponents,
            exact=self._exact,
            clip_norm=self._train.clip_norm,
            non_finite=self._train.non_finite,
        )

    def _rescale(self, verdict: Verdict) -> None:
        if self._exact:
            pairs = zip(self._gradients.exponents, verdict.largest, strict=True)
            self._gradients.exponents = [next_exponent(exponent, largest) for exponent, largest in pairs]
            self._progress.exponents = self._gradients.exponents

    def _learning_rate(self, step: int) -> float | None:
        if self._job.lr is None:
            return None
        with user_code(f"the learning rate of step {step}"):
            return float(self._job.lr(step))

    def _apply(self, verdict: Verdict, rate: float | None) -> None:
        self._gradients.apply_factor(verdict.factor)
        for layer in self._layers:
            if layer.optimizer is None:
                continue
            layer.step = None  # torn until the optimizer is through
            for group in layer.optimizer.param_groups:
                if rate is not None:
                    group["lr"] = rate
            with user_code(f"the optimizer of layer {layer.name!r}"):
                layer.optimizer.step()

    def _evaluate_now(self, step: int) -> bool:
        evaluation = self._job.evaluation
        return evaluation is not None and (step % evaluation.every == 0 or step >= self._train.steps)

    def _run_evaluation(self, step: int, ballot: Ballot) -> None:
        """Mean loss of held-out samples with the weights after ``step`` steps; the sums ride in the next vote."""
        if self._evaluation is None or self._job.evaluation is None:
            return
        size = self._train.microbatch
        stage = self._evaluation._stage
        wanted = [(m, list(range(m * size, (m + 1) * size))) for m in self._evaluation_ids]
        inputs, targets = load(self._job.evaluation.dataset, wanted, stage.is_first, stage.is_last, self._device)
        self._losses.clear()
        self._weights.clear()
        self._module.step = step
        self._module.eval()
        try:
            with torch.no_grad():
                self._evaluation.eval(*inputs, target=targets, return_outputs=False)
        finally:
            self._module.train()
        for microbatch, total, weight in zip(self._evaluation_ids, self._losses, self._weights, strict=False):
            ballot.evaluation(microbatch, total, weight)

    def _tell(self, eval_loss: float | None) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and self._groups.rank == 0:
            self._announce(replace(pending, metrics=replace(pending.metrics, eval_loss=eval_loss)))


def evaluation_microbatches(job: Job, train: Train) -> int:
    """How many whole microbatches an evaluation has.

    Raises:
        JobError: fewer held-out samples than one microbatch, or fewer in the dataset than asked for.
    """
    evaluation = job.evaluation
    if evaluation is None:
        return 0
    if evaluation.samples > len(evaluation.dataset):
        raise JobError(f"the evaluation wants {evaluation.samples} samples, its dataset has {len(evaluation.dataset)}")
    if evaluation.samples < train.microbatch or evaluation.every < 1:
        raise JobError(
            f"the evaluation needs at least one microbatch ({train.microbatch} samples) and every >= 1",
            "raise Evaluation(samples=…)",
        )
    return evaluation.samples // train.microbatch


def load(
    dataset: Samples,
    wanted: Sequence[tuple[int, Sequence[int]]],
    inputs: bool,
    targets: bool,
    device: torch.device,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Reads the samples of several microbatches: ``((inputs,), targets)``, each with all samples in dimension 0.

    Only what the stage needs is stacked; a stage in the middle reads nothing.
    """
    if not (inputs or targets):
        return (), None
    samples = []
    for microbatch, indices in wanted:
        for index in indices:
            with user_code(f"dataset[{index}], microbatch {microbatch}"):
                samples.append(dataset[index])
    with user_code("stacking the samples of a step (all must have one shape)"):
        x = torch.stack([sample[0] for sample in samples]).to(device) if inputs else None
        y = torch.stack([sample[1] for sample in samples]).to(device) if targets else None
    return ((x,) if x is not None else ()), y
