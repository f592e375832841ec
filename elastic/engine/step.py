"""Training inside one epoch: cursor → schedule → gradient sum → vote → optimizer, step after step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from elastic.config import Train
from elastic.engine.comm import Groups
from elastic.engine.cursor import Cursor
from elastic.engine.gate import Gate
from elastic.engine.gradients import Gradients, local_units, next_exponent
from elastic.engine.layers import LayerState
from elastic.engine.randomness import seed_of, set_all_seeds, set_seed
from elastic.engine.stage import Stage, StageModule, canonical
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
    """Why an epoch's training returned: all steps done, a voted stop, a non-finite step under policy ``stop``, or a
    voted switch to the next epoch, whose plan every rank has."""

    kind: Literal["done", "stopped", "non_finite", "switch"]
    step: int
    reason: str = ""


@dataclass
class Progress:
    """What every rank of an epoch knows alike and hands on: the next epoch starts from it.

    Attributes:
        step: committed steps.
        exponents: fixed-point exponent per unit.
        ledger: up to ``step``.
        recent: of the last two steps, oldest first; announced again by the next epoch, since whoever was to announce
            them may have died before.
    """

    step: int
    exponents: list[int]
    ledger: Ledger = field(default_factory=Ledger)
    recent: list[Announcement] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> Progress:
        return cls(
            mapping["step"],
            list(mapping["exponents"]),
            Ledger(**mapping["ledger"]),
            [
                Announcement(Metrics(**one["metrics"]), Ledger(**one["ledger"]), one["weight"], one["seconds"])
                for one in mapping["recent"]
            ],
        )


@dataclass(frozen=True)
class Member:
    """What an epoch is told by its worker beside the plan.

    Attributes:
        epoch, lineage: what versions are made of.
        gate: ends the epoch from outside.
        announce: called on rank 0 with each decided step, in order.
        stop_requested, switch_ready: asked before each vote.
        voted: called when the first vote has passed.
        committed: called after each step that was applied, or skipped.
    """

    epoch: int
    lineage: int
    gate: Gate
    announce: Callable[[Announcement], None] = lambda _: None
    stop_requested: Callable[[], bool] = lambda: False
    switch_ready: Callable[[], bool] = lambda: False
    voted: Callable[[], None] = lambda: None
    committed: Callable[[], None] = lambda: None


class Epoch:
    """One rank's part in one plan. Built, trained, thrown away.

    Args:
        boundaries: input of the first layer, then the output of every layer.
        layers: the held layers of this rank's stage, by index, all of the version that ``progress`` stands for.
        progress: changed as steps are committed.

    Attributes:
        prepared: the step whose summed gradients are complete here, as seen by the host; kept until it is decided.
        indices: of the layers of this rank's stage; what is prepared covers these.
        last_vote: the newest vote this rank has seen, ``(step, verdict)``.
        voted_at, step_s: when that was, and the time since the one before (seconds of ``perf_counter``).
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
        member: Member,
    ) -> None:
        self._job, self._train, self._progress = job, train, progress
        self._groups, self._device = groups, device
        self._member, self._gate = member, member.gate
        self.epoch = member.epoch
        self.voted_at: float | None = None
        self.step_s: float | None = None
        self.prepared: int | None = None
        self.last_vote: tuple[int, Verdict] | None = None
        self._world_size = len(plan.ranks())
        places = plan.ranks()
        self._place = next(place for place in places if place.rank == groups.rank)
        self.indices = list(range(self._place.start, self._place.stop))
        pipeline = plan.pipelines[self._place.pipeline]
        self._layers = [layers[i] for i in range(self._place.start, self._place.stop)]
        self._microbatches = pipeline.microbatches
        self._cursor = Cursor(len(job.dataset), train.global_batch, train.microbatch, train.seed)
        self._exact = train.reduction == "exact"
        units = units_of(job)
        held = {layer.index: layer for layer in self._layers}
        self._gradients = Gradients(
            local_units(units, held, self._exact),
            groups.buckets,
            progress.exponents,
            [plan.microbatches * unit.copies for unit in units],
            self._exact,
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
        self._pending = list(progress.recent)  # applied here, not yet known to be decided everywhere
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
            self._gate,
            stage_index=self._place.stage,
            num_stages=stages,
            device=self._device,
            input_args=(example(self._place.start),),
            output_args=(example(self._place.stop),),
            group=self._groups.pipeline,
        )
        return kind(stage, len(microbatches), loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        what = f"the loss, microbatch {self._module.microbatch}"
        with self._gate.computing(what), self._module.precision(), user_code(what):
            set_seed(seed_of(self._train.seed, "loss", self._module.step, self._module.microbatch))
            total, weight = self._job.loss(output, canonical(target))
            number = float(weight)
        if not isinstance(total, Tensor) or total.dim() != 0:
            raise JobError("the loss must return (sum, weight) with sum a 0-dim tensor", "use reduction='sum'")
        if torch.is_grad_enabled() and not total.requires_grad:
            raise JobError("the loss does not depend on any parameter", "was it detached?")
        self._losses.append(float(total.detach()))
        self._weights.append(number)
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
        if self._member.stop_requested():
            ballot.flag("stop_requested")
        if self._member.switch_ready():
            ballot.flag("switch_ready")
        if self._pending and self._evaluate_now(progress.step):
            self._run_evaluation(progress.step, ballot)
        if not last:
            self._forward_backward(progress.step, ballot)
        verdict = self._vote(ballot)
        if not last:
            self.last_vote = (progress.step, verdict)
        self._tell(verdict.eval_loss)  # the step before is now known to be decided
        if last:
            return End("done", progress.step)
        if verdict.lost or verdict.repeated:
            raise RuntimeError(f"step {progress.step}: {verdict.lost} samples lost, {verdict.repeated} read twice")
        if verdict.kind == "stop":
            return End("non_finite", progress.step, verdict.reason)
        self._gate.enter()
        with self._gate.working(f"applying step {progress.step}"):
            self._follow(verdict, started)
        if verdict.kind == "redo":
            return None
        with self._gate.working(f"copying step {progress.step} for a checkpoint"):
            self._member.committed()
        if progress.step >= self._train.steps:
            return None
        if verdict.stop_requested:
            # Nobody leaves before all know that the step is decided.
            closing = Ballot(self._layout)
            if self._evaluate_now(progress.step):
                self._run_evaluation(progress.step, closing)
            self._tell(self._vote(closing).eval_loss)
            return End("stopped", progress.step)
        if verdict.switch_ready == self._world_size:
            return End("switch", progress.step)
        return None

    def settle(self, step: int, verdict: Verdict) -> None:
        """Carries out a verdict that this epoch's own vote may not have told us: applies the prepared step, or not.

        A rank that has applied it already does nothing, nor does one that has not prepared it: the plan has it fetch
        its layers from those that have.
        """
        self._layers = [layer for layer in self._layers if layer.version is not None]  # the others are torn
        if self._progress.step == step and (verdict.kind == "skip" or self.prepared == step):
            self._follow(verdict, time.perf_counter())

    def _follow(self, verdict: Verdict, started: float) -> None:
        progress = self._progress
        if verdict.kind in ("commit", "skip"):
            rate = self._learning_rate(progress.step)
            if verdict.kind == "commit":
                self._apply(verdict, rate)
            decider = 0 if self._exact else self._member.epoch
            for layer in self._layers:
                layer.version = (self._member.lineage, progress.step + 1, decider)
            progress.step += 1
            progress.ledger = progress.ledger.plus(verdict)
            metrics = Metrics(progress.step, verdict.loss, rate, verdict.grad_norm, progress.ledger.samples)
            seconds = time.perf_counter() - started
            self._pending = [Announcement(metrics, progress.ledger, verdict.weight, seconds)]
            progress.recent = [*progress.recent[-1:], *self._pending]
        if self._exact and verdict.kind in ("commit", "redo"):
            known = zip(progress.exponents, verdict.largest, self._layout.terms, strict=True)
            self._gradients.exponents = [next_exponent(*one) for one in known]
        # A redo may be known to some ranks only. Their next epoch starts from the scales that all know, and finds the
        # same redo again.
        if verdict.kind == "commit":
            progress.exponents = self._gradients.exponents
        elif verdict.kind == "skip":
            self._gradients.exponents = progress.exponents
        self.prepared = None

    def _forward_backward(self, step: int, ballot: Ballot) -> None:
        """Fills the ballot with this rank's part of the step; gradients are summed when it returns."""
        self.prepared = None
        self._gradients.clear()
        self._losses.clear()
        self._weights.clear()
        self._module.step = step
        stage = self._schedule._stage
        wanted = [(m, self._cursor.samples(step, m)) for m in self._microbatches]
        with self._gate.computing(f"reading the samples of step {step}"):
            key = (self._train.seed, "sample", step)
            inputs, targets = load(
                self._job.dataset, wanted, stage.is_first, stage.is_last, self._device, key, self._gate.moving
            )
        self._schedule.step(*inputs, target=targets, return_outputs=False)
        self._gradients.reduce(before=self._gate.enter)
        self.prepared = step
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
            if not self._exact and not math.isfinite(squared):
                ballot.flag("non_finite")  # exact gradients show it by their largest magnitude

    def _vote(self, ballot: Ballot) -> Verdict:
        vector = torch.tensor(ballot.values, dtype=torch.int64)
        self._gate.enter()
        dist.all_reduce(vector, group=self._groups.world)
        now = time.perf_counter()
        if self.voted_at is None:
            self._member.voted()
        else:
            self.step_s = now - self.voted_at
        self.voted_at = now
        return decide(
            vector.tolist(),
            self._layout,
            microbatch_size=self._train.microbatch,
            exponents=self._gradients.exponents,
            exact=self._exact,
            clip_norm=self._train.clip_norm,
            non_finite=self._train.non_finite,
        )

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
            set_seed(seed_of(self._train.seed, "optimize", self._progress.step, layer.name))
            layer.version = None  # torn until the optimizer is through
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
        with self._gate.computing("reading samples for evaluation"):
            key, data = (self._train.seed, "evaluation"), self._job.evaluation.dataset
            inputs, targets = load(data, wanted, stage.is_first, stage.is_last, self._device, key, self._gate.moving)
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
        pending, self._pending = self._pending, []
        for announcement in pending if self._groups.rank == 0 else ():
            newest = announcement is pending[-1]
            metrics = replace(announcement.metrics, eval_loss=eval_loss if newest else announcement.metrics.eval_loss)
            with self._gate.working("telling metrics"):
                self._member.announce(replace(announcement, metrics=metrics))


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
    key: tuple[int | str, ...],
    moving: Callable[[], None] = lambda: None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Reads the samples of several microbatches: ``((inputs,), targets)``, each with all samples in dimension 0.

    Only what the stage needs is stacked; a stage in the middle reads nothing. Each sample is read under a seed of its
    own, made from ``key``, microbatch and place in it, so that augmentation is the same wherever it is read. ``moving``
    is called after each.
    """
    if not (inputs or targets):
        return (), None
    samples = []
    for microbatch, indices in wanted:
        for place, index in enumerate(indices):
            set_all_seeds(seed_of(*key, microbatch, place))
            with user_code(f"dataset[{index}], microbatch {microbatch}"):
                samples.append(dataset[index])
            moving()
    with user_code("stacking the samples of a step (all must have one shape)"):
        x = torch.stack([sample[0] for sample in samples]).to(device) if inputs else None
        y = torch.stack([sample[1] for sample in samples]).to(device) if targets else None
    return ((x,) if x is not None else ()), y
