"""Where everything is under the root of a checkpoint store, and which checkpoints count.

    generations/00000001.json                            a generation began; created once
    g00000001/lineages/00000000.json                     a lineage began, and from which checkpoint; created once
    g00000001/attempts/00000000-000000000100-00000003/   the parts of one attempt, <lineage>-<step>-<decider>
        <writer>-<n>.safetensors                         packs of tensors
        <writer>.json                                    the index of a writer's packs
    g00000001/manifests/00000000-000000000100-00000003.json    the attempt is committed

Manifests are apart from the parts so that one short listing finds all checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Version = tuple[int, int, int]  # lineage, step, decider

GENERATIONS = "generations"
_GENERATION = re.compile(r"generations/(\d{8,})\.json")
_LINEAGE = re.compile(r"g\d{8,}/lineages/(\d{8,})\.json")
_ATTEMPT = re.compile(
    r"g(\d{8,})/(?:manifests/(\d{8,})-(\d{12,})-(\d{8,})\.json|attempts/(\d{8,})-(\d{12,})-(\d{8,})/.+)"
)
_WRITER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, order=True)
class Attempt:
    """One try to save the state after a step; the newer is the greater.

    Attributes:
        decider: number of the epoch that decided the step; tells apart states that share lineage and step.
    """

    generation: int
    lineage: int
    step: int
    decider: int

    @classmethod
    def parse(cls, name: str) -> Attempt:
        """The attempt to which a manifest, an index or a pack of that name belongs.

        Raises:
            ValueError: it is none of these.
        """
        match = _ATTEMPT.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not the name of a manifest")
        return cls(*(int(group) for group in match.groups() if group is not None))

    @property
    def version(self) -> Version:
        return self.lineage, self.step, self.decider

    @property
    def folder(self) -> str:
        """Prefix of the parts."""
        return f"{attempts_prefix(self.generation)}/{self._id}"

    @property
    def manifest(self) -> str:
        return f"{manifests_prefix(self.generation)}/{self._id}.json"

    def index(self, writer: str) -> str:
        """
        Raises:
            ValueError: the writer's name cannot be part of an object's name.
        """
        if not _WRITER.fullmatch(writer):
            raise ValueError(f"a writer's name is made of letters, digits, '_', '.' and '-', unlike {writer!r}")
        return f"{self.folder}/{writer}.json"

    def pack(self, writer: str, number: int) -> str:
        return f"{self.index(writer).removesuffix('.json')}-{number}.safetensors"

    @property
    def _id(self) -> str:
        return f"{self.lineage:08}-{self.step:012}-{self.decider:08}"


def generation_name(generation: int) -> str:
    return f"{GENERATIONS}/{generation:08}.json"


def lineages_prefix(generation: int) -> str:
    return f"g{generation:08}/lineages"


def lineage_name(generation: int, lineage: int) -> str:
    return f"{lineages_prefix(generation)}/{lineage:08}.json"


def attempts_prefix(generation: int) -> str:
    return f"g{generation:08}/attempts"


def manifests_prefix(generation: int) -> str:
    return f"g{generation:08}/manifests"


def generations_in(names: Iterable[str]) -> dict[int, str]:
    """Generations by number, with the names of their records; other names are ignored."""
    return _numbers(_GENERATION, names)


def lineages_in(names: Iterable[str]) -> dict[int, str]:
    """Lineages by number, with the names of their claims; other names are ignored."""
    return _numbers(_LINEAGE, names)


def attempts_in(names: Iterable[str]) -> set[Attempt]:
    """The attempts to which any of these objects belong; other names are ignored."""
    return {Attempt.parse(name) for name in names if _ATTEMPT.fullmatch(name)}


def surviving(lineages: Mapping[int, Mapping[str, Any]], manifests: Iterable[Attempt]) -> list[Attempt]:
    """The committed attempts of one generation that no later lineage has undone, newest first.

    Those of the newest lineage count; of the lineage in which it began, those up to the one it began from; and so on.

    Args:
        lineages: the claim of each; ``base`` is the manifest that the lineage began from, ``None`` for the start.
    """
    last: dict[int, Version] = {}  # the newest that counts, by lineage
    lineage = max(lineages, default=None)
    limit: Version | None = None
    while lineage is not None and lineage in lineages and lineage not in last:
        last[lineage] = limit or (lineage + 1, 0, 0)
        base = lineages[lineage]["base"]
        limit = Attempt.parse(base).version if base is not None else None
        lineage = limit[0] if limit else None
    counted = {attempt for attempt in manifests if attempt.lineage in last and attempt.version <= last[attempt.lineage]}
    return sorted(counted, reverse=True)


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> dict[int, str]:
    return {int(match[1]): name for name in names if (match := pattern.fullmatch(name))}
