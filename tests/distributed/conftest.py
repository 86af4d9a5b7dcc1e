"""Processes for all tests of one file."""

import pytest
from processes import Processes


@pytest.fixture(scope="module")
def processes():
    started = Processes()
    yield started
    started.stop()
