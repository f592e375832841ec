"""Shared by all tests; markers are registered in pyproject.toml."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest


@pytest.fixture
def seed() -> int:
    """A new seed in every run, printed when the test fails; ``TEST_SEED=N`` repeats it."""
    value = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {value}: repeat with TEST_SEED={value}")
    return value


@pytest.fixture(autouse=True)
def no_thread_goes_on():
    """A test that leaves a thread of ours running would slow down all tests after it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while left := [
        thread.name
        for thread in set(threading.enumerate()) - before
        if thread.name in ("follow", "fleet") or thread.name.startswith("elastic-")
    ]:
        assert time.monotonic() < deadline, f"threads are still running: {left}"
        time.sleep(0.01)
