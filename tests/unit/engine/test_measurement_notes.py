"""What a plan says of its measurements."""

from types import SimpleNamespace

import pytest

from snugfit._core.profile import Profile
from snugfit._engine.planning import _measurement_notes


def notes(found=0, waited=0.0, seconds=10.0):
    return list(_measurement_notes(Profile((), seconds=seconds, waited_seconds=waited), SimpleNamespace(found=found)))


def test_a_quiet_machine_without_a_cache_needs_no_note():
    assert notes() == notes(waited=1.0) == notes(waited=1.0, seconds=0.0) == []


@pytest.mark.parametrize(("waited", "share"), [(3.0, "30%"), (15.0, "100%")])
def test_a_busy_machine(waited, share):
    (note,) = notes(waited=waited)
    assert f"for {share} of the time a thread waited for a processor core" in note
    assert "those of a machine without other work" in note


def test_measurements_of_a_cache():
    assert "1 measurement of this machine was cached" in notes(found=1)[0]
    assert "2 measurements of this machine were cached" in notes(found=2, waited=5.0)[0]
