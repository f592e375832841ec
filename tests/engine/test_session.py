"""What a worker says and keeps between epochs; its epochs stand still here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic.engine.inspection import inspect_job
from elastic.engine.page import Page
from elastic.engine.session import Session
from elastic.engine.vote import Verdict
from tests.engine.processes import load, small_config

COMMIT = Verdict("commit", 1.0, 1.0, None, 1.0, (), 16, 0, 0, None, False, 0)


class Stopped(SimpleNamespace):
    """An epoch whose training has returned."""

    def settle(self, step, verdict):
        self.settled.append((step, verdict.kind))


def stopped(epoch, prepared=None, vote=None):
    return Stopped(
        epoch=epoch, prepared=prepared, last_vote=vote, indices=[0, 1], voted_at=None, step_s=None, settled=[]
    )


@pytest.fixture
def session(tmp_path):
    config = small_config()
    inspection = inspect_job(load(config), config.train)
    init = {"config": config.to_dict(), "boundaries": inspection.boundaries, "secret": "test"}
    init |= {"folder": config.folder, "host": "127.0.0.1", "checkpoint_url": str(tmp_path), "generation": 1}
    session = Session({**init, "writer": "node-0"}, lambda message: None, Page())
    session._voter = True
    session._progress.step = 5
    return session


def plan(epoch, switch_from=None, outcome=None, version=None):
    return {
        "epoch": epoch, "switch_from": switch_from, "outcome": outcome, "version": version, "base": None,
    }  # fmt: skip


def layer(version):
    return SimpleNamespace(version=version)


def test_a_switch_from_an_epoch_that_broke_here_is_dropped(session):
    session._open = stopped(3, prepared=5)
    assert session.offer(plan(4, switch_from=3)) is None
    assert session._holdings()["prepared"] == 5  # what the next plan decides
    assert session.offer(plan(4, switch_from=2)) is not None  # a spare's: it did not train epoch 2
    assert session.offer(plan(4)) is not None


def test_the_newest_vote_is_reported_until_a_plan_says_what_came_of_it(session):
    session._open = stopped(3, vote=(4, COMMIT))
    assert session._holdings()["vote"] == [4, 3, COMMIT.to_json()]
    session._settle(plan(4, switch_from=3))
    assert session._holdings()["vote"] == [4, 3, COMMIT.to_json()]
    session._open = stopped(4)  # has not voted yet
    assert session._holdings()["vote"] == [4, 3, COMMIT.to_json()]
    told = {"step": 5, "epoch": 4, "verdict": COMMIT.to_json()}
    session._settle(plan(5, outcome=told))
    assert session._holdings()["vote"] == [5, 4, COMMIT.to_json()]
    session._settle(plan(6, outcome={"step": 6, "epoch": 0, "verdict": None}))
    assert session._holdings()["vote"] is None


def test_a_drained_rank_still_says_how_far_the_epoch_was(session):
    session._open = stopped(3, vote=(4, COMMIT))
    session._layers = {0: layer((0, 5, 0))}
    session._settle(plan(4, switch_from=3))
    assert (session._holdings()["voter"], session._holdings()["holds"]) == (True, {"0": [0, 5, 0]})
    session._settle(plan(5, switch_from=4))  # it has not trained epoch 4
    assert (session._holdings()["voter"], session._holdings()["holds"]) == (False, {})


def test_nothing_is_due_without_an_open_epoch(session):
    session._layers = {0: layer((0, 5, 0))}
    assert session._holdings()["due"] == []
    session._open = stopped(3)
    assert session._holdings()["due"] == [0, 1]


def test_torn_layers_are_dropped_before_the_outcome_is_carried_out(session):
    open_ = session._open = stopped(3, prepared=5)
    session._layers = {0: layer(None), 1: layer((0, 6, 0)), 2: layer((0, 5, 0))}
    told = {"step": 5, "epoch": 3, "verdict": COMMIT.to_json()}
    session._settle(plan(4, outcome=told, version=[0, 6, 0]))
    assert open_.settled == [(5, "commit")]
    assert list(session._layers) == [1]  # layer 2 is one that this epoch did not train
