"""The gate, with real threads: who waits for whom, and what a training thread can still do."""

from __future__ import annotations

import threading
import time

import pytest

from elastic.engine.gate import Gate, Superseded

PATIENCE_S = 10.0


class Trainer:
    """A training thread that does what the test tells it and says how it left."""

    def __init__(self, work):
        self.gate, self.go = Gate(), threading.Event()
        self.here = threading.Event()  # set by the work when it is where the test wants it
        self.left_by = None
        self.passed = []  # what it did after that
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        assert self.here.wait(PATIENCE_S)

    def _run(self, work):
        try:
            work(self)
        except Exception as error:  # noqa: BLE001 - told to the test
            self.left_by = type(error)
        finally:
            self.gate.leave()

    def stop_here(self):
        self.here.set()
        assert self.go.wait(PATIENCE_S)

    def join(self):
        self.go.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.left_by


class Aborts:
    """Counts calls; at the given one it calls ``then``."""

    def __init__(self, at=0, then=lambda: None):
        self.count, self._at, self._then = 0, at, then

    def __call__(self):
        self.count += 1
        if self.count == self._at:
            self._then()


def freeze(gate, abort, timeout_s=PATIENCE_S, every_s=0.01):
    """``(frozen, seconds)``"""
    started = time.monotonic()
    frozen = gate.freeze(abort, every_s, timeout_s)
    return frozen, time.monotonic() - started


def test_an_open_gate_lets_everything_pass():
    gate = Gate()
    gate.enter()
    with gate.computing():
        pass
    gate.enter()
    assert not gate.is_shut


def test_a_shut_gate_lets_nothing_begin():
    gate = Gate()
    gate.shut()
    assert gate.is_shut
    with pytest.raises(Superseded):
        gate.enter()
    ran = []
    with pytest.raises(Superseded), gate.computing():
        ran.append(1)
    assert ran == []


def test_freezing_a_thread_that_computes_returns_at_once_and_it_can_only_leave():
    def work(trainer):
        trainer.gate.enter()
        with trainer.gate.computing():
            trainer.stop_here()
        trainer.passed.append("after computing")

    trainer = Trainer(work)
    aborts = Aborts()
    frozen, seconds = freeze(trainer.gate, aborts)
    assert frozen
    assert seconds < 1.0
    assert aborts.count == 1
    assert trainer.join() is Superseded
    assert trainer.passed == []


def test_what_fails_while_computing_is_moot_once_the_gate_is_shut():
    def work(trainer):
        with trainer.gate.computing():
            trainer.stop_here()
            raise ValueError("of an epoch that is over")

    trainer = Trainer(work)
    assert freeze(trainer.gate, Aborts())[0]
    assert trainer.join() is Superseded


def test_what_fails_while_computing_passes_an_open_gate():
    def work(trainer):
        with trainer.gate.computing():
            trainer.stop_here()
            raise ValueError("bad sample")

    trainer = Trainer(work)
    assert trainer.join() is ValueError
    assert freeze(trainer.gate, Aborts())[0]  # it has left


def test_a_thread_in_a_collective_is_waited_for_and_aborted_again_and_again():
    def work(trainer):
        trainer.gate.enter()
        trainer.stop_here()  # the collective
        raise RuntimeError("connection closed")

    trainer = Trainer(work)
    # The first aborts hit nothing: the operation had not begun.
    aborts = Aborts(at=5, then=trainer.go.set)
    frozen, seconds = freeze(trainer.gate, aborts)
    assert frozen
    assert aborts.count >= 5
    assert seconds >= 4 * 0.01
    assert trainer.join() is RuntimeError


def test_a_thread_in_the_optimizer_is_waited_for_until_it_next_computes():
    def work(trainer):
        trainer.gate.enter()
        trainer.stop_here()  # the optimizer
        trainer.passed.append("optimizer done")
        with trainer.gate.computing():
            trainer.passed.append("computed")

    trainer = Trainer(work)
    done = []
    aborts = Aborts(at=3, then=lambda: (done.extend(trainer.passed), trainer.go.set()))
    assert freeze(trainer.gate, aborts)[0]
    assert done == []
    assert trainer.passed == ["optimizer done"]
    assert trainer.join() is Superseded
    assert trainer.passed == ["optimizer done"]


def test_freezing_gives_up_after_its_timeout():
    def work(trainer):
        trainer.gate.enter()
        trainer.stop_here()  # neither computing nor left, whatever is aborted
        trainer.gate.enter()

    trainer = Trainer(work)
    aborts = Aborts()
    frozen, seconds = freeze(trainer.gate, aborts, timeout_s=0.2)
    assert not frozen
    assert 0.2 <= seconds < 5.0
    assert aborts.count > 5
    assert trainer.gate.is_shut  # and stays so
    assert trainer.join() is Superseded
    assert freeze(trainer.gate, Aborts())[0]


def test_a_thread_that_has_left_is_frozen():
    gate = Gate()
    gate.leave()
    frozen, seconds = freeze(gate, Aborts())
    assert frozen
    assert seconds < 1.0


def test_several_freezes_at_once():
    def work(trainer):
        trainer.gate.enter()
        trainer.stop_here()

    trainer = Trainer(work)
    results = []
    threads = [threading.Thread(target=lambda: results.append(freeze(trainer.gate, Aborts())[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert results == []
    assert trainer.join() is None
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == [True] * 4


def test_once_frozen_nothing_is_begun():
    """A thread that alternates at full speed between computing and what must not go on while frozen."""
    for _ in range(50):
        active = []

        def work(trainer, active=active):
            trainer.here.set()
            while True:
                with trainer.gate.computing():
                    pass
                trainer.gate.enter()
                active.append(1)
                active.pop()
                time.sleep(0)

        trainer = Trainer(work)
        assert freeze(trainer.gate, Aborts(), every_s=0.001)[0]
        for _ in range(20):
            assert active == []
            time.sleep(0)
        assert trainer.join() is Superseded
