"""What all tests of the planner have."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch):
    """Collecting garbage takes a tenth of a second, and nothing here makes any."""
    for module in ("profiling.probe", "profiling.measuring", "_planner.search"):
        monkeypatch.setattr(sys.modules[f"snugfit.{module}"], "release_memory", lambda: None)
