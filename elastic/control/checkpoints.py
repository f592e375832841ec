"""The controller's hand in the checkpoint store: claims lineages and makes checkpoints count, in a thread of its own,
so that a store that does not answer never holds up a recovery."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from checkpoint.commit import claim_lineage, commit, prune, survey
from checkpoint.layout import Attempt
from checkpoint.manifest import Part
from checkpoint.reader import CheckpointError
from checkpoint.store import Store, StoreError
from elastic.config import Config
from elastic.control import messages as ms
from elastic.digest import combined_digest

Json = dict[str, Any]


class Checkpoints:
    """
    Args:
        spec: of the job; names the store, the generation and, if a step was asked for, the checkpoint to start from.
        answer: called with what came of each question.
    """

    def __init__(
        self, config: Config, spec: Mapping[str, Any], answer: Callable[[ms.Event], None], wall: Callable[[], float]
    ) -> None:
        self._config, self._generation = config, int(spec["generation"])
        self._layers = [layer["name"] for layer in spec["profile"]["layers"]]
        self._start: str = spec["start"]
        self._store = Store(spec["checkpoint_url"], config.checkpoint.storage_options)
        self._answer, self._wall = answer, wall
        self._questions: queue.Queue[ms.Claim | ms.Commit | None] = queue.Queue()
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def ask(self, question: ms.Claim | ms.Commit) -> None:
        self._questions.put(question)

    def close(self) -> None:
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            if isinstance(question, ms.Claim):
                self._answer(self._claim(question))
            else:
                done = self._commit(question)
                self._prune()  # first: with the last answer the job, and this process, may end
                self._answer(done)

    def _claim(self, claim: ms.Claim) -> ms.Event:
        try:
            found = survey(self._store).surviving(self._generation)
            usable = [attempt for attempt in found if attempt.manifest not in claim.damaged]
            if claim.first and self._start not in ("", *claim.damaged):
                usable = [attempt for attempt in usable if attempt.manifest == self._start]
            base = usable[0] if usable else None
            lineage = claim_lineage(self._store, self._generation, base, {"claimed": self._wall()})
        except (StoreError, CheckpointError) as error:
            return ms.NotBased(f"the checkpoint store does not answer: {error}")
        return ms.Based(ms.Base(lineage, base.step, base.manifest) if base else ms.Base(lineage))

    def _commit(self, question: ms.Commit) -> ms.Event:
        attempt = Attempt(self._generation, *question.version)
        parts = [Part.from_json(saved["part"]) for saved in question.parts.values()]
        digests = {name: digest for saved in question.parts.values() for name, digest in saved["digests"].items()}
        progress = next(iter(question.parts.values()))["progress"]
        meta = {
            "job": self._config.name,
            "loss": progress["recent"][-1]["metrics"]["loss"] if progress["recent"] else None,
            "params_digest": combined_digest([(name, digests[name]) for name in self._layers]),
            **progress["ledger"],
        }
        try:
            commit(self._store, attempt, parts, meta, self._wall())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told and training goes on
            return ms.NotCommitted(question.version, str(error) or type(error).__name__)
        return ms.Committed(question.version, attempt.manifest)

    def _prune(self) -> None:
        try:
            prune(self._store, self._generation, self._config.checkpoint.keep)
        except (StoreError, CheckpointError):
            pass  # the next one removes what is left
