"""Work in a forked process, so that the memory that it leaves behind is not this process's."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from snugfit._core.machine_memory import machine_memory

LEAST_FREE_BYTES = 10**9
"""With less free memory nothing is forked: this process keeps a copy of every page that a child changes, 36 MB in all
for a plan of ResNet-20."""
_PR_SET_PDEATHSIG = 1
_PAUSE_SOFT = 1
"""``omp_pause_soft``: threads end, settings stay (OpenMP 5.0, section 3.2.44)."""

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

    Args:
        work: gets a function that sends messages to this process.
        on_message: called with each of them.

    Raises:
        ChildProcessError: the system refused to fork, or the process failed or was killed.
    """
    if not _end_threads():
        raise ChildProcessError("OpenMP's threads cannot be ended")
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, whose locks the child does not take
            child = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        raise ChildProcessError("the system refused to fork") from error
    if child == 0:
        os._exit(_work(work, writing))
    os.close(writing)
    results = []
    try:
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line) if line.endswith("\n") else {}  # it was killed while it wrote
                if "result" in message:
                    results.append(message["result"])
                elif message:
                    on_message(message["message"])
    finally:
        os.kill(child, signal.SIGKILL)  # it has ended, or this process was interrupted
        os.waitpid(child, 0)
    if not results:
        raise ChildProcessError("the forked process failed")
    return results[0]


def _work(work: Callable[[Send], Any], writing: int) -> int:
    """The forked process; returns its exit code."""
    with contextlib.suppress(BaseException):
        die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:

            def send(**message: Any) -> None:
                pipe.write(json.dumps(message) + "\n")
                pipe.flush()

            send(result=work(lambda message: send(message=message)))
        return 0
    return 1


def _end_threads() -> bool:
    """End OpenMP's threads until they are used again: a forked process lacks them, and would wait for them for ever."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return pause is not None and pause(_PAUSE_SOFT) == 0
