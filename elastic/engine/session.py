"""What a worker keeps from epoch to epoch: the job, the held layers, and how far training is.

Two threads meet here. The training thread runs epochs, one after the other. The listening thread freezes them: when a
newer epoch has begun it shuts the gate, aborts the groups and reports what is held.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from elastic.config import Config
from elastic.engine.channel import Message
from elastic.engine.comm import FormFailed, Groups, form, serve_store
from elastic.engine.fingerprint import fingerprint
from elastic.engine.gate import Gate, Superseded
from elastic.engine.gradients import FIRST_EXPONENT
from elastic.engine.layers import LayerState, Version, build_layer
from elastic.engine.page import Page
from elastic.engine.snapshots import Damaged, Snapshots
from elastic.engine.step import Announcement, End, Epoch, Member, Progress
from elastic.engine.transfer import LayerServer, TransferFailed, fetch_layer, version_of
from elastic.engine.units import units_of
from elastic.engine.usercode import cause_of, user_code
from elastic.engine.vote import Verdict
from elastic.errors import ElasticError
from elastic.job import load_job
from elastic.planning import Plan

Json = dict[str, Any]
ABORT_EVERY_S = 0.02
MEET_S = 60.0  # a rank may have to finish a forward or backward pass of the epoch before


class Session:
    """
    Args:
        init: the first message of the agent.
        send: hands a message to the agent; from any thread.
        page: where the agent sees what this worker is doing.
    """

    def __init__(
        self, init: Message, send: Callable[[Message], None], page: Page, wall: Callable[[], float] = time.time
    ) -> None:
        self._config = Config.from_dict(init["config"])
        self._boundaries = [(tuple(shape), dtype) for shape, dtype in init["boundaries"]]
        self._secret = init["secret"]
        self._send, self._wall = send, wall
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        torch.set_num_threads(self._config.train.threads)
        with user_code(f"the job function {self._config.job}"):
            self._job = load_job(self._config.job, self._config.params, self._config.train.seed, init["folder"])
        self._units = units_of(self._job)
        self._snapshots = Snapshots(
            init["checkpoint_url"],
            self._config.checkpoint.storage_options,
            init["generation"],
            init["writer"],
            fingerprint(),
            send,
        )
        self._store, self.store_address = serve_store(init["host"])
        self._stop = threading.Event()

        self._lock = threading.Lock()  # guards what both threads touch: the five below
        self._newest = 0  # the highest epoch seen, formed or not
        self._page = page
        self._gate = Gate(page)
        self._gate.leave()
        self._superseded = threading.Event()
        self._groups: Groups | None = None
        self._next: Message | None = None  # plan of the epoch to switch to at a voted step

        self._layers: dict[int, LayerState] = {}
        self._progress = Progress(0, [FIRST_EXPONENT] * len(self._units))
        self._voter = False  # has taken part in votes: its step says how far the epoch was
        self._formed: int | None = None  # the last epoch that this worker formed
        self._last_vote_at: float | None = None
        self._step_s: float | None = None
        self._open: Epoch | None = None  # the last epoch, until the outcome of its open step is carried out
        self._vote: list[Any] | None = None  # the newest that is known of epochs before, as it is reported
        self._entered = 0  # the epoch whose outcome has been carried out here: its versions may be handed over
        self._server = LayerServer(init["host"], self._secret, self._find)
        self.layers_address = self._server.address

    # What the listening thread calls.

    def request_stop(self) -> None:
        self._stop.set()

    def offer(self, command: Message) -> Message | None:
        """A plan: kept for a voted switch if this worker trains the epoch it follows, else given back to be run.

        Dropped if that epoch broke here: its open step is decided by the plan that follows the break.
        """
        with self._lock:
            if command["switch_from"] is None:
                return command
            if command["switch_from"] == self._newest and self._groups is not None:
                self._next = command
                return None
            broke = self._open is not None and self._open.epoch == command["switch_from"]
        return None if broke else command

    def freeze(self, epoch: int, timeout_s: float) -> None:
        """Ends whatever epoch is older than ``epoch`` and reports what this worker holds; silent when it cannot."""
        with self._lock:
            if epoch <= self._newest:
                return
            self._newest, self._next = epoch, None
            gate = self._gate
            self._superseded.set()

        def abort() -> None:
            with self._lock:
                groups = self._groups if self._gate is gate else None  # may have formed only now
            if groups is not None:
                groups.abort()

        frozen = gate.freeze(abort, ABORT_EVERY_S, timeout_s)
        if frozen:
            self._send({"ev": "frozen", "epoch": epoch, **self._holdings(), "at": self._wall()})

    def _holdings(self) -> Json:
        """Only of a frozen worker: nothing here changes while the gate is shut."""
        open_ = self._open
        return {
            "step": self._progress.step,
            "prepared": open_.prepared if open_ is not None else None,
            "due": open_.indices if open_ is not None else [],
            "formed": self._formed,
            "voter": self._voter,
            "vote": _vote_of(open_) or self._vote,
            "holds": {str(i): list(layer.version) for i, layer in self._layers.items() if layer.version is not None},
        }

    def _find(self, index: int, version: Version | None, epoch: int) -> tuple[LayerState, Json] | None:
        """A layer to hand over, once the outcome that ``epoch`` starts from has been carried out here."""
        layer = self._layers.get(index)
        if self._entered < epoch or layer is None or layer.version is None or version not in (None, layer.version):
            return None
        return layer, self._progress.to_json()

    # What the training thread calls.

    def run(self, command: Message) -> None:
        """Enters, forms and trains an epoch, and those it switches to; errors are reported, never raised."""
        next_: Message | None = command
        while next_ is not None:
            next_ = self._run_one(next_)

    def _run_one(self, command: Message) -> Message | None:
        epoch = command["epoch"]
        with self._lock:
            if epoch < self._newest:
                return None
            self._newest = epoch
            self._gate, self._superseded, self._next = Gate(self._page), threading.Event(), None
            gate, superseded = self._gate, self._superseded
        try:
            end = self._train(command, gate, superseded)
        except Exception as error:  # noqa: BLE001 - torch raises many kinds; every one is reported
            self._report_error(epoch, gate, error)
            return None
        finally:
            with self._lock:
                groups, self._groups = self._groups, None
                following = self._next
            if groups is not None:
                groups.close()
            gate.leave()
        if end is None:
            return None
        if end.kind == "switch":
            return following
        if end.kind in ("done", "stopped"):
            with self._page.doing("storing", "writing the last checkpoint"):
                self._save(command, wait=True)
        digests = {self._layers[i].name: self._layers[i].digest() for i in self._own(command)}
        self._send(
            {
                "ev": "end",
                "epoch": epoch,
                **end.__dict__,
                "loss": self._progress.recent[-1].metrics.loss if self._progress.recent else None,
                "digests": digests,
                "ledger": self._progress.ledger.__dict__,
            }
        )
        return None

    def _report_error(self, epoch: int, gate: Gate, error: Exception) -> None:
        cause = cause_of(error)
        if gate.is_shut or isinstance(error, Superseded):
            return  # the abort itself made it, or it is moot: the step is decided by the reports
        if isinstance(cause, ElasticError):
            report = {"ev": "error", "step": self._progress.step, "error": cause.as_json()}
        elif isinstance(cause, Damaged):
            report = {"ev": "unreadable", "manifest": cause.manifest, "reason": str(cause)}
        else:
            if not isinstance(cause, FormFailed | TransferFailed):
                traceback.print_exc()
            report = {"ev": "broken", "reason": f"{type(error).__name__}: {error}"}
        self._send({**report, "epoch": epoch, "at": self._wall()})

    @staticmethod
    def _own(command: Message) -> range:
        rank = command["ranks"].get(command["node"])
        place = next((place for place in Plan.from_json(command["plan"]).ranks() if place.rank == rank), None)
        return range(place.start, place.stop) if place is not None else range(0)

    def _train(self, command: Message, gate: Gate, superseded: threading.Event) -> End | None:
        epoch = command["epoch"]
        self._settle(command)
        self._entered = epoch
        rank = command["ranks"].get(command["node"])
        if rank is None:
            return None  # spare, or only here to hand layers over
        plan = Plan.from_json(command["plan"])
        started = self._wall()
        # Nothing held here changes meanwhile, so a newer epoch need not wait for the end of it to know what is held.
        with gate.computing("building and fetching layers"):
            built = self._build_missing(command)
            with ThreadPoolExecutor(max_workers=8) as pool:
                fetching = self._fetch(command, built, superseded, pool)
                groups = self._form(command, plan, rank, superseded)
                with self._lock:
                    self._groups = groups
                formed = self._wall()
                fetched = [future.result() for future in fetching]
        gate.enter()
        for layer in built:
            self._layers[layer.index] = layer
        for progress in fetched:
            self._progress = Progress.from_json(progress)
        transferred = self._wall()

        def voted() -> None:
            # Every rank has its layers by now, so nobody reads those that this rank gave away.
            for index in self._layers.keys() - set(self._own(command)):
                del self._layers[index]
            self._send({"ev": "voted", "epoch": epoch, "at": self._wall(), **self._pause()})

        def committed() -> None:
            if self._progress.step % self._config.checkpoint.every == 0:
                self._save(command, wait=False)

        member = Member(
            epoch=epoch,
            lineage=command["lineage"],
            gate=gate,
            announce=lambda announcement: self._announce(epoch, announcement),
            stop_requested=self._stop.is_set,
            switch_ready=lambda: self._next is not None,
            voted=voted,
            committed=committed,
        )
        train = self._config.train
        self._open = Epoch(
            self._job, train, self._boundaries, plan, groups, self._layers, self._progress, self._device, member
        )
        self._voter, self._formed = True, epoch
        self._send(
            {
                "ev": "formed",
                "epoch": epoch,
                "form_s": formed - started,
                "transfer_s": transferred - started if fetched else 0.0,
            }
        )
        gate.enter()
        return self._open.train()

    def _settle(self, command: Message) -> None:
        """Carries out the outcome of the open step that the plan gives, or forgets all where it starts over."""
        outcome, open_, switch = command["outcome"], self._open, command["switch_from"]
        self._open = None  # with it go the gradients of the step
        if open_ is not None:
            self._last_vote_at, self._step_s = open_.voted_at, open_.step_s
            self._vote = _vote_of(open_) or self._vote
        for index in [i for i, layer in self._layers.items() if layer.version is None]:
            del self._layers[index]  # torn
        if switch is not None:
            if open_ is None or open_.epoch != switch:  # what a spare holds is of an epoch long gone
                self._layers.clear()
                self._voter, self._vote = False, None
            return
        verdict = outcome["verdict"] if outcome is not None else None
        self._vote = [outcome["step"], outcome["epoch"], verdict] if verdict is not None else None
        if command["base"] is not None:
            self._layers.clear()
            self._progress = Progress(0, [FIRST_EXPONENT] * len(self._units))
            return
        if open_ is not None and verdict is not None:
            open_.settle(outcome["step"], Verdict.from_json(verdict))
        wanted = None if command["version"] is None else version_of(command["version"])
        for index in [i for i, layer in self._layers.items() if wanted not in (None, layer.version)]:
            del self._layers[index]

    def _pause(self) -> Json:
        """How long training stood still here, from the last vote of one epoch to the first of the next."""
        if self._last_vote_at is None:
            return {"pause_s": None, "step_s": None}
        return {"pause_s": time.perf_counter() - self._last_vote_at, "step_s": self._step_s}

    def _patience_s(self, command: Message) -> float:
        """How long peers may take to come to an epoch; a newer one ends the waiting at once."""
        orphan_s = self._config.detection.orphan_s
        # A switch waits for the others' vote, so for as long as a step takes.
        return orphan_s if command["switch_from"] is not None else min(MEET_S, orphan_s)

    def _form(self, command: Message, plan: Plan, rank: int, superseded: threading.Event) -> Groups:
        return form(
            plan,
            rank,
            self._units,
            command["store"],
            f"{self._config.name}/{command['epoch']}",
            self._patience_s(command),
            command["form_timeout_s"],
            self._config.detection.orphan_s,
            superseded,
        )

    def _build_missing(self, command: Message) -> list[LayerState]:
        """The layers that the plan gives this rank and it does not hold, as they are before the first step."""
        if command["base"] is not None:
            missing = list(self._own(command))
        else:
            missing = [int(index) for index in command["sources"].get(command["node"], {})]
        return [self._build(index, command["lineage"]) for index in missing]

    def _fetch(
        self, command: Message, built: list[LayerState], superseded: threading.Event, pool: ThreadPoolExecutor
    ) -> list[Future[Json]]:
        """Starts to fill the new layers, from their holders or a checkpoint; each future gives how far training is."""
        version = version_of(command["version"]) if command["version"] is not None else None
        if command["base"] is not None:
            manifest, exact = command["base"]["manifest"], self._config.train.reduction == "exact"
            if not manifest:
                return []  # they are as they are before the first step
            assert version is not None
            return [pool.submit(self._snapshots.restore, blank, manifest, version, exact) for blank in built]
        sources: Mapping[str, list[str]] = command["sources"].get(command["node"], {})

        def fetch(blank: LayerState) -> Json:
            holders, patience_s = sources[str(blank.index)], self._patience_s(command)
            return fetch_layer(blank, version, command["epoch"], holders, self._secret, patience_s, superseded)[1]

        return [pool.submit(fetch, blank) for blank in built]

    def _save(self, command: Message, *, wait: bool) -> None:
        """This rank's share: every layer is written by one of its owners."""
        plan = Plan.from_json(command["plan"])
        rank = command["ranks"][command["node"]]
        mine = [i for i in self._own(command) if (owners := plan.owners(i))[i % len(owners)] == rank]
        self._snapshots.save([self._layers[i] for i in mine], self._progress.to_json(), command["epoch"], wait=wait)

    def _build(self, index: int, lineage: int) -> LayerState:
        with user_code(f"building layer {self._job.layers[index].name!r}"):
            layer = build_layer(self._job, index, self._config.train.seed, lineage)
            layer.module.to(self._device)
        return layer

    def _announce(self, epoch: int, announcement: Announcement) -> None:
        if self._job.on_metrics is not None:
            with user_code("the metric callback on_metrics"):
                self._job.on_metrics(announcement.metrics)
        record: Json = {**announcement.metrics.__dict__, **announcement.ledger.__dict__}
        self._send(
            {"ev": "step", "epoch": epoch, **record, "weight": announcement.weight, "seconds": announcement.seconds}
        )


def _vote_of(open_: Epoch | None) -> list[Any] | None:
    """The newest vote that an epoch has seen: step, epoch, verdict."""
    if open_ is None or open_.last_vote is None:
        return None
    step, verdict = open_.last_vote
    return [step, open_.epoch, verdict.to_json()]
