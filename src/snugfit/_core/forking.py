"""Work in a forked process, so that the memory that it leaves behind is not this process's."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from snugfit._core.machine_memory import machine_memory

LEAST_FREE_BYTES = 10**9
"""With less free memory nothing is forked: this process keeps a copy of every page that a child changes, 36 MB in all
for a plan of ResNet-20."""
_PR_SET_PDEATHSIG = 1
_PAUSE_SOFT = 1
"""``omp_pause_soft``: threads end, settings stay (OpenMP 5.0, section 3.2.44)."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if sys.platform != "win32" else ()
"""Signals that end a run, which the command line passes on to the process that does it."""
Send = Callable[[Any], None]
"""Sends a message, which JSON can hold, to the process that forked this one."""


def may_fork() -> bool:
    """Whether this process may fork others: on Linux, not in a launch, and where memory is not short."""
    if sys.platform != "linux" or "WORLD_SIZE" in os.environ:
        return False
    return machine_memory(0).free_bytes >= LEAST_FREE_BYTES


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent is killed: an orphan must not write to a resumed run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_forked(work: Callable[[Send], Any], on_message: Callable[[Any], object]) -> Any:
    """Run ``work`` in a forked process and return its result, which JSON can hold.

    torch's compute threads end, and start again when they are used. Ctrl-C reaches this process alone.

    Args:
        work: gets a function that sends messages to this process.
        on_message: called with each of them.

    Raises:
        ChildProcessError: the system refused to fork, or the process failed or was killed.
    """
    if not _end_threads():
        raise ChildProcessError("OpenMP's threads cannot be ended")
    parent, (reading, writing) = os.getpid(), os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, whose locks the child does not take
            child = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise ChildProcessError("the system refused to fork") from error
    if child == 0:
        try:
            os.close(reading)
            _work(work, writing, parent)
        finally:
            os._exit(0)
    try:
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as lines:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return _result(lines, on_message)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it is done, or this process was interrupted
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _result(lines: Iterable[str], on_message: Callable[[Any], object]) -> Any:
    """Hand on messages until the result comes, and return it."""
    for line in lines:
        if not line.endswith("\n"):  # the process was killed while it wrote
            break
        message = json.loads(line)
        if "error" in message:
            raise ChildProcessError(message["error"])
        if "result" in message:
            return message["result"]
        on_message(message["message"])
    raise ChildProcessError("the forked process was killed")


def _work(work: Callable[[Send], Any], writing: int, parent: int) -> None:
    """The forked process."""
    die_with_parent()
    if os.getppid() != parent:
        return
    libc = ctypes.CDLL(None)  # libgomp calls exit, where destructors may wait for threads that this process lacks
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    gc.freeze()  # looking for garbage would copy the pages of all objects
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    with os.fdopen(writing, "w", encoding="utf-8") as pipe:

        def send(**message: Any) -> None:
            pipe.write(f"{json.dumps(message)}\n")
            pipe.flush()

        try:
            send(result=work(lambda message: send(message=message)))
        except BaseException as error:
            send(error=f"{type(error).__name__}: {error}")


def _end_threads() -> bool:
    """End OpenMP's threads until they are used again: a forked process lacks them, and would wait for them for ever."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return pause is not None and pause(_PAUSE_SOFT) == 0
