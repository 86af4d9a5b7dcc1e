"""Processes for all tests of one file; and ``benchmarks`` importable, though it is not part of the package."""

import sys
from pathlib import Path

import pytest
from processes import Processes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(scope="module")
def processes():
    started = Processes()
    yield started
    started.stop()
