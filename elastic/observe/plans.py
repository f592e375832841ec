"""What ``elastic plan`` answers: templates, the plan, its memory and predicted time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic.config import Config
from elastic.observe.tables import span, table
from elastic.observe.text import plural, short_time
from elastic.planning import (
    ModelProfile,
    Node,
    Pipeline,
    Stage,
    Template,
    TemplateSearch,
    format_bytes,
    make_plan,
    smallest_size,
)

Json = dict[str, Any]
_METER = 5  # blocks


def plan_document(config: Config, profile: ModelProfile, nodes: int) -> Json:
    """The plan for that many nodes, as a run would make it, and what it was chosen from.

    Raises:
        PlanError: the model does not fit these nodes, or any.
    """
    train, cluster = config.train, config.cluster
    plan = make_plan(
        profile,
        [Node(f"node-{i}") for i in range(nodes)],
        microbatches=train.microbatches,
        fault_tolerance=cluster.fault_tolerance,
        device_bytes=cluster.device_memory,
    )
    return {
        "job": config.name,
        "nodes": nodes,
        "n0": smallest_size(profile, cluster.device_memory),
        "device_bytes": cluster.device_memory,
        "layers": [layer.name for layer in profile.layers],
        "microbatches": train.microbatches,
        "microbatch": train.microbatch,
        "seconds": plan.seconds,
        "reason": plan.reason,
        "templates": [_template(template, profile) for template in _templates(config, profile, nodes)],
        "pipelines": [_pipeline(pipeline, profile) for pipeline in plan.pipelines],
        "spares": list(plan.spares),
        "fault_tolerance": len(plan.pipelines) - 1,  # nodes that may vanish at once without losing a layer
    }


def _templates(config: Config, profile: ModelProfile, nodes: int) -> list[Template]:
    """The best template of every pipeline size, for the microbatches that equal shares of the devices would give."""
    microbatches, device_bytes = config.train.microbatches, config.cluster.device_memory
    search, usable = TemplateSearch(profile, device_bytes), min(nodes, microbatches)
    sizes = range(smallest_size(profile, device_bytes), min(nodes, len(profile)) + 1)
    found = [search.best(size, min(microbatches, -(-microbatches * size // usable))) for size in sizes]
    return [template for template in found if template is not None]


def _template(template: Template, profile: ModelProfile) -> Json:
    stages = tuple(Stage("", 0, start, stop) for start, stop in template.cuts)
    pipeline = Pipeline(stages, tuple(range(template.microbatches)), template.schedule)
    return {
        "stages": template.size,
        "schedule": template.schedule,
        "microbatches": template.microbatches,
        "seconds": template.seconds,
        "layers": [stop - start for start, stop in template.cuts],
        "memory_bytes": _memory(pipeline, profile),
    }


def _pipeline(pipeline: Pipeline, profile: ModelProfile) -> Json:
    memory = _memory(pipeline, profile)
    return {
        "schedule": pipeline.schedule,
        "microbatches": len(pipeline.microbatches),
        "stages": [
            {
                "node": stage.node,
                "layers": [layer.name for layer in profile.layers[stage.start : stage.stop]],
                "memory_bytes": need,
            }
            for stage, need in zip(pipeline.stages, memory, strict=True)
        ],
    }


def _memory(pipeline: Pipeline, profile: ModelProfile) -> list[int]:
    return [
        profile.stage_bytes(stage.start, stage.stop, pipeline.in_flight(index))
        for index, stage in enumerate(pipeline.stages)
    ]


def plan_report(document: Json) -> RenderableType:
    """The document for people."""
    limit = document["device_bytes"]
    devices = f"devices of {format_bytes(limit)}" if limit else "without cluster.device_memory"
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    count, size, lost = document["microbatches"], document["microbatch"], document["fault_tolerance"]
    batch = f"{count} microbatch{'es' if count > 1 else ''} of {plural(size, 'sample')}"
    copies = f"loss of any {plural(lost, 'node')} at once" if lost else "no loss: there is one copy of the model"
    for name, value in (
        ("plan", document["reason"]),
        ("step", f"{short_time(document['seconds'])} predicted, on a nominal core: to compare plans, not machines"),
        ("batch", batch),
        ("smallest", f"one copy of the model needs {plural(document['n0'], 'node')} (n0), {devices}"),
        ("survives", copies),
    ):
        facts.add_row(name, Text(value))
    head = Text(f"{document['job']} on {plural(document['nodes'], 'node')}", "bold")
    parts: list[RenderableType] = [head, facts, Text(), _templates_table(document), Text(), _pipelines_table(document)]
    if document["spares"]:
        parts.append(Text(f"spare: {', '.join(document['spares'])}", "cyan"))
    return Group(*parts)


def _templates_table(document: Json) -> Table:
    out = table(
        "stages", "layers per stage", "schedule", "microbatches", "predicted", "largest stage", right=(0, 3, 4, 5)
    )
    used = {len(pipeline["stages"]) for pipeline in document["pipelines"]}
    for template in document["templates"]:
        out.add_row(
            str(template["stages"]),
            _counts(template["layers"]),
            template["schedule"],
            str(template["microbatches"]),
            short_time(template["seconds"]),
            format_bytes(max(template["memory_bytes"])),
            style="" if template["stages"] in used else "dim",
        )
    return out


def _counts(layers: Sequence[int]) -> str:
    """``3 3 2``; long splits as ranges of equal counts: ``2×11 3×5``."""
    if len(layers) <= 8:
        return " ".join(map(str, layers))
    runs: list[list[int]] = []
    for count in layers:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return " ".join(f"{count}×{times}" if times > 1 else str(count) for count, times in runs)


def _pipelines_table(document: Json) -> Table:
    limit = document["device_bytes"]
    out = table("pipeline", "microbatches", "stage", "node", "layers", "memory", right=(0, 1, 2))
    for number, pipeline in enumerate(document["pipelines"]):
        for index, stage in enumerate(pipeline["stages"]):
            first = index == 0
            out.add_row(
                str(number) if first else "",
                str(pipeline["microbatches"]) if first else "",
                str(index),
                Text(stage["node"]),
                Text(span(stage["layers"])),
                _meter(stage["memory_bytes"], limit),
            )
    return out


def _meter(need: int, limit: int | None) -> Text:
    if not limit:
        return Text(format_bytes(need))
    part = need / limit
    full = round(part * _METER)
    colour = "green" if part < 0.8 else "yellow"
    meter = Text.assemble(("█" * full, colour), ("░" * (_METER - full), "dim"))
    return meter.append(f" {part:>4.0%} {format_bytes(need)}")
