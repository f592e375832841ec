"""What is summed together: one *unit* per layer, and one per tied weight.

A *slot* is one logical parameter; its *leaves* are the copies of it, each in a layer. An untied parameter has one leaf.
A tied weight has a leaf in every layer that uses it, and its gradient is the sum over them, so it is a unit of its own
whose owners are all ranks that hold any of those layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.engine.layers import resolve_tied
from elastic.job import Job

Leaf = tuple[int, str]  # (index of the layer, path of the parameter inside it)


@dataclass(frozen=True)
class Unit:
    """``layers`` are the indices of the layers that contribute. For a layer's own unit ``leaves`` is empty and means
    every parameter of the layer that no tied unit lists."""

    name: str
    layers: tuple[int, ...]
    leaves: tuple[Leaf, ...] = ()

    @property
    def copies(self) -> int:
        """How many gradients each microbatch adds to one slot."""
        return max(1, len(self.leaves))


def units_of(job: Job) -> tuple[Unit, ...]:
    """The units of a job in a fixed order: layers first, then tied weights by the name of their owner."""
    index = {layer.name: i for i, layer in enumerate(job.layers)}
    tied: dict[Leaf, list[Leaf]] = {}
    for i, layer in enumerate(job.layers):
        for path, target in layer.tied.items():
            owner_name, owner_path = resolve_tied(job, target)
            owner = (index[owner_name], owner_path)
            tied.setdefault(owner, [owner]).append((i, path))
    own = tuple(Unit(layer.name, (i,)) for i, layer in enumerate(job.layers))
    shared = tuple(
        Unit(
            f"{job.layers[owner[0]].name}.{owner[1]}",
            tuple(sorted({i for i, _ in leaves})),
            tuple(sorted(leaves)),
        )
        for owner, leaves in sorted(tied.items())
    )
    return own + shared
