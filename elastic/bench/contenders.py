"""One process of a throughput case: holds our step and plain torch's over the same job, and times them in turns.

python -m elastic.bench.contenders RANK PROCESSES STAGES TRIALS STORE
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from elastic.bench.throughput import WINDOW_STEPS, bench_config
from elastic.config import Config
from elastic.engine.comm import Groups, form
from elastic.engine.cursor import Cursor
from elastic.engine.gate import Gate
from elastic.engine.gradients import FIRST_EXPONENT
from elastic.engine.inspection import Inspection, inspect_job
from elastic.engine.layers import build_layer
from elastic.engine.step import Epoch, Member, Progress, load
from elastic.engine.units import units_of
from elastic.job import Job, load_job
from elastic.planning import Node, Pipeline, Plan, Stage, make_plan

Step = Callable[[], None]
CPU = torch.device("cpu")


def plan_of(inspection: Inspection, config: Config, processes: int, stages: int) -> Plan:
    """Data-parallel processes, or one pipeline over all of them."""
    nodes = [Node(f"node-{i}") for i in range(processes)]
    if stages == 1:
        return make_plan(
            inspection.profile, nodes, microbatches=config.train.microbatches, fault_tolerance=0, device_bytes=None
        )
    count = len(inspection.profile.layers)
    half = (count + 1) // 2
    cuts = (Stage("node-0", 0, 0, half), Stage("node-1", 0, half, count))
    microbatches = tuple(range(config.train.microbatches))
    return Plan((Pipeline(cuts, microbatches, "1f1b"),), (), count, config.train.microbatches, 0.0, "benchmark")


def our_step(job: Job, config: Config, inspection: Inspection, plan: Plan, groups: Groups) -> Step:
    place = next(place for place in plan.ranks() if place.rank == groups.rank)
    layers = {i: build_layer(job, i, config.train.seed) for i in range(place.start, place.stop)}
    progress = Progress(0, [FIRST_EXPONENT] * len(units_of(job)))
    boundaries = [(tuple(shape), dtype) for shape, dtype in inspection.boundaries]
    member = Member(epoch=1, lineage=0, gate=Gate())
    epoch = Epoch(job, config.train, boundaries, plan, groups, layers, progress, CPU, member)

    def step() -> None:
        if epoch.step() is not None:
            raise RuntimeError("the benchmark's job ended")

    return step


class PlainStep:
    """What a user of plain torch writes: microbatches accumulated, clipped by the global norm, one optimizer."""

    def __init__(self, job: Job, config: Config, plan: Plan, rank: int) -> None:
        self._job, self._train = job, config.train
        place = next(place for place in plan.ranks() if place.rank == rank)
        self._stages = len(plan.pipelines[place.pipeline].stages)
        self._microbatches = plan.pipelines[place.pipeline].microbatches
        self._first, self._last = place.stage == 0, place.stage == self._stages - 1
        layers = [build_layer(job, i, config.train.seed) for i in range(place.start, place.stop)]
        self._model: nn.Module = nn.Sequential(*(layer.module for layer in layers))
        self._optimizers = [layer.optimizer for layer in layers if layer.optimizer is not None]
        self._parameters = list(self._model.parameters())
        self._cursor = Cursor(len(job.dataset), config.train.global_batch, config.train.microbatch, config.train.seed)
        self._step = 0

    def data(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        wanted = [(m, self._cursor.samples(self._step, m)) for m in self._microbatches]
        return load(self._job.dataset, wanted, self._first, self._last, CPU, (0, "sample", self._step))

    def finish(self, weight: float, squared_norm: Tensor) -> None:
        clip = self._train.clip_norm or 1.0
        factor = min(1.0, clip / (float(squared_norm.sqrt()) / weight + 1e-6)) / weight
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._job.lr(self._step) if self._job.lr else group["lr"]
            optimizer.step()
            optimizer.zero_grad()
        self._step += 1

    def squared_norm(self) -> Tensor:
        norms = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None])
        return torch.stack(norms).square().sum()


class DataParallelStep(PlainStep):
    """One process, or `DistributedDataParallel` over several."""

    def __init__(self, job: Job, config: Config, plan: Plan, rank: int, processes: int) -> None:
        super().__init__(job, config, plan, rank)
        self._processes = processes
        self._ddp = DistributedDataParallel(self._model) if processes > 1 else None

    def __call__(self) -> None:
        (inputs,), targets = self.data()
        assert targets is not None
        weight, size = 0.0, self._train.microbatch
        chunks = list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))
        for i, (x, y) in enumerate(chunks):
            quiet = self._ddp is not None and i < len(chunks) - 1
            with self._ddp.no_sync() if quiet and self._ddp is not None else contextlib.nullcontext():
                total, count = self._job.loss((self._ddp or self._model)(x), y)
                torch.autograd.backward(total)
            weight += float(count)
        # DDP averages over the processes, so each gradient is the sum over all microbatches divided by their number.
        self.finish(weight, self.squared_norm())


class PipelineStep(PlainStep):
    """torch's own 1F1B schedule over one pipeline."""

    def __init__(self, job: Job, config: Config, plan: Plan, rank: int, inspection: Inspection) -> None:
        super().__init__(job, config, plan, rank)
        place = next(place for place in plan.ranks() if place.rank == rank)

        def example(at: int) -> Tensor:
            shape, dtype = inspection.boundaries[at]
            kind = getattr(torch, dtype)
            return torch.empty(shape, dtype=kind, device="meta", requires_grad=kind.is_floating_point and at > 0)

        stage = PipelineStage(
            self._model,
            place.stage,
            self._stages,
            CPU,
            input_args=(example(place.start),),
            output_args=(example(place.stop),),
        )
        self._schedule = Schedule1F1B(stage, len(self._microbatches), loss_fn=self._loss, scale_grads=False)
        self._weight = 0.0

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        total, count = self._job.loss(output, target)
        self._weight += float(count)
        return total

    def __call__(self) -> None:
        inputs, targets = self.data()
        self._weight = 0.0
        self._schedule.step(*inputs, target=targets, return_outputs=False)
        shared = torch.stack([self.squared_norm().double(), torch.tensor(self._weight, dtype=torch.float64)])
        dist.all_reduce(shared)
        self.finish(float(shared[1]), shared[0])


def main(rank: int, processes: int, stages: int, trials: int, store: str) -> None:
    torch.set_num_threads(1)
    config = bench_config()
    job = load_job(config.job, config.params, config.train.seed)
    inspection = inspect_job(job, config.train)
    plan = plan_of(inspection, config, processes, stages)
    groups = form(plan, rank, units_of(job), store, f"{processes}/{stages}", 60, 60, 300)
    contenders: dict[str, Step] = {}
    for name in ("fast", "exact"):
        chosen = config.model_copy(update={"train": config.train.model_copy(update={"reduction": name})})
        contenders[name] = our_step(job, chosen, inspection, plan, groups)
    contenders["peer"] = (
        DataParallelStep(job, config, plan, rank, processes)
        if stages == 1
        else PipelineStep(job, config, plan, rank, inspection)
    )
    for step in contenders.values():
        step()  # warm: allocators, lazy set-up of schedules and connections
    windows: dict[str, Any] = {name: [] for name in contenders}
    for _ in range(trials):
        for name, step in contenders.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(WINDOW_STEPS):
                step()
            dist.barrier()
            windows[name].append(time.perf_counter() - started)
    if rank == 0:
        print(json.dumps(windows))
    dist.barrier()
    groups.close()


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:5]]
    main(numbers[0], numbers[1], numbers[2], numbers[3], sys.argv[5])
