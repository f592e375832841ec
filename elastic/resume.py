"""What a run starts from: whether there is something to resume is judged by the checkpoint store alone.

A *generation* is one fresh start of a job. An unfinished one is resumed, a finished one prints its result; ``--resume
never`` begins the next one beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint.commit import claim_generation, survey
from checkpoint.layout import Attempt
from checkpoint.reader import CheckpointError, read_manifest
from checkpoint.store import Store, StoreError
from elastic.config import Config
from elastic.errors import CheckpointAbsent, CheckpointCorrupt, ConfigError, StoreUnreachable

Json = dict[str, Any]
# What decides the bits of a step; the rest of a config may change from one run of a generation to the next.
FREE = {"train": ("steps",)}


@dataclass(frozen=True)
class Start:
    """
    Attributes:
        generation: to go on with; ``None`` for a new one.
        layers: that generation's, by name.
        manifest: of the checkpoint that ``--resume STEP`` names; empty for the newest.
        finished: the result of a generation that has all its steps.
    """

    generation: int | None = None
    layers: tuple[str, ...] = ()
    manifest: str = ""
    finished: Mapping[str, Any] | None = None


def find_start(config: Config, url: str, resume: str) -> Start:
    """Looks into the checkpoint store; changes nothing.

    Args:
        resume: ``auto``, ``never``, or a step of which there is a checkpoint.

    Raises:
        StoreUnreachable: it does not answer.
        ConfigError: the generation was begun with another job.
        CheckpointAbsent: there is no checkpoint of that step.
    """
    with _reaching(url):
        store = Store(url, config.checkpoint.storage_options)
        found = survey(store)
        if resume == "never" or not found.generations:
            if resume.isdecimal():
                raise CheckpointAbsent(f"there is no checkpoint in {url}", "leave out --resume to start from step 0")
            return Start()
        generation = max(found.generations)
        record = found.generations[generation]
        _same_job(config, record, generation, url)
        surviving = found.surviving(generation)
        layers = tuple(record["layers"])
        if resume.isdecimal():
            chosen = next((attempt for attempt in surviving if attempt.step == int(resume)), None)
            if chosen is None:
                steps = ", ".join(str(attempt.step) for attempt in reversed(surviving)) or "none"
                raise CheckpointAbsent(
                    f"generation {generation} in {url} has no checkpoint of step {resume}", f"there are: {steps}"
                )
            return Start(generation, layers, chosen.manifest)
        if surviving and surviving[0].step >= config.train.steps:
            return Start(generation, layers, finished=_result(store, surviving[0], generation))
    return Start(generation, layers)


def begin(config: Config, url: str, start: Start, layers: Sequence[str], wall: Callable[[], float] = time.time) -> int:
    """The generation to train; a new one is claimed.

    Raises:
        StoreUnreachable: the store does not answer, or cannot be written to.
        ConfigError: the job's code has other layers than it had.
    """
    if start.generation is not None:
        if tuple(layers) != start.layers:
            raise ConfigError(
                f"generation {start.generation} in {url} has the layers {', '.join(start.layers)}; the job now has"
                f" {', '.join(layers)}",
                "change the job back, or start a new generation with --resume never",
            )
        return start.generation
    with _reaching(url):
        store = Store(url, config.checkpoint.storage_options)
        record = {"job": config.name, "config": _identity(config.to_dict()), "layers": list(layers), "begun": wall()}
        return claim_generation(store, record)


class _reaching:
    """Maps what goes wrong in the store to errors that users meet."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, StoreError):
            raise StoreUnreachable(str(error), "check checkpoint.url and checkpoint.storage_options") from error
        if isinstance(error, CheckpointError):
            raise CheckpointCorrupt(
                str(error), f"`elastic checkpoints ls {self._url}` lists the others; start from one by --resume STEP"
            ) from error


def _identity(config: Mapping[str, Any]) -> Json:
    train = {key: value for key, value in config["train"].items() if key not in FREE["train"]}
    return {"job": config["job"], "params": dict(config["params"]), "train": train}


def _same_job(config: Config, record: Mapping[str, Any], generation: int, url: str) -> None:
    before, now = _flat(record["config"]), _flat(_identity(config.to_dict()))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        facts = ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in changed)
        raise ConfigError(
            f"generation {generation} in {url} was begun with another job: {facts}",
            "change it back, or start a new generation with --resume never; train.steps, cluster, checkpoint and"
            " detection may change",
        )


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Json:
    out: Json = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return out


def _result(store: Store, attempt: Attempt, generation: int) -> Json:
    meta = read_manifest(store, attempt).meta
    result = {key: meta[key] for key in ("loss", "params_digest", "samples", "lost", "repeated")}
    return {"state": "done", "step": attempt.step, **result, "generation": generation}
