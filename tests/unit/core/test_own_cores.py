"""Compute threads on cores of their own, and that nothing else is bound to one."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from snugfit._core import own_cores
from snugfit._core.hardware import cores
from snugfit._core.own_cores import give_own_cores, leave_own_core, on_own_core, restart_own_cores, usable_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores on Linux"
)


@pytest.fixture(autouse=True)
def all_cores(monkeypatch):
    """The process has no team before or after, and all of its cores."""
    monkeypatch.setattr(own_cores, "_teams", [])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


@pytest.fixture
def started():
    """Starts Python threads in place of OpenMP's, one fewer than there are cores; they end with the test."""
    count = len(os.sched_getaffinity(0)) - 1
    pools = []

    def start():
        pools.append(ThreadPoolExecutor(count))
        barrier = threading.Barrier(count + 1)
        for _ in range(count):
            pools[-1].submit(barrier.wait)
        barrier.wait()

    start.pools = pools
    yield start
    for pool in pools:
        pool.shutdown()


def places(pool, count):
    """Cores of each thread of a pool."""
    barrier = threading.Barrier(count)

    def place():
        barrier.wait()
        return tuple(os.sched_getaffinity(0))

    return [each.result() for each in [pool.submit(place) for _ in range(count)]]


def test_each_thread_has_one_core_and_the_calling_one_only_while_it_computes(all_cores, started):
    give_own_cores(len(all_cores), started)
    first, *rest = sorted(all_cores)
    assert sorted(places(started.pools[0], len(rest))) == [(core,) for core in rest]
    assert os.sched_getaffinity(0) == all_cores
    with on_own_core():
        assert os.sched_getaffinity(0) == {first}
        assert set(usable_cores()) == all_cores
        assert cores() == len(all_cores)
    assert os.sched_getaffinity(0) == all_cores


def test_the_calling_thread_is_released_after_an_error(all_cores, started):
    give_own_cores(len(all_cores), started)
    with pytest.raises(ValueError, match="a step"), on_own_core():
        raise ValueError("a step failed")
    assert os.sched_getaffinity(0) == all_cores


def test_other_threads_that_start_in_a_step_can_leave_its_core(all_cores, started):
    give_own_cores(len(all_cores), started)
    with on_own_core(), ThreadPoolExecutor(1) as bound, ThreadPoolExecutor(1, initializer=leave_own_core) as free:
        assert len(bound.submit(os.sched_getaffinity, 0).result()) == 1
        assert free.submit(os.sched_getaffinity, 0).result() == all_cores


def test_only_the_thread_that_leads_is_bound(all_cores, started):
    give_own_cores(len(all_cores), started)

    def elsewhere():
        with on_own_core():
            return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == all_cores


@pytest.mark.parametrize("fewer", [1, 0])
def test_threads_that_are_fewer_than_cores_or_in_a_launch_stay_free(all_cores, started, monkeypatch, fewer):
    if not fewer:
        monkeypatch.setenv("WORLD_SIZE", "2")
    give_own_cores(len(all_cores) - fewer, started)
    with on_own_core():
        assert os.sched_getaffinity(0) == all_cores


def test_threads_that_ran_before_stay_free(all_cores, started):
    started()
    give_own_cores(len(all_cores), lambda: None)
    with on_own_core():
        assert os.sched_getaffinity(0) == all_cores
    assert set(places(started.pools[0], len(all_cores) - 1)) == {tuple(all_cores)}


def test_a_core_that_the_process_lost_binds_nothing(all_cores, started, monkeypatch):
    give_own_cores(len(all_cores), started)
    with monkeypatch.context() as refusing:
        refusing.setattr(os, "sched_setaffinity", refuse)
        with on_own_core():
            assert os.sched_getaffinity(0) == all_cores
        restart_own_cores()
    assert own_cores._teams == []


def refuse(thread, cores):
    raise OSError(22, "Invalid argument")


def test_torchs_threads_are_bound_in_this_process_and_in_forked_ones():
    script = """
import os, torch
from snugfit._core.forking import may_fork, run_forked
from snugfit._core.own_cores import on_own_core
from snugfit.memory import prepare_process

def places(send=None):
    with on_own_core():
        torch.ones(10_000_000).add_(1)
        found = [os.sched_getaffinity(int(each)) for each in os.listdir("/proc/self/task")]
    return sorted(list(each) for each in found if len(each) == 1)  # numpy and NNPACK have threads, too

prepare_process(len(os.sched_getaffinity(0)))
wanted = [[core] for core in sorted(os.sched_getaffinity(0))]
assert places() == wanted, places()
if may_fork():
    assert run_forked(places, print) == wanted
    assert places() == wanted, places()
assert os.sched_getaffinity(0) == {core for core, in wanted}
"""
    variables = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OMP_PROC_BIND")}
    found = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
