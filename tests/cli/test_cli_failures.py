"""From what goes wrong, in either process, to exit codes and messages."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from snugfit import errors
from snugfit._cli import child_process, train
from snugfit._cli.child_process import death_error
from snugfit._cli.output import FailedError, explain
from snugfit._core.machine_memory import private_bytes

NAMED = [
    (errors.SnugfitError, 1),
    (errors.UsageError, 2),
    (errors.DataError, 4),
    (errors.ModelError, 4),
    (errors.CheckpointError, 4),
    (errors.BudgetExceededError, 5),
    (errors.OutOfStorageError, 6),
    (errors.DivergedError, 7),
    (errors.WorkerLostError, 8),
    (errors.InterruptedRunError, 130),
]


@pytest.mark.parametrize(("kind", "code"), NAMED)
def test_our_errors_keep_their_message_and_code(kind, code):
    failed = explain(kind("what, why, what to do"))
    assert (failed.exit_code, failed.kind, str(failed)) == (code, kind.__name__, "what, why, what to do")
    assert FailedError.from_json(failed.to_json()).to_json() == failed.to_json()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 5),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), 5),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), 5),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 5),
        (SystemError("error return without exception set"), 5),
        (SystemError("<function f> returned NULL without setting an exception"), 5),
        (SystemError("bad argument to internal function"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 6),
        (OSError(errno.EFBIG, "File too large"), 6),
        (KeyboardInterrupt(), 130),
        (RuntimeError("shapes differ"), 1),
        (OSError(errno.EIO, "bad disk"), 1),
    ],
)
def test_other_exceptions(error, code):
    assert explain(error).exit_code == code


def test_a_name_that_is_too_long_is_told():
    with pytest.raises(OSError, match="too long") as raised:
        Path("x" * 256, "y").stat()
    failed = explain(raised.value)
    assert failed.exit_code == 2 and "'xxxx" in str(failed) and "longer than the file system allows" in str(failed)
    assert len(str(failed)) < 200


@pytest.mark.parametrize(
    ("model", "code", "says"),
    [
        ("diverged", 7, "the loss became NaN; lower --lr."),
        ("memory", 5, "memory ran out"),
        ("allocator", 5, "memory ran out"),
        ("disk", 6, "cache.bin"),
        ("internal", 1, "ValueError: first line"),
        ("too-big", 3, "nothing fits"),
    ],
)
def test_the_childs_errors_become_exit_codes(model, code, says, snugfit):
    if model == "too-big":
        outcome = snugfit("plan", "--model", model, "--json")
    else:
        outcome = snugfit("train", "--model", model, "--json")
    assert outcome.code == code
    assert outcome.json["error"]["code"] == code
    shown = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(shown) == 1 and says in shown[0]
    assert "Traceback" not in outcome.err


def test_debug_shows_the_childs_traceback_once(snugfit):
    outcome = snugfit("train", "--model", "internal", "--debug")
    assert outcome.code == 1
    assert outcome.err.count("Traceback") == 1 and "fake_api.py" in outcome.err
    assert "--debug shows the traceback" in snugfit("train", "--model", "internal").err


@pytest.mark.parametrize(
    ("model", "code", "name"),
    [("sigkill", 8, "SIGKILL"), ("sigabrt", 5, "SIGABRT"), ("sigsegv", 1, "SIGSEGV"),
     ("sigbus", 4, "a mapped file was truncated"), ("exit", 1, "code 9"),
     ("sysexit", 1, "code 4")],
)  # fmt: skip
def test_a_child_that_dies_is_explained_in_two_lines(model, code, name, snugfit):
    outcome = snugfit("train", "--model", model, "--memory", "1GB", "--out", "here", "--quiet", "--json")
    assert outcome.code == outcome.json["error"]["code"] == code
    assert name in outcome.err and "snugfit train --resume here" in outcome.err
    assert len([line for line in outcome.err.splitlines() if line]) == 2


@pytest.mark.parametrize("flags", [["--resume", "interrupted"], ["--model", "interrupted", "--out", "interrupted"]])
def test_an_interruption_names_the_run_folder(snugfit, flags):
    """Before the run has read its checkpoint, and after a second signal, which training does not catch."""
    outcome = snugfit("train", *flags, "--quiet", "--json")
    assert outcome.code == outcome.json["error"]["code"] == 130
    assert outcome.err == "error: interrupted.\n`snugfit train --resume interrupted` continues the run.\n"


def test_a_full_disk_names_the_run_that_goes_on_once_it_has_begun(snugfit, monkeypatch):
    """What a run is resumed from is complete with its manifest; the fake worker writes none."""
    full, hint = ("train", "--model", "disk", "--out", "run"), "\n`snugfit train --resume run` continues the run.\n"
    assert not snugfit(*full).err.endswith(hint) and not child_process._is_resumable("run")
    with monkeypatch.context() as begun:
        begun.setattr(child_process, "_is_resumable", lambda run_dir: run_dir == "run")
        outcome = snugfit(*full)
    assert "cache.bin" in outcome.err and outcome.code == 6 and outcome.err.endswith(hint)
    Path("run").mkdir()
    Path("run/manifest.json").touch()
    assert child_process._is_resumable("run") and not child_process._is_resumable(None)


def test_a_command_that_an_error_gives_can_be_copied(snugfit):
    outcome = snugfit("train", "--model", "sigkill", "--out", "my run", "--quiet")
    assert outcome.err.endswith("`snugfit train --resume 'my run'` continues the run.\n")
    (Path("my run") / "plan.json").parent.mkdir()
    (Path("my run") / "plan.json").touch()
    assert "continue it with --resume 'my run'." in snugfit("train", "--out", "my run").err


def test_an_interruption_between_planning_and_training_names_the_run_folder(snugfit, monkeypatch):
    run_job = train.run_job

    def interrupted(job, **options):
        if job["resume"]:
            raise KeyboardInterrupt
        return run_job(job, **options)

    monkeypatch.setattr(train, "run_job", interrupted)
    outcome = snugfit("train", "--model", "fresh", "--memory", "100MB")
    assert outcome.code == 130 and outcome.err.endswith("`snugfit train --resume runs/begun` continues the run.\n")


@pytest.mark.parametrize("flag", ["--profile-cache", "--cache-dir", "--weights"])
def test_a_home_that_no_user_has_is_told(snugfit, flag):
    outcome = snugfit("plan", "--model", "vgg16", flag, "~nobody-of-this-name/x")
    assert outcome.code == 4 and "begins with ~ and a name that no user has" in outcome.err


def test_a_child_that_is_killed_while_it_answers_is_explained(monkeypatch):
    @contextlib.contextmanager
    def child(job, server):
        messages = iter(['{"run_dir": "runs/a"}\n', '{"result": {"plan'])
        yield SimpleNamespace(wait=lambda: -signal.SIGKILL), messages, []

    monkeypatch.setattr(child_process, "_child", child)
    with pytest.raises(errors.WorkerLostError, match=r"killed by SIGKILL[\s\S]*--resume runs/a"):
        child_process.run_job({"command": "train", "request": None, "resume": None})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"plan": {}, "retries": []}, r"^interrupted by SIGINT\.$"),
        ({"begun": "runs/a"}, r"^interrupted by SIGINT\.\n.*--resume runs/a"),
        ({"run_dir": "runs/a", "accuracy": {}}, None),
    ],
)
def test_a_signal_in_the_moment_in_which_planning_ends_is_not_lost(monkeypatch, answer, said):
    """The process has sent its answer, and ignores signals."""

    def start(writing, job):
        os.write(writing, json.dumps({"result": answer}).encode() + b"\n")
        wait = lambda: signal.raise_signal(signal.SIGINT) or 0  # noqa: E731
        return SimpleNamespace(pid=1, send_signal=lambda number: None, wait=wait, poll=lambda: 0)

    monkeypatch.setattr(child_process, "start_worker", start)
    with pytest.raises(errors.InterruptedRunError, match=said) if said else contextlib.nullcontext():
        assert child_process.run_job({"command": "train", "request": None, "resume": None}) == answer


def test_an_abort_is_memory_only_under_a_limit():
    free = {"command": "train", "request": {"budget": {"memory": None}}, "resume": None}
    assert death_error(-signal.SIGABRT, free, None).exit_code == 1
    assert death_error(-signal.SIGABRT, {**free, "request": None, "resume": "run"}, "run").exit_code == 5
    assert death_error(-signal.SIGTERM, free, None).exit_code == 130


@pytest.mark.parametrize(
    ("of_memory", "code", "says"),
    [
        (True, 5, "killed by SIGKILL, because the machine ran out of memory"),
        (False, 8, "killed by SIGKILL, by a user: the kernel was not out of memory"),
        (None, 8, "killed by SIGKILL, by a user or because memory ran out"),
    ],
)
def test_a_killed_child_ran_out_of_memory_where_the_kernel_says_so(of_memory, code, says):
    job = {"command": "train", "request": {"budget": {"memory": "1GB"}}, "resume": None}
    error = death_error(-signal.SIGKILL, job, "runs/a", of_memory)
    assert error.exit_code == code and says in str(error) and "--resume runs/a" in str(error)


def test_the_counts_of_kills_before_and_after_are_compared(snugfit, monkeypatch):
    counts = iter([3, 4])
    monkeypatch.setattr("snugfit._cli.child_process.memory_kills", lambda: next(counts))
    assert snugfit("train", "--model", "sigkill", "--out", "here", "--quiet").code == 5


def wait_for(path: Path) -> None:
    for _ in range(1500):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} did not appear")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_a_child_that_does_not_handle_them(number, start, tmp_path):
    process = start("train", "--model", "sleep", "--out", str(tmp_path), "--quiet")
    wait_for(tmp_path / "started")
    process.send_signal(number)
    _, shown = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in shown and "Traceback" not in shown


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_command_line_waits_in_little_memory(start, tmp_path):
    """20 MB here: it imports neither torch nor what draws tables and reports."""
    process = start("train", "--model", "sleep", "--out", str(tmp_path), "--quiet")
    wait_for(tmp_path / "started")
    waiting = private_bytes(process.pid)
    process.terminate()
    process.communicate(timeout=20)
    assert 0 < waiting < 25_000_000, waiting


@pytest.fixture
def heard_hang_ups():
    """A hang-up that the tests were started to ignore, by nohup, would be ignored by what they start too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard_hang_ups")
@pytest.mark.parametrize(("number", "received"), [(signal.SIGINT, 2), (signal.SIGTERM, 15), (signal.SIGHUP, 15)])
def test_a_signal_to_the_whole_group_arrives_once(number, received, start, tmp_path):
    process = start("train", "--model", "stop", "--out", str(tmp_path), "--quiet", start_new_session=True)
    wait_for(tmp_path / "started")
    os.killpg(process.pid, number)
    _, shown = process.communicate(timeout=20)
    assert process.returncode == 130
    assert len(shown.splitlines()) == 1
    assert shown.count(str(received)) == 1


def test_the_child_dies_with_a_killed_parent(start, tmp_path):
    process = start("train", "--model", "sleep", "--out", str(tmp_path), "--quiet")
    wait_for(tmp_path / "started")
    process.kill()
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        pytest.fail("the child still holds the parent's stderr open")
