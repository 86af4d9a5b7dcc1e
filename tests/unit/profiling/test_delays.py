"""What other processes add to a measurement is left out of its seconds, and counted."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from probe_samples import Machine, probe

from snugfit import _stopwatch
from snugfit._core.profile import Profile
from snugfit._planner.proposals import merged
from snugfit.profiling import Measurements, measure_probes
from snugfit.profiling import probe as probes
from snugfit.profiling.operator import timed


@pytest.fixture
def half_busy(monkeypatch):
    """A machine on which every computation takes 4 s, for 2 of which another process has the core."""
    clock, waiting = count(0.0, 4.0), count(0.0, 2.0)
    monkeypatch.setattr(_stopwatch.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(_stopwatch, "_reading", lambda: _stopwatch._Reading({"1": next(waiting)}, {"1": 0.0}, 0.0))


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 2.0), ("cuda", 4.0)])
def test_a_step_on_a_processor_counts_without_them_and_one_on_a_gpu_as_it_is(half_busy, monkeypatch, device, seconds):
    monkeypatch.setattr(probes, "synchronize", lambda device: None)
    assert probes._timed(lambda batch: None, 4, torch.device(device))[0] == seconds


def test_an_operator_on_several_threads_counts_without_them(half_busy, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert timed(lambda: "result", torch.device("cpu")) == ("result", 2.0)


def test_a_profile_counts_them_where_it_measures_and_not_where_it_finds_measurements(half_busy, tmp_path):
    machine, known = Machine(), Measurements(tmp_path)
    made, _ = probe(machine, 500, 10)
    found = [
        measure_probes([replace(made, same="conv")], machine, machine, lambda *_: None, known).delay_seconds
        for _ in range(2)
    ]
    assert found[0] > 0 and found[1] == 0.0


def test_merged_profiles_have_the_delays_of_both():
    both = merged(Profile((), seconds=4.0, delay_seconds=1.0), Profile((), seconds=6.0, delay_seconds=2.0))
    assert (both.seconds, both.delay_seconds, both.delay_share) == (10.0, 3.0, 0.3)
