"""What probes that another process measured add to memory: kernels and leftovers count once."""

from dataclasses import replace

import pytest
from probe_samples import Machine, probe

from snugfit._core.profile import Profile
from snugfit.profiling import Probe
from snugfit.profiling.measurement_cache import Measurements
from snugfit.profiling.measuring import (
    STARTED_GROWTH,
    in_fresh_process,
    in_next_process,
    measure_probes,
    without_others,
)


def test_what_another_process_measured_counts_with_what_it_left_in_memory(tmp_path):
    def measured(growing):
        machine = Machine(budget=100_000)

        def grow(batch):
            machine.resting += growing

        made, ran = probe(machine, 1000, 10, on_step=grow)
        known = Measurements(tmp_path)
        return measure_probes([replace(made, same="conv")], machine, machine, lambda *_: None, known), ran

    first, ran = measured(growing=5)
    again, ran_again = measured(growing=0)
    assert ran and not ran_again
    assert again.floors == first.floors
    assert again.lines == {name: replace(line, elsewhere=True) for name, line in first.lines.items()}
    assert first.base_bytes == 1000 + 5 * len(ran)
    others = first.base_bytes - again.base_bytes
    assert others == first.lines["p"].sizes_bytes == 5 * (len(ran) - 2), "training runs at one size"
    assert again.lines["p"].bytes_at(8) == first.lines["p"].bytes_at(8) + first.lines["p"].shape_bytes


def test_a_single_batch_size_that_another_process_measured_counts_its_kernels_once(tmp_path):
    """It leaves 30 bytes: they are in memory, or expected to be, and not in the line as well."""

    def measured():
        machine = Machine(budget=100_000)

        def grow(batch):
            machine.resting = max(machine.resting, 1030)

        made, _ = probe(machine, 1000, 10, on_step=grow, sizes=(64,))
        known = Measurements(tmp_path)
        made = replace(made, same="conv", kernels="network")
        profile = measure_probes([made], machine, machine, lambda *_: None, known)
        return profile.base_bytes, profile.lines["p"].bytes_at(64)

    first = measured()
    assert first[0] == 1030
    assert measured() == first


@pytest.mark.parametrize(("kernels", "base"), [("network", 50), ("", 70)])
def test_kernels_of_a_cached_step_count_once_beside_those_that_a_refused_one_leaves_here(tmp_path, kernels, base):
    """A step leaves 50 bytes; one that holds gradients and is refused leaves 20 of them in a process without."""

    def measured(*names):
        machine = Machine(budget=3000)

        def step(name):
            def run(count):
                machine.kept = max(machine.kept, {"a": 50, "b": 20}[name])
                return machine.take(10_000 if name == "b" else 100)

            return Probe(name, lambda: run, lambda batch: 1, 64, same=name, kernels=kernels, sizes=(64,))

        probes = [step(name) for name in names]
        return measure_probes(probes, machine, machine, lambda *_: None, Measurements(tmp_path)).base_bytes - 1000

    assert measured("a") == 50
    assert measured("a", "b") == base


def test_what_another_strategy_left_elsewhere_does_not_count_to_this_one(tmp_path):
    """A strategy whose probes left 50 bytes trains without the 30 that another's left in another process."""
    known = Measurements(tmp_path)

    def profile(known):
        machine = Machine(budget=3000)

        def leaving(name, size):
            def build():
                machine.kept += size
                return machine.take

            return Probe(name, build, lambda batch: 1, 64, same=name)

        probes = [leaving("a", 50), leaving("b", 30)]
        return probes, measure_probes(probes, machine, machine, lambda *_: None, known)

    probes, here = profile(known)
    assert without_others(here, probes[:1]).base_bytes == here.base_bytes == 1080
    _, again = profile(Measurements(tmp_path))
    assert again.base_bytes == 1080
    assert [without_others(again, [probe]).base_bytes for probe in probes] == [1050, 1030]


def test_a_fresh_process_has_what_training_leaves_and_nothing_that_measuring_left(tmp_path):
    """At 2 and 8 images kernels take 10 each; 30 are left by the other strategy, and 20 by preparing both."""
    machine = Machine(budget=3000)
    machine.kept += 20

    def leaving(name, size):
        def build():
            machine.kept += size
            taken = set()

            def step(batch):
                machine.kept += 10 * (batch not in taken)
                taken.add(batch)
                return machine.take(batch)

            return step

        return Probe(name, build, lambda batch: 1, 8, same=name)

    probes = [leaving("a", 5), leaving("b", 30)]
    here = measure_probes(probes, machine, machine, lambda *_: None)
    fresh = in_fresh_process(here, probes[:1], 700)
    first, second = (here.left[name] - here.lines[name].sizes_bytes for name in ("a", "b"))
    assert here.lines["a"].sizes_bytes == 10 and (first, second) == (15, 40) and here.base_bytes > 1000 + 15 + 40
    assert fresh.base_bytes == 700 + STARTED_GROWTH + first
    later = in_fresh_process(here, probes[1:], 700).base_bytes
    assert later == 700 + STARTED_GROWTH + second + first + here.lines["a"].shape_bytes, "a may have left kernels of b"
    assert fresh.lines["a"].elsewhere and fresh.lines["b"] == here.lines["b"] and not here.lines["a"].elsewhere
    assert fresh.lines["a"].bytes_at(8) == here.lines["a"].bytes_at(8) + 10, "kernels of the batch size are new there"
    then = in_next_process(here, probes[:1])
    assert then.base_bytes == here.base_bytes - here.left["a"] - here.left["b"] + first
    assert then.lines == fresh.lines and not then.expected


def test_what_another_process_measured_leaves_as_much_in_a_fresh_one(tmp_path):
    probes = [Probe("a", lambda: Machine(budget=3000).take, lambda batch: 1, 8, same="a")]
    profile = Profile((), base_bytes=900, left={"a": 40}, expected={"a": 40})
    assert in_fresh_process(profile, probes, 500).base_bytes == 500 + STARTED_GROWTH + 40
    assert in_next_process(profile, probes).base_bytes == 900
