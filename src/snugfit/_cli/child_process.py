"""The parent's side of a job: start the child, pass signals on, read its messages, and explain its death."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from snugfit._cli.output import FailedError, unreported
from snugfit._cli.worker_processes import ForkedChild, ForkServer, blocked_signals, start_worker
from snugfit._core.forking import FORWARDED
from snugfit._core.machine_memory import GROUPS, PROC, counts, memory_groups
from snugfit.errors import (
    BudgetExceededError,
    InterruptedRunError,
    OutOfStorageError,
    SnugfitError,
    UnusableInputError,
    WorkerLostError,
)

if TYPE_CHECKING:  # this module is part of the worker, which has no use for cyclopts
    from snugfit._cli.options import OutputOptions

    Child: TypeAlias = subprocess.Popen[bytes] | ForkedChild


def make_job(command: str, output: OutputOptions, threads: int | None, **arguments: Any) -> dict[str, Any]:
    """The job of a worker as JSON-able data."""
    return {"command": command, "threads": threads, "quiet": output.quiet, "debug": output.debug, **arguments}


def run_job(
    job: dict[str, Any],
    on_row: Callable[[list[Any]], None] | None = None,
    server: ForkServer | None = None,
) -> dict[str, Any]:
    """Run a job in a fresh child process and return its result.

    The child writes lines of JSON into a pipe: ``run_dir`` and ``row`` (for ``on_row``) while it works, then ``result``
    or ``error``. It is forked from the server, if there is one and the system allows it.

    Raises:
        FailedError: the child's own error.
        BudgetExceededError: the child was killed for lack of memory.
        WorkerLostError: it was killed for another reason.
        InterruptedRunError: a signal stopped the child before it could save anything, or came when it had planned.
        SnugfitError: the child died in another way.
    """
    found: dict[str, Any] = {"run_dir": job.get("resume")}
    kills = memory_kills()
    with _child(job, server) as (child, messages, passed_on):
        for line in messages:
            if not line.endswith("\n"):  # the child was killed while it wrote it
                break
            message = json.loads(line)
            if "row" in message:
                if on_row is not None:
                    on_row(message["row"])
            else:
                found.update(message)
        code = child.wait()
    if "error" not in found and "result" in found:
        result = dict(found["result"])
        if passed_on and ("retries" in result or "begun" in result):  # it answered first, and more is to come
            raise _interruption(f"interrupted by {signal.Signals(passed_on[0]).name}.", result.get("begun"))
        return result
    failed: SnugfitError
    if "error" in found:
        failed = FailedError.from_json(found["error"])
        if failed.exit_code == OutOfStorageError.exit_code and _is_resumable(found["run_dir"]):
            failed = FailedError(failed.kind, f"{failed}{resume_hint(found['run_dir'])}", failed.exit_code)
    else:
        now = memory_kills()
        of_memory = None if kills is None or now is None else now > kills
        failed = death_error(code, job, found["run_dir"], of_memory)
    if failed.exit_code == InterruptedRunError.exit_code:
        raise _interruption(str(failed), found["run_dir"])
    raise failed


def _interruption(message: str, run_dir: str | None) -> InterruptedRunError:
    """The interruption of a command, and how its run goes on, if it has one and the message does not say it."""
    if is_finished(run_dir):
        return unreported(str(run_dir))
    return InterruptedRunError(message if "--resume" in message else message + resume_hint(run_dir))


def resume_hint(run_dir: str | None) -> str:
    """A line to add to an error, which says how a run is continued; empty without one."""
    return f"\n`snugfit train --resume {quote(run_dir)}` continues the run." if run_dir else ""


def is_finished(run_dir: str | None) -> bool:
    """Whether a run has written its record."""
    return run_dir is not None and (Path(run_dir) / "record.json").is_file()


def _is_resumable(run_dir: str | None) -> bool:
    return run_dir is not None and (Path(run_dir) / "manifest.json").is_file()


@contextlib.contextmanager
def _child(job: dict[str, Any], server: ForkServer | None) -> Iterator[tuple[Child, Iterator[str], list[int]]]:
    """A child with its messages; signals are passed on to it while it works, and listed."""
    reading, writing = os.pipe()
    previous, passed_on = {}, list[int]()
    child: Child
    try:
        with blocked_signals():
            child = start_worker(writing, job) if server is None else server.fork(job, writing)
            previous = _forward_signals(child, passed_on)
    finally:
        os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=0) as pipe, contextlib.closing(read_lines(pipe)) as messages:
            if isinstance(child, ForkedChild) and (first := next(messages, "")):
                child.begin(first)
            if child.pid == 0:
                with _child(job, None) as started:
                    yield started
            else:
                yield child, messages, passed_on
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def read_lines(pipe: BinaryIO) -> Generator[str, None, None]:
    """The lines that arrive through an unbuffered pipe, whose last may lack its end.

    If it waited for the pipe alone, the handler of a signal that came just before would run only once a line had come
    (PEP 475).
    """
    rest, waiting = b"", select.poll()
    with _woken_by_signals() as woken:
        for each in (pipe.fileno(), woken):
            waiting.register(each, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in waiting.poll()]
            if woken in ready:
                os.read(woken, 512)
            if pipe.fileno() not in ready:
                continue
            if not (part := pipe.read(2**16)):
                break
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode() + "\n" for line in lines)
    if rest:
        yield rest.decode()


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[int]:
    """A pipe that gets a byte with every signal that has a handler."""
    with contextlib.ExitStack() as stack:
        woken, waking = os.pipe()
        for each in (woken, waking):
            stack.callback(os.close, each)
            os.set_blocking(each, False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(waking, warn_on_full_buffer=False))
        yield woken


def _forward_signals(child: Child, passed_on: list[int]) -> dict[int, Any]:
    """Pass signals on, a hang-up as SIGTERM; a hang-up that nohup made this process ignore stays ignored."""

    def forward(number: int, frame: Any) -> None:
        passed_on.append(number)
        child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def suspend(number: int, frame: Any) -> None:
        child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        child.send_signal(signal.SIGCONT)

    handlers = {number: forward for number in FORWARDED}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    handlers[signal.SIGTSTP] = suspend
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def death_error(code: int, job: dict[str, Any], run_dir: str | None, of_memory: bool | None = None) -> SnugfitError:
    """Explain a child that ended without a result, by its return code, negative for a signal.

    ``of_memory``: whether the kernel killed a process meanwhile because memory ran out; None if unknown.
    """
    hint = resume_hint(run_dir)
    if code >= 0:
        return SnugfitError(f"the {job['command']} process ended with code {code} and no result.{hint}")
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number in FORWARDED:
        return InterruptedRunError(f"interrupted by {name}.{hint}")
    what = f"the {job['command']} process was killed by {name}"
    budget = (job.get("request") or {}).get("budget", {})
    capped = bool(job.get("resume") or any(map(budget.get, ("memory", "total_memory", "host_memory"))))
    if number == signal.SIGKILL:
        return _kill_error(what, hint, of_memory)
    if number == signal.SIGABRT and capped:
        return BudgetExceededError(f"{what}, most likely because memory ran out.{hint}")
    if number == signal.SIGBUS:
        return UnusableInputError(
            f"{what}: a mapped file was truncated, or its disk failed. `snugfit verify RUN` checks the files "
            f"of a run folder.{hint}"
        )
    return SnugfitError(f"{what}, which is a fault in native code.{hint}")


def _kill_error(what: str, hint: str, of_memory: bool | None) -> SnugfitError:
    if "WORLD_SIZE" in os.environ:
        return WorkerLostError(f"rank {os.environ.get('RANK')}: {what}, by a user or because memory ran out.{hint}")
    if of_memory:
        return BudgetExceededError(f"{what}, because the machine ran out of memory.{hint}")
    unknown = of_memory is None
    why = "by a user or because memory ran out" if unknown else "by a user: the kernel was not out of memory"
    return WorkerLostError(f"{what}, {why}.{hint}")


def memory_kills(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Out-of-memory kills by the kernel so far: in this process's control group, or else on this machine.

    The group of a killed process also counts kills because the whole machine ran out of memory. None if the kernel
    does not count.
    """
    files = {1: "memory.oom_control", 2: "memory.events"}
    counters = [group.folder / files[group.version] for group in memory_groups(proc, groups)]
    found = (counts(path).get("oom_kill") for path in [*counters, proc / "vmstat"])
    return next((kills for kills in found if kills is not None), None)
