from __future__ import annotations

import pytest

from tests.e2e.harness import Elastic


@pytest.fixture
def elastic(tmp_path):
    """The command line in an empty folder. The test fails when anything is left at its end."""
    elastic = Elastic(tmp_path)
    yield elastic
    left = elastic.left()
    elastic.end()
    assert not left
