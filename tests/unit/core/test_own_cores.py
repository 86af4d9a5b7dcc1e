"""Compute threads on cores of their own, and that nothing else is bound to one."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from snugfit._core import own_cores
from snugfit._core.hardware import cores
from snugfit._core.own_cores import bind_compute_threads, free_leader, leave_own_core, on_own_core, usable_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores on Linux"
)


@pytest.fixture
def all_cores(monkeypatch):
    """The cores of the process, whose threads are not bound before or after."""
    monkeypatch.setattr(own_cores, "_leaders", [])
    for name in (*own_cores._SETTINGS, "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = frozenset(os.sched_getaffinity(0))
    yield before
    os.sched_setaffinity(0, before)


@pytest.fixture
def first(all_cores, monkeypatch):
    """The core of this thread, which leads threads that are bound to the others."""
    core = frozenset([min(all_cores)])
    monkeypatch.setattr(own_cores, "_leaders", [own_cores._Leader(threading.get_ident(), core, all_cores)])
    return core


def test_the_leader_has_one_core_while_it_computes(all_cores, first):
    with on_own_core():
        assert os.sched_getaffinity(0) == first
        assert usable_cores() == all_cores
        assert cores() == len(all_cores)
        with on_own_core():
            pass
        assert os.sched_getaffinity(0) == first
    assert os.sched_getaffinity(0) == all_cores


def test_the_leader_is_free_after_an_error(all_cores, first):
    with pytest.raises(ValueError, match="a step"), on_own_core():
        raise ValueError("a step failed")
    assert os.sched_getaffinity(0) == all_cores


def test_other_threads_that_start_in_a_step_can_leave_its_core(all_cores, first):
    with on_own_core(), ThreadPoolExecutor(1) as bound, ThreadPoolExecutor(1, initializer=leave_own_core) as free:
        assert bound.submit(os.sched_getaffinity, 0).result() == first
        assert free.submit(os.sched_getaffinity, 0).result() == all_cores


def test_threads_that_lead_none_are_not_bound(all_cores, first):
    def elsewhere():
        with on_own_core():
            return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == all_cores


def test_a_core_that_the_user_has_excluded_is_not_used(all_cores, first):
    others = all_cores - first
    os.sched_setaffinity(0, others)
    with on_own_core():
        assert os.sched_getaffinity(0) == others
    assert os.sched_getaffinity(0) == others


def test_a_core_that_the_process_lost_binds_nothing(all_cores, first, monkeypatch):
    with monkeypatch.context() as refusing:
        refusing.setattr(os, "sched_setaffinity", refuse)
        with on_own_core():
            assert os.sched_getaffinity(0) == all_cores


def refuse(thread, cores):
    raise OSError(22, "Invalid argument")


def test_as_many_threads_as_cores_are_bound(all_cores, monkeypatch):
    for threads, variable in ((None, None), (len(all_cores), None), (None, len(all_cores))):
        with monkeypatch.context() as patched:
            if variable:
                patched.setenv("OMP_NUM_THREADS", str(variable))
            patched.setenv("OMP_PROC_BIND", "")
            del os.environ["OMP_PROC_BIND"]
            bind_compute_threads(threads)
            assert os.environ["OMP_PROC_BIND"] == "true"


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "1"), ("WORLD_SIZE", "2"), ("OMP_PLACES", "cores"), ("OMP_PROC_BIND", "no")]
)
def test_fewer_threads_those_of_a_launch_and_those_that_the_user_binds_are_left_alone(
    all_cores, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    bind_compute_threads(None)
    assert os.environ.get("OMP_PROC_BIND") == (value if name == "OMP_PROC_BIND" else None)
    bind_compute_threads(1)
    assert os.environ.get("OMP_PROC_BIND") == (value if name == "OMP_PROC_BIND" else None)


def test_a_process_whose_threads_are_not_bound_has_no_leader(all_cores):
    free_leader()
    with on_own_core():
        assert os.sched_getaffinity(0) == all_cores


SCRIPT = """
import os
from snugfit._core.own_cores import bind_compute_threads, on_own_core

everywhere = os.sched_getaffinity(0)
bind_compute_threads(None)

import torch
from snugfit._core.forking import may_fork, run_forked
from snugfit._core.hardware import cores
from snugfit.memory import prepare_process

def places(send=None):
    with on_own_core():
        torch.ones(10_000_000).add_(1)
        found = [os.sched_getaffinity(int(each)) for each in os.listdir("/proc/self/task")]
    return sorted(list(each) for each in found if len(each) == 1)  # numpy and NNPACK have threads, too

assert cores() == len(everywhere), cores()
prepare_process(cores())
wanted = [[core] for core in sorted(everywhere)]
assert places() == wanted, places()
torch.set_num_threads(1)
torch.set_num_threads(len(everywhere))
assert places() == wanted, places()
if may_fork():
    assert run_forked(places, print) == wanted
    assert places() == wanted, places()
assert os.sched_getaffinity(0) == everywhere
"""


def test_torchs_threads_are_bound_in_this_process_and_in_forked_ones():
    unset = ("OMP_NUM_THREADS", *own_cores._SETTINGS)
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    found = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
