"""Processes that are forked for plans: as those that are started, in signals, errors and memory."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from snugfit._cli import app, child_process, worker_processes
from snugfit._cli.child_process import run_job
from snugfit._core import forking
from snugfit._core.option_groups import BudgetOptions
from snugfit.errors import SnugfitError

JOB = {"command": "plan", "threads": 1, "quiet": True, "debug": False}

REFUSING = """
import os
calls, fork = [], os.fork
def refuse():
    calls.append(None)
    if len(calls) >= {refused}:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = refuse
"""


@pytest.fixture
def started(monkeypatch):
    """The jobs with which workers were started."""
    jobs, start = [], child_process.start_worker

    def count(descriptor: int, job: dict[str, Any]) -> Any:
        jobs.append(job["command"])
        return start(descriptor, job)

    monkeypatch.setattr(child_process, "start_worker", count)
    monkeypatch.setattr(worker_processes, "start_worker", count)
    return jobs


@pytest.mark.parametrize(
    ("least", "model", "jobs"),
    [
        (0, "fits-alone", ["serve"]),
        (10**18, "fits-alone", ["train", "plan", "train"]),
        (0, "fresh", ["serve"]),
        (10**18, "fresh", ["train", "train"]),
    ],
)
def test_one_process_imports_for_all_where_memory_is_free(snugfit, started, monkeypatch, least, model, jobs):
    monkeypatch.setattr(forking, "LEAST_FREE_BYTES", least)
    assert snugfit("train", "--model", model, "--memory", "100MB", "--json").code == 0
    assert started == jobs


def test_nothing_is_forked_where_all_processes_count():
    with worker_processes.fork_server(BudgetOptions(total_memory="auto")) as server:
        assert server is None


def test_nothing_is_forked_in_a_launch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with worker_processes.fork_server(BudgetOptions()) as server:
        assert server is None


def test_training_is_alone(snugfit, started):
    """The server has ended by then: it would hold copies of the pages that training changes."""
    before = psutil.Process().children(recursive=True)
    assert snugfit("train", "--model", "others").code == 0
    assert started == ["serve"] and Path("others").read_text() == str(len(before))


def test_no_process_is_left(snugfit):
    before = psutil.Process().children(recursive=True)
    for command, model in (("plan", "fits-alone"), ("plan", "too-big"), ("train", "sigkill"), ("train", "internal")):
        snugfit(command, "--model", model, "--memory", "100MB")
    assert psutil.Process().children(recursive=True) == before


def test_a_server_that_dies_is_told_by_its_signal(fakes):
    with worker_processes.fork_server(BudgetOptions()) as server:
        assert server is not None
        os.kill(server.process.pid, signal.SIGSEGV)
        server.process.wait()
        with pytest.raises(SnugfitError, match="the plan process was killed by SIGSEGV"):
            run_job(JOB, server=server)


def test_an_import_that_fails_is_told_by_the_job(fakes, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "fake_api.py").write_text("raise ImportError('no torch here')")
    with worker_processes.fork_server(BudgetOptions()) as server, pytest.raises(SnugfitError, match="no torch here"):
        run_job(JOB, server=server)


@pytest.mark.parametrize("refused", [1, 2])
def test_a_process_is_started_where_the_system_refuses_to_fork(snugfit, started, tmp_path, monkeypatch, refused):
    """The server's own fork is refused, or the second one, of the process between it and the job's."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    fake = (Path(__file__).parent / "fakes" / "fake_api.py").read_text()
    (tmp_path / "fake_api.py").write_text(f"{fake}\n{REFUSING.format(refused=refused)}")
    before = psutil.Process().children(recursive=True)
    assert snugfit("train", "--model", "fresh", "--memory", "100MB", "--json").code == 0
    assert started == ["serve", "train", "train"]
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.skipif(worker_processes.sys.platform != "linux", reason="nothing is forked")
def test_a_forked_process_rests_at_the_same_memory(capfd, monkeypatch):
    flags = ["--model", "smallconv", "--data", "digits", "--image-size", "16", "--max-train", "32", "--threads", "1"]

    def rest(least: int) -> int:
        monkeypatch.setattr(forking, "LEAST_FREE_BYTES", least)
        capfd.readouterr()
        assert app.run(["plan", *flags, "--strategy", "backprop", "--json", "--quiet", "--profile-cache", "off"]) == 0
        found: int = json.loads(capfd.readouterr().out)["memory"]["process_bytes"]
        return found

    forked, alone = rest(0), rest(10**18)
    assert abs(forked - alone) < 1_000_000 < forked


def test_objects_of_an_import_are_never_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported.py").write_text("import gc\nwas_enabled = gc.isenabled()")
    (tmp_path / "failing.py").write_text("raise ImportError('no torch here')")
    before = gc.get_freeze_count()
    try:
        found = worker_processes.import_api("imported")
        assert not found.was_enabled and gc.isenabled() and gc.get_freeze_count() > before
        assert worker_processes.import_api("imported") is found
        with pytest.raises(ImportError, match="no torch here"):
            worker_processes.import_api("failing")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_signal_just_before_the_parent_waits_is_handled(monkeypatch):
    """It comes after Python has last looked for signals, in C: its handler must run although no message comes."""
    reading, writing = os.pipe()
    come, seen, polls = partial(ctypes.CDLL(None)["raise"], signal.SIGUSR1), list[int](), list[int]()
    real = select.poll

    class Interrupted:
        def __init__(self):
            self.all, self.pipe = real(), real()
            self.pipe.register(reading, select.POLLIN)

        def register(self, descriptor, events):
            self.all.register(descriptor, events)

        def poll(self):
            polls.append(1)
            if seen or self.pipe.poll(0):
                return self.all.poll()
            _, found = map(partial.__call__, (come, partial(self.all.poll, 5000)))
            assert found, "no signal woke it"
            return found

    def end():
        os.write(writing, b"the last")
        os.close(writing)

    def handle(number, frame):
        seen.append(number)
        threading.Timer(0.2, end).start()

    before = signal.signal(signal.SIGUSR1, handle)
    monkeypatch.setattr(select, "poll", Interrupted)
    try:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            descriptors = psutil.Process().num_fds()
            lines = child_process.read_lines(pipe)
            os.write(writing, b"one\ntwo\n")
            assert next(lines) == "one\n"
            assert list(lines) == ["two\n", "the last"]
        assert len(polls) <= 5, "it waits for the next signal, and not in a loop"
        assert psutil.Process().num_fds() == descriptors - 2, "of the message's pipe"
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)
