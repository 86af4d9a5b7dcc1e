"""Seconds of steps in probes, and what of them mapping memory takes."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from probe_samples import Machine, probe

from snugfit.memory.process import PageMapping
from snugfit.profiling import measure_probe, measure_probes
from snugfit.profiling.probe import MAPPING_FACTOR, MAPPING_FACTOR_OF_THREADS


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch):
    """Collecting garbage takes a tenth of a second, and nothing here makes any."""
    for module in ("probe", "measuring"):
        monkeypatch.setattr(f"snugfit.profiling.{module}.release_memory", lambda: None)


@pytest.mark.parametrize(("layers", "expected"), [(5, [2, 2, 8, 14]), (20, [2, 2, 8, 8, 14, 14])])
def test_a_step_of_many_layers_is_run_again_for_its_kernels(monkeypatch, layers, expected):
    """The first step at a batch size generates kernels, 2 ms for each layer: 0.1 s of 0.3 with 50 layers."""

    def timed(step, batch, device):
        step(batch)
        return 0.3, PageMapping(0.0, 0)

    monkeypatch.setattr("snugfit.profiling.probe._timed", timed)
    machine = Machine()
    made, ran = probe(machine, fixed=500, sample=10, limit=14)
    measure_probe(replace(made, layers=layers), machine, machine)
    assert ran == expected


def time_steps(monkeypatch, mapping_seconds):
    """Let steps map ten pages an image, in these seconds, and take a hundredth of a second an image."""
    coarse = iter(mapping_seconds)

    def timed(step, batch, device):
        step(batch)
        return 0.01 * batch, PageMapping(next(coarse), 10 * batch)

    monkeypatch.setattr("snugfit.profiling.probe._timed", timed)


@pytest.mark.parametrize(("threads", "factor"), [(1, MAPPING_FACTOR), (2, MAPPING_FACTOR_OF_THREADS)])
def test_a_page_costs_as_much_in_every_probe_of_a_process(monkeypatch, threads, factor):
    """Ticks of some milliseconds say little about a single probe."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    time_steps(monkeypatch, [0.01] * 6 + [0.0] * 6)
    machine = Machine()
    made, ran = probe(machine, fixed=500, sample=10, limit=14)
    second = replace(made, name="other", same="other")
    profile = measure_probes([replace(made, same="own"), second], machine, machine, lambda *_: None)
    page = factor * 0.06 / (10 * sum(ran))
    assert [point.mapping_seconds for point in profile.lines["other"].points] == pytest.approx(
        [10 * batch * page for batch in (2, 8, 14)]
    )


@pytest.mark.parametrize("factor", [1, 20, 0.1])
def test_each_step_has_the_time_for_its_pages(monkeypatch, factor):
    """The system's time is coarse: all of it is divided by all pages, those of repeated steps included.

    A step has its own if it is long, and none if all of it is too short.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    times = [each * factor for each in (0.0, 0.0, 0.03, 0.0, 0.03, 0.04)]
    time_steps(monkeypatch, times)
    machine = Machine()
    made, ran = probe(machine, fixed=500, sample=10, limit=14)
    line = measure_probe(made, machine, machine)
    assert ran == [2, 2, 8, 8, 14, 14]
    page = MAPPING_FACTOR * sum(times) / (10 * sum(ran)) if factor >= 1 else 0.0
    largest = min(MAPPING_FACTOR * times[-1], 0.9 * 0.14) if factor > 1 else 140 * page
    assert [point.mapping_seconds for point in line.points] == pytest.approx(
        [min(20 * page, 0.9 * 0.02), min(80 * page, 0.9 * 0.08), largest]
    )


def test_new_memory_is_mapped_and_old_is_not():
    old = torch.ones(2**24)

    def pages(step):
        before = PageMapping.so_far()
        step()
        return PageMapping.so_far().since(before)

    new, again = pages(lambda: torch.ones(2**24)), pages(lambda: old.fill_(2.0))
    assert new.pages >= again.pages + 2**26 // 2**21, "64 MiB, at least in pages of 2 MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by themselves on Linux alone")
def test_memory_that_another_thread_maps_costs_the_thread_that_computes_nothing():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(PageMapping.so_far).result()  # starting the thread maps memory
        before = PageMapping.so_far()
        other = pool.submit(lambda: (PageMapping.so_far(), torch.ones(2**24), PageMapping.so_far())).result()
    assert other[2].since(other[0]).pages >= 2**26 // 2**21 > 2 * PageMapping.so_far().since(before).pages
