"""What is to go wrong, when, to whom, and what must hold all the same. Pure.

name: rolling-kills
about: one node after the other dies
config: ../gpt-tiny.yaml
set: [train.steps=200]
faults:
  - {at: {step: 20}, do: kill, to: node, pick: random, times: 3, every_steps: 30}
  - {at: {event: plan, nth: 2}, do: kill, to: worker, pick: rank 0}
  - {at: {after_s: 4}, do: stop, to: worker, pick: node-1, for_s: 10}
checks: {lost_steps: 0, recovery_s: 5}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from elastic.errors import ConfigError

Json = Mapping[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Trigger(_Strict):
    """Exactly one of: a committed step, the ``nth`` event of a kind, seconds after training began."""

    step: Annotated[int, Field(ge=1)] | None = None
    event: str | None = None
    nth: Annotated[int, Field(ge=1)] = 1
    after_s: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Trigger:
        if sum(value is not None for value in (self.step, self.event, self.after_s)) != 1:
            raise ValueError("give one of step, event, after_s")
        return self


def _pick(value: str) -> str:
    if not re.fullmatch(r"random|rank \d+|layer \S+|[A-Za-z0-9_.-]+", value):
        raise ValueError("must be random, `rank N`, `layer NAME` (all its holders) or the id of a node")
    return value


class Fault(_Strict):
    """
    Attributes:
        do: ``kill`` (SIGKILL), ``stop`` (SIGSTOP, SIGCONT after ``for_s``), ``terminate`` (SIGTERM: a notice).
        to: the worker, or the whole process group, of a node, or the controller.
        pick: which node; the controller has no choice.
        times, every_steps: again, so many steps after the time before.
    """

    at: Trigger
    do: Literal["kill", "stop", "terminate"]
    to: Literal["worker", "node", "controller"]
    pick: Annotated[str, AfterValidator(_pick)] = "random"
    for_s: Annotated[float, Field(gt=0)] = 10.0
    times: Annotated[int, Field(ge=1)] = 1
    every_steps: Annotated[int, Field(ge=1)] = 20

    def __str__(self) -> str:
        who = "the controller" if self.to == "controller" else f"a {self.to} ({self.pick})"
        return f"{self.do} {who}"


class Checks(_Strict):
    """``recovery_s`` bounds each recovery; digest and sample ledger are always checked."""

    lost_steps: Annotated[int, Field(ge=0)] = 0
    recovery_s: Annotated[float, Field(gt=0)] | None = None


class Scenario(_Strict):
    name: str
    about: str = ""
    config: str
    set: tuple[str, ...] = ()
    faults: Annotated[tuple[Fault, ...], Field(min_length=1)]
    checks: Checks = Checks()


def scenario_from(mapping: Any, source: str) -> Scenario:
    """
    Raises:
        ConfigError: it is none; says where and why.
    """
    try:
        return Scenario.model_validate(mapping)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{source}: {where}: {said}", "`elastic chaos list` shows those that ship, to start from"
        ) from None


@dataclass(frozen=True)
class Due:
    """A fault to be carried out now; ``number`` is its place in the scenario, ``nth`` which of its times."""

    number: int
    nth: int
    fault: Fault


class Schedule:
    """Says which faults are due as a run goes on."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._done = [0] * len(faults)
        self._last = [0] * len(faults)
        self._events: list[str] = []
        self._step = 0
        self._seconds = 0.0

    @property
    def left(self) -> list[Fault]:
        """Those that have not happened as often as they were to."""
        return [fault for fault, done in zip(self._faults, self._done, strict=True) if done < fault.times]

    def advance(self, *, step: int | None = None, event: str | None = None, seconds: float | None = None) -> list[Due]:
        """Takes in what happened; what is due since."""
        self._step = self._step if step is None else max(self._step, step)
        self._events += [event] if event is not None else []
        self._seconds = self._seconds if seconds is None else seconds
        due = []
        for number, fault in enumerate(self._faults):
            done = self._done[number]
            if done < fault.times and self._is_due(number, fault):
                self._done[number], self._last[number] = done + 1, self._step
                due.append(Due(number, done + 1, fault))
        return due

    def _is_due(self, number: int, fault: Fault) -> bool:
        if self._done[number]:
            return self._step >= self._last[number] + fault.every_steps
        if fault.at.step is not None:
            return self._step >= fault.at.step
        if fault.at.event is not None:
            return self._events.count(fault.at.event) >= fault.at.nth
        return fault.at.after_s is not None and self._seconds >= fault.at.after_s


def victims(pick: str, nodes: Sequence[Json], layers: Sequence[str], random: Random) -> list[Json]:
    """The nodes of a `status` document that a fault hits; empty where none fits now."""
    active = [node for node in nodes if node["workers"]]
    if pick == "random":
        return [random.choice(active)] if active else []
    if rank := re.fullmatch(r"rank (\d+)", pick):
        return [node for node in active if any(worker["rank"] == int(rank[1]) for worker in node["workers"])]
    if layer := re.fullmatch(r"layer (\S+)", pick):
        index = layers.index(layer[1]) if layer[1] in layers else -1
        return [node for node in active if any(index in worker["layers"] for worker in node["workers"])]
    return [node for node in nodes if node["id"] == pick]
