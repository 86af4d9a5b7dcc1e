"""Seconds on a quiet machine: arithmetic on readings, and a process that shares its only core."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from snugfit import _stopwatch
from snugfit._stopwatch import Stopwatch, _Reading

RIVAL = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@pytest.mark.parametrize(
    ("waited", "quiet"),
    [
        ({}, 8.0),
        ({"1": 0.0, "2": 0.0}, 8.0),
        ({"1": 2.0, "2": 0.0}, 6.0),
        ({"1": 2.0, "2": 4.0}, 3.0),  # both have a core for 3/4 * 1/2 of the time
    ],
)
def test_work_goes_on_while_every_thread_has_a_core(waited, quiet):
    assert Stopwatch(8.0, waited).quiet == pytest.approx(quiet)


def reading(waited, worked=0.0, others=0.0):
    """That of threads which have all worked as long."""
    return _Reading(waited, dict.fromkeys(waited, worked), others)


def test_threads_that_began_count_and_those_that_ended_do_not():
    before, after = reading({"1": 1.0, "2": 7.0}), reading({"1": 1.5, "3": 0.25})
    assert after.waited_since(before, 10.0) == {"1": 0.5, "3": 0.25}
    assert Stopwatch().quiet == 0.0


@pytest.mark.parametrize(("worked", "waited"), [(0.0, [3.0, 1.0]), (1.0, [2.25, 0.75]), (9.0, [0.0, 0.0])])
def test_what_other_threads_of_python_may_have_caused_does_not_count(worked, waited):
    before, after = reading({"1": 1.0, "2": 1.0}, 0.0, 5.0), reading({"1": 4.0, "2": 2.0}, 0.0, 5.0 + worked)
    assert list(after.waited_since(before, 10.0).values()) == waited


@pytest.mark.parametrize(("worked", "waited"), [(0.0, 4.0), (3.0, 1.0), (4.5, 0.0)])
def test_a_wait_that_began_earlier_counts_for_no_longer_than_the_thread_did_not_work(worked, waited):
    assert reading({"1": 9.0}, worked).waited_since(reading({"1": 1.0}), 4.0) == {"1": waited}


@pytest.mark.skipif(sys.platform != "linux", reason="the clock of another thread is Linux's")
def test_the_processor_seconds_of_a_thread():
    worked = []
    for clock in (time.thread_time, lambda: _stopwatch._worked(threading.get_native_id()), time.thread_time):
        worked.append(clock())
    assert worked == sorted(worked) and worked[0] > 0
    with pytest.raises(ProcessLookupError):
        _stopwatch._worked(2**22 + 1)


@pytest.mark.parametrize("missing", [0, 1])
def test_without_both_readings_nothing_is_left_out(monkeypatch, missing):
    readings = [reading({"1": 1.0}), reading({"1": 5.0})]
    readings[missing] = None
    numbers = iter(readings)
    monkeypatch.setattr(_stopwatch, "_reading", lambda: next(numbers))
    with Stopwatch() as stopwatch:
        time.sleep(0.001)
    assert not stopwatch.waited and stopwatch.quiet == stopwatch.passed


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waiting")
def test_threads_of_python_do_other_work(monkeypatch):
    ready, done = threading.Event(), threading.Event()
    ids = []
    thread = threading.Thread(target=lambda: (ids.append(threading.get_native_id()), ready.set(), done.wait()))
    thread.start()
    ready.wait()
    monkeypatch.setattr(_stopwatch, "_tells_of_others", lambda threads: True)
    found = _stopwatch._reading()
    done.set()
    thread.join()
    assert str(threading.get_native_id()) in found.waited and str(ids[0]) not in found.waited
    assert found.others_worked > 0


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_a_kernel_that_does_not_say_and_a_full_budget_are_no_error(monkeypatch, error):
    monkeypatch.setattr(_stopwatch, "_tells_of_others", lambda threads: True)

    def refused(path, **_):
        raise error

    monkeypatch.setattr(Path, "read_text", refused)
    assert _stopwatch._reading() is None


@pytest.fixture
def counting_kernel(monkeypatch, tmp_path):
    """A kernel that counts waiting, two cores, no quota, and a single process."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "schedstat").touch()
    monkeypatch.setattr(_stopwatch, "PROC", tmp_path)
    monkeypatch.setattr(_stopwatch, "usable_cores", lambda: (0, 1))
    monkeypatch.setattr(_stopwatch, "has_core_quota", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    _stopwatch._tells_of_others.cache_clear()
    yield tmp_path
    _stopwatch._tells_of_others.cache_clear()


def test_a_kernel_that_counts_waiting_tells_of_other_processes(counting_kernel):
    assert _stopwatch._tells_of_others(2)


@pytest.mark.parametrize("reason", ["few cores", "a quota", "several processes", "no count"])
def test_threads_that_wait_for_something_else_say_nothing(counting_kernel, monkeypatch, reason):
    if reason == "few cores":
        monkeypatch.setattr(_stopwatch, "usable_cores", lambda: (0,))
    elif reason == "a quota":
        monkeypatch.setattr(_stopwatch, "has_core_quota", lambda: True)
    elif reason == "several processes":
        monkeypatch.setenv("WORLD_SIZE", "2")
    else:
        (counting_kernel / "self" / "schedstat").unlink()
    assert not _stopwatch._tells_of_others(2)


def test_laps_follow_each_other_without_a_gap(monkeypatch):
    readings = iter([reading({"1": second}) for second in (0.0, 1.0, 3.0)])
    clock = iter([10.0, 14.0, 22.0])
    monkeypatch.setattr(_stopwatch, "_reading", lambda: next(readings))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stopwatch = Stopwatch()
    stopwatch.start()
    found = []
    for _ in range(2):
        stopwatch.lap()
        found.append((stopwatch.passed, stopwatch.quiet, stopwatch.delay))
    assert found == [(4.0, 3.0, 1.0), (8.0, 6.0, 2.0)]


MEASURED = """
import os, sys, time
from snugfit import _stopwatch
_stopwatch._tells_of_others = lambda threads: True
os.sched_setaffinity(0, {int(sys.argv[1])})
with _stopwatch.Stopwatch() as stopwatch:
    worked = time.process_time()
    while time.process_time() - worked < 0.3:
        sum(range(1000))
    time.sleep(0.1)
print(stopwatch.quiet, stopwatch.passed)
"""
"""A process of its own, which has no threads of other tests: they may wait for the core, too."""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waiting")
def test_a_busy_core_is_left_out_and_sleep_is_not():
    core = str(min(os.sched_getaffinity(0)))
    rival = subprocess.Popen([sys.executable, "-c", RIVAL, core], stdout=subprocess.PIPE)
    try:
        rival.stdout.readline()
        found = subprocess.run([sys.executable, "-c", MEASURED, core], capture_output=True, check=True)
    finally:
        rival.kill()
        rival.communicate()
    quiet, passed = map(float, found.stdout.split())
    assert quiet == pytest.approx(0.4, rel=0.15)
    assert passed > 1.2 * quiet, "half of the core is the rival's"
