"""Forked processes: results, failures, and that nothing of them is left."""

import ctypes
import os
import signal
import time

import psutil
import pytest
import torch

from snugfit._core import forking
from snugfit._core.forking import run_forked
from snugfit.memory import read_status

pytestmark = pytest.mark.skipif(not forking.may_fork(), reason="this system does not fork, or memory is short")


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before


def ignore(message):
    pass


def test_messages_come_in_order_and_the_result_last():
    told = []

    def work(send):
        for number in range(3):
            send([number, "a line\nof two"])
        return {"process": os.getpid()}

    result = run_forked(work, told.append)
    assert told == [[number, "a line\nof two"] for number in range(3)]
    assert result["process"] != os.getpid()


def test_its_memory_is_not_this_processs():
    before = read_status().anon

    def work(send):
        kept = torch.ones(50_000_000)
        return read_status().anon - before + int(kept[0])

    assert run_forked(work, ignore) >= 190_000_000
    assert read_status().anon - before < 20_000_000


def fail(send):
    raise ValueError("a strategy has a fault")


def leave(send):
    os._exit(0)


def leave_like_libgomp(send):
    ctypes.CDLL(None).exit(1)


def be_killed(send):
    send("half")
    os.kill(os.getpid(), signal.SIGKILL)


def answer_with_what_is_no_json(send):
    return object()


@pytest.mark.parametrize("work", [fail, leave, leave_like_libgomp, be_killed, answer_with_what_is_no_json])
def test_a_failure_is_an_error(work):
    with pytest.raises(ChildProcessError):
        run_forked(work, ignore)


def test_a_failure_says_what_failed():
    with pytest.raises(ChildProcessError, match="ValueError: a strategy has a fault"):
        run_forked(fail, ignore)


def test_ctrl_c_in_the_terminal_reaches_this_process_alone():
    def work(send):
        os.kill(os.getpid(), signal.SIGINT)
        return "done"

    assert run_forked(work, ignore) == "done"


def test_a_result_counts_though_another_reaps_the_process():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_forked(lambda send: 7, ignore) == 7
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_the_process_started_is_not_waited_for():
    def work(send):
        if os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        return "done"

    started = time.monotonic()
    assert run_forked(work, ignore) == "done" and time.monotonic() - started < 3


def test_an_interruption_ends_the_process_too():
    def interrupt(message):
        raise KeyboardInterrupt

    def work(send):
        send("started")
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_forked(work, interrupt)
    assert time.monotonic() - started < 10


def test_threads_of_torch_work_in_both_processes():
    """OpenMP's threads do not exist in a forked process, which would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    images = torch.ones(64, 8, 32, 32)

    def work(send):
        signal.alarm(30)
        return float((images.exp().sum(1) @ images[0, 0]).sum()), torch.get_num_threads()

    try:
        here, count = work(ignore), torch.get_num_threads()
        signal.alarm(0)
        assert run_forked(work, ignore) == list(here) and count == 2
        again = work(ignore)
        signal.alarm(0)
        assert again == here
    finally:
        torch.set_num_threads(before)


def test_nothing_is_forked_where_threads_cannot_be_ended(monkeypatch):
    monkeypatch.setattr(forking, "_end_threads", lambda: False)
    with pytest.raises(ChildProcessError, match="threads"):
        run_forked(lambda send: 1, ignore)


@pytest.mark.parametrize(("free", "may"), [(10**9, True), (10**9 - 1, False)])
def test_nothing_is_forked_where_memory_is_short(monkeypatch, free, may):
    monkeypatch.setattr(forking, "machine_memory", lambda own: type("Memory", (), {"free_bytes": free}))
    assert forking.may_fork() is may
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not forking.may_fork()
