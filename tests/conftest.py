"""Shared by all tests; markers are registered in pyproject.toml."""

from __future__ import annotations

import os
import random

import pytest


@pytest.fixture
def seed() -> int:
    """A new seed in every run, printed when the test fails; ``TEST_SEED=N`` repeats it."""
    value = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {value}: repeat with TEST_SEED={value}")
    return value
