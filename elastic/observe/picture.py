"""What is known of a run at one moment, folded from its events and steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW = 20  # steps that rates are taken over
CURVE = 1000  # steps that the loss curve shows at most
HISTORY = 20  # events kept for display


@dataclass
class Picture:
    """
    Attributes:
        note: what is under way before the first event.
        phase: in one word, such as ``starting``, ``waiting``, ``forming``, ``running`` or the state at the end.
        members: incarnations of the nodes that are there, by node.
        saving, saved: the step whose checkpoint is being written; the event that made the last one known, or failed.
        recent: of the last steps, ``(seconds, samples, weight)``.
    """

    total_steps: int
    phase: str = "starting"
    note: str = ""
    epoch: int = 0
    step: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)
    pipelines: tuple[tuple[str, ...], ...] = ()
    spares: tuple[str, ...] = ()
    members: dict[str, str] = field(default_factory=dict)
    losses: deque[float | None] = field(default_factory=lambda: deque(maxlen=CURVE))
    events: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    saving: int | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)
    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _formed: list[int] = field(default_factory=list)  # pipelines of the last two epochs that formed

    def add_event(self, event: Mapping[str, Any]) -> None:
        self.note = ""
        node, kind = event.get("node"), event.get("kind")
        if kind == "recovered":
            event = self._told_at_once(event)
        if kind not in ("checkpoint_started", "checkpoint_saved"):  # which have a line of their own
            self.events.append(event)
        if kind == "node_joined" and node:
            self.members[node] = str(event.get("incarnation"))
        elif kind == "node_left" and self.members.get(node or "") == str(event.get("incarnation")):
            del self.members[node or ""]
        elif kind == "waiting":
            self.phase = "waiting"
        elif kind == "plan":
            self.phase, self.epoch = "forming", event.get("epoch", self.epoch)
            self.pipelines = tuple(tuple(nodes) for nodes in event.get("pipelines", ()))
            self.spares = tuple(event.get("spares", ()))
        elif kind == "formed":
            self.phase = "running"
            self._formed = [*self._formed[-1:], len(self.pipelines)]
        elif kind in ("resumed", "rollback"):
            self.step, self.last = event.get("step", event.get("to_step", 0)), {}
            self.saving, self.saved = None, event if self.step else {}
            for _ in range(min(len(self.losses), event.get("lost_steps", 0))):
                self.losses.pop()
        elif kind == "checkpoint_started":
            self.saving = event.get("step")
        elif kind in ("checkpoint_saved", "checkpoint_failed"):
            self.saving, self.saved = None, event
        elif kind == "stop_requested":
            self.phase = "stopping"
        elif kind == "ended":
            self.phase = str(event.get("state", "ended"))
            self.saving = None

    def _told_at_once(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """The recovery with the pipelines before and after it, in place of the events that led to it."""
        lost = {(loss.get("node"), loss.get("incarnation")) for loss in event.get("losses", ())}
        told = [
            one
            for one in self.events
            if not (one.get("kind") == "node_left" and (one.get("node"), one.get("incarnation")) in lost)
            and not (one.get("kind") in ("plan", "formed") and one.get("epoch") == event.get("epoch"))
        ]
        self.events.clear()
        self.events.extend(told)
        return {**event, "pipelines": self._formed} if len(self._formed) == 2 else event

    def add_step(self, step: Mapping[str, Any]) -> None:
        if step.get("step", self.step + 1) <= self.step:  # told again, after a failure or a resume
            self.last = step
            return
        if self.last or step.get("step") == 1:
            # Records count samples from the start of training, so the first one of a resumed run says nothing.
            samples = (step.get("samples") or 0) - (self.last.get("samples") or 0)
            self.recent.append((step.get("seconds") or 0.0, max(0, samples), step.get("weight") or 0.0))
        self.losses.append(step.get("loss"))
        self.step, self.last = step.get("step", self.step), step

    @property
    def idle(self) -> tuple[str, ...]:
        """Nodes that are there and not yet part of a plan."""
        placed = {node for nodes in self.pipelines for node in nodes} | set(self.spares)
        return tuple(sorted(self.members.keys() - placed))

    @property
    def seconds_per_step(self) -> float:
        """Mean of the last steps; 0 while there are none."""
        return sum(seconds for seconds, _, _ in self.recent) / len(self.recent) if self.recent else 0.0

    @property
    def samples_per_s(self) -> float:
        return self._per_second(1)

    @property
    def weight_per_s(self) -> float:
        return self._per_second(2)

    @property
    def weight_is_samples(self) -> bool:
        """Whether the loss weighs samples alike, so that the two rates are one."""
        return all(samples == weight for _, samples, weight in self.recent)

    def _per_second(self, index: int) -> float:
        seconds = sum(entry[0] for entry in self.recent)
        return sum(entry[index] for entry in self.recent) / seconds if seconds else 0.0
