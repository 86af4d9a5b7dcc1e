"""What a plan says of its measurements."""

from types import SimpleNamespace

from snugfit._core.profile import Profile
from snugfit._engine.planning import _measurement_notes


def notes(found=0, delay=0.0, seconds=10.0):
    return list(_measurement_notes(Profile((), seconds=seconds, delay_seconds=delay), SimpleNamespace(found=found)))


def test_a_quiet_machine_without_a_cache_needs_no_note():
    assert notes() == notes(delay=1.0) == notes(seconds=0.0) == []


def test_a_busy_machine():
    (note,) = notes(delay=3.0)
    assert "which took 30% of that time" in note and "Predicted times leave this out" in note


def test_measurements_of_a_cache():
    assert "1 measurement of this machine was cached" in notes(found=1)[0]
    assert "2 measurements of this machine were cached" in notes(found=2, delay=5.0)[0]
