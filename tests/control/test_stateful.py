"""The promises of the protocol under random faults: the state machine against a model of nodes and network.

Each example is a world (nodes, steps, memory, reduction) and a seed. `explore` lets faults happen at random, then none
any more, and demands all the time what `World` names, and at the end that the job has ended with all its steps. A
failure prints the seed and the shortest list of actions that shows it; ``STATEFUL_SEED=N`` plays that one alone.

``STATEFUL_EXAMPLES=100000 python -m pytest tests/control/test_stateful.py --timeout 0`` looks longer.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, strategies
from hypothesis import settings as profile

from elastic.control.messages import Frozen
from elastic.control.state import advance
from tests.control.world import Shape, Violation, explore, play

EXAMPLES = int(os.environ.get("STATEFUL_EXAMPLES", "1000"))
SEED = os.environ.get("STATEFUL_SEED")


def shape_of(seed: int) -> Shape:
    """Data parallel or pipelines, small enough that a hundred actions reach every corner."""
    pick = random.Random(seed ^ 0x5EED)
    return Shape(
        nodes=pick.choice((2, 3, 3, 4, 5)),
        steps=pick.choice((4, 6, 9)),
        device_bytes=pick.choice((None, 320, 320)),  # all layers on a node, or two
        fault_tolerance=pick.choice((0, 1)),
        min_nodes=pick.choice((1, 1, 2)),
        exact=pick.random() < 0.6,
        redo=frozenset(step for step in range(9) if pick.random() < 0.15),
        skip=frozenset(step for step in range(9) if pick.random() < 0.1),
        quarantine=pick.random() < 0.5,
    )


# hypothesis gives seeds and keeps count; what it would shrink is a number, `explore` shrinks the actions.
@profile(
    max_examples=1 if SEED else EXAMPLES,
    deadline=None,
    derandomize=True,  # CI plays the same worlds each time; a longer look is for STATEFUL_EXAMPLES
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(strategies.integers(0, 2**48))
def test_the_promises_hold_under_random_faults(seed: int) -> None:
    seed = int(SEED) if SEED else seed
    explore(shape_of(seed), seed)


@pytest.mark.parametrize("shape", [Shape(), Shape(device_bytes=320), Shape(exact=False, redo=frozenset({1}))])
def test_a_world_without_faults_trains_every_step_in_one_epoch(shape: Shape) -> None:
    world, error = play(shape, [])
    assert error is None
    assert world.result is not None
    assert (world.result["state"], world.result["step"], world.state.lineage) == ("done", 6, 0)
    assert [publish.epoch for publish in world.published] == [1]
    assert [step for step, _, _ in world.announced[0]] == list(range(6))


# That the world would see what it looks for: the same explorations with a state machine that errs.


def forgets_votes(state, event, now):
    """Decides every open step to be void."""
    if isinstance(event, Frozen):
        event = replace(event, report=replace(event.report, vote=None))
    return advance(state, event, now)


def test_a_state_machine_that_errs_is_found_out() -> None:
    def find() -> None:
        for seed in range(400):
            explore(shape_of(seed), seed, step=forgets_votes)

    with pytest.raises(Violation) as found:
        find()
    assert "actions [" in str(found.value)
