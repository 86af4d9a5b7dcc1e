"""What tests of whole runs share."""

import pytest


@pytest.fixture
def measured_once(monkeypatch, tmp_path_factory, request):
    """What is measured for one test of a file serves its others: planning takes longer than their runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{request.module.__name__}"))
