"""Makes attempts count, finds those that do, and removes the rest."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from checkpoint import layout
from checkpoint.layout import Attempt
from checkpoint.manifest import Json, Malformed, Manifest, Part, seal, unseal
from checkpoint.reader import Corrupt, Incomplete, read_indexes
from checkpoint.reader import read_manifest as read_manifest
from checkpoint.store import Store

READERS = 8


def commit(store: Store, attempt: Attempt, parts: Sequence[Part], meta: Mapping[str, Any], created: float) -> Manifest:
    """Checks that all parts are in the store, and writes the manifest, after which the attempt is a checkpoint.

    Args:
        meta: kept in the manifest; JSON.
        created: seconds since 1970.

    Returns:
        What is committed: the earlier manifest, if there is one already.

    Raises:
        Incomplete, Corrupt: something that was to be committed is missing, or not what was written.
        StoreError: the store did not answer; the attempt may be committed or not.
    """
    indexes = read_indexes(store, parts)
    sizes = store.sizes(attempt.folder)
    for index in indexes:
        for pack, size in index.packs.items():
            if pack not in sizes:
                raise Incomplete(f"{store.url}/{pack} is missing")
            if sizes[pack] != size:
                raise Corrupt(f"{store.url}/{pack} has {sizes[pack]} bytes of {size}")
    manifest = Manifest(attempt, created, tuple(parts), dict(meta))
    return manifest if store.create(attempt.manifest, manifest.to_bytes()) else read_manifest(store, attempt)


class Survey:
    """What a store held when it was looked at; each generation is looked at when it is asked for.

    Attributes:
        generations: the record of each.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lineages: dict[int, dict[int, Json]] = {}
        self._committed: dict[int, list[Attempt]] = {}
        self.generations = _read_all(store, layout.generations_in(store.list(layout.GENERATIONS)))

    def committed(self, generation: int) -> list[Attempt]:
        """All that have a manifest, newest first."""
        self._look(generation)
        return self._committed[generation]

    def lineages(self, generation: int) -> dict[int, Json]:
        """The claim of each."""
        self._look(generation)
        return self._lineages[generation]

    def surviving(self, generation: int) -> list[Attempt]:
        """The committed attempts that count, newest first; see `checkpoint.layout.surviving`."""
        return layout.surviving(self.lineages(generation), self.committed(generation))

    def newest(self) -> Attempt | None:
        """The newest that counts, in the newest generation that has any."""
        return next((found[0] for g in sorted(self.generations, reverse=True) if (found := self.surviving(g))), None)

    def _look(self, generation: int) -> None:
        if generation not in self._committed:
            # In this order: a checkpoint whose lineage is not seen would be taken for an undone one.
            names = self._store.list(layout.manifests_prefix(generation))
            claims = layout.lineages_in(self._store.list(layout.lineages_prefix(generation)))
            self._lineages[generation] = _read_all(self._store, claims)
            self._committed[generation] = sorted(layout.attempts_in(names), reverse=True)


def survey(store: Store) -> Survey:
    """
    Raises:
        Corrupt: the record of a generation is not what was written; a `Survey`'s methods say so of a claim.
        StoreError: the store did not answer.
    """
    return Survey(store)


def claim_generation(store: Store, record: Mapping[str, Any]) -> int:
    """Begins a generation, the one after the newest; never one that another has begun.

    Args:
        record: kept with it; JSON.

    Raises:
        StoreError: the store refused or did not answer.
    """
    generation = max(layout.generations_in(store.list(layout.GENERATIONS)), default=0) + 1
    while not store.create(layout.generation_name(generation), _claim(record, generation=generation)):
        generation += 1
    return generation


def claim_lineage(store: Store, generation: int, base: Attempt | None, record: Mapping[str, Any]) -> int:
    """Begins a lineage; from now on nothing counts that is newer than ``base`` in the lineages before.

    Args:
        base: the checkpoint it goes on from, ``None`` for the start of the generation.
        record: kept with it; JSON.

    Raises:
        StoreError: the store refused or did not answer.
    """
    lineage = max(layout.lineages_in(store.list(layout.lineages_prefix(generation))), default=-1) + 1
    began = {"base": base.manifest if base else None, "step": base.step if base else 0}
    while not store.create(layout.lineage_name(generation, lineage), _claim(record, lineage=lineage, **began)):
        lineage += 1
    return lineage


def prune(store: Store, generation: int, keep: int, in_use: Collection[Attempt] = ()) -> list[Attempt]:
    """Deletes all but the newest ``keep`` checkpoints that count (never the newest), those that do not count, and what
    attempts left behind that came to nothing. What it did not get to, the next call deletes.

    Args:
        in_use: not deleted either.

    Returns:
        What was deleted, or was meant to be by an earlier call.

    Raises:
        Corrupt: a claim is not what was written, so that it is unknown what counts.
        StoreError: the store did not answer.
    """
    tried = layout.attempts_in(store.list(layout.attempts_prefix(generation)))
    found = Survey(store)
    counted = found.surviving(generation)
    if not counted:
        return []
    committed = set(found.committed(generation))
    # A newer attempt without a manifest may still be in the making.
    unfinished = {attempt for attempt in tried - committed if attempt < counted[0]}
    doomed = (committed | unfinished) - set(counted[: max(keep, 1)]) - set(in_use)
    for attempt in sorted(doomed):
        store.delete(attempt.manifest)  # first, so that no checkpoint is there in part
        store.delete_tree(attempt.folder)
    return sorted(doomed)


def _claim(record: Mapping[str, Any], **facts: Any) -> bytes:
    # The id tells two claims apart that say the same.
    return seal({**record, **facts, "id": secrets.token_hex(8)})


def _read_all(store: Store, names: Mapping[int, str]) -> dict[int, Json]:
    def read(name: str) -> Json:
        try:
            return dict(unseal(store.read(name) or b""))
        except Malformed as error:
            raise Corrupt(f"{store.url}/{name} cannot be used: {error}") from error

    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-read") as pool:
        return dict(zip(names, pool.map(read, names.values()), strict=True))
