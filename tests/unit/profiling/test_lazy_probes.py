"""Probes that are measured only if they are needed, which depends on others and on available memory."""

import itertools
from dataclasses import replace

import pytest
from probe_samples import Machine, probe

from snugfit.profiling import measure_probes


def test_a_probe_is_asked_for_again_once_looking_has_left_memory_behind():
    machine, told = Machine(budget=3000), []

    def needed(lines, available):
        told.append(available)
        machine.kept = 900
        return available > 1500

    made, ran = probe(machine, fixed=500, sample=10)
    profile = measure_probes([replace(made, needed=needed)], machine, machine, lambda *_: None)
    assert told == [2000, 1100, 1100] and ran == [] and profile.lines == {}


@pytest.mark.parametrize("kept", [(0, 200), (200, 0)])
def test_one_of_two_alternatives_is_measured_however_memory_changes_between_looking_at_them(kept):
    """One is needed where there is room for it, the other where there is not; asked at different times, neither was."""
    machine, changes = Machine(budget=3000), itertools.cycle(kept)

    def needed_above(least, most):
        def needed(tried, available):
            machine.kept = next(changes)
            return not tried and least < available <= most

        return needed

    made, _ = probe(machine, fixed=500, sample=10)
    machine.kept = kept[-1]
    large, small = (replace(made, name=name) for name in ("large", "small"))
    large, small = replace(large, needed=needed_above(1900, 5000)), replace(small, needed=needed_above(0, 1900))
    profile = measure_probes([large, small], machine, machine, lambda *_: None)
    assert len(profile.lines) == 1


def test_what_was_not_needed_is_asked_again_once_another_such_probe_was_measured():
    machine, asked = Machine(budget=3000), []

    def after(*others):
        def needed(tried, available):
            asked.append((others, tuple(tried)))
            return all(other in tried for other in others)

        return needed

    made, _ = probe(machine, fixed=500, sample=10)
    refused, _ = probe(machine, fixed=5000, sample=10)
    first = replace(made, name="first", needed=after("second", "refused"))
    second = replace(made, name="second", needed=after("refused"))
    refused = replace(refused, name="refused", needed=after())
    never, last = replace(made, name="never", needed=after("nothing")), replace(made, name="last")
    told = []
    profile = measure_probes(
        [first, never, second, refused, last], machine, machine, lambda name, *_: told.append(name)
    )
    assert told == ["refused", "second", "first", "last"]
    assert list(profile.lines) == ["second", "first", "last"], "what did not fit has none, and is not asked for again"
    assert (("nothing",), ("refused", "second", "first")) in asked
