"""The start and end of a process of the command line: streams, signals, and death with its parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from snugfit._core.forking import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36


class ReaderGoneError(Exception):
    """The reader of stdout went away. It is no BrokenPipeError, because rich handles that itself."""


class _Notes(io.FileIO):
    """stderr: output that cannot be written (no space, no reader) is dropped, because it must not end a run."""

    def write(self, data: Any) -> int:
        """Write, or pretend to."""
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return len(data)


class _Results(io.FileIO):
    """stdout: output that cannot be written is an error, except if the reader went away."""

    def write(self, data: Any) -> int:
        """Write.

        Raises:
            ReaderGoneError: the reader went away.
            OutOfStorageError, UsageError: it cannot be written for another reason.
        """
        from snugfit.errors import OutOfStorageError, UsageError

        try:
            return super().write(data) or 0
        except BrokenPipeError as error:
            drop_stdout()
            raise ReaderGoneError from error
        except OSError as error:
            drop_stdout()
            kind = OutOfStorageError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
            raise kind(f"cannot write the result to stdout: {error.strerror}. Redirect it elsewhere.") from error


def prepare_streams() -> None:
    """Open missing ones of stdin, stdout and stderr on the null device, so that no file gets their descriptors."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _text(_Results(1, "w", closefd=False), "surrogateescape", sys.stdout)
    sys.stderr = _text(_Notes(2, "w", closefd=False), "backslashreplace", sys.stderr)


def _text(raw: io.FileIO, errors: str, before: Any) -> io.TextIOWrapper:
    encoding = before.encoding if before is not None else "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=errors != "surrogateescape")


def drop_stdout() -> None:
    """Point stdout at the null device once it cannot be written, so that the interpreter's last flush is silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def ignore_signals() -> None:
    """Ignore signals once all work is done.

    While the interpreter exits, a signal would show a traceback from a half-unloaded module, or replace the exit code.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def quick_exit() -> Callable[[int], NoReturn]:
    """A function that exits with a code, without freeing what torch has imported, which takes 0.4 s.

    Call this first: threads end and exit handlers run as usual, the one that ends the process last.
    """
    codes = list[int]()

    def end() -> None:
        for code in codes:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # nobody reads it any more
                    stream.flush()
            os._exit(code)

    def leave(code: int) -> NoReturn:
        codes.append(code)
        sys.exit(code)

    atexit.register(end)
    return leave


def redeliver_swallowed_interrupts() -> None:
    """Deliver an interrupt in a finalizer again, 10 ms later: Python would print a traceback and forget it."""
    usual = sys.unraisablehook

    def again(swallowed: Any) -> None:
        if swallowed.exc_type is KeyboardInterrupt:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            usual(swallowed)

    sys.unraisablehook = again


def raise_at_signals() -> None:
    """Raise KeyboardInterrupt at SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def keep_niceness() -> None:
    """Give the session that this process has begun its own niceness.

    Linux divides the processor among sessions before it looks at processes (``man 7 sched``, "The autogroup feature"):
    without this, ``nice snugfit train`` would have no effect.
    """
    with contextlib.suppress(OSError):  # there are no such groups
        Path("/proc/self/autogroup").write_text(str(os.nice(0)), encoding="ascii")


def adopt_orphans(adopt: bool) -> None:
    """Whether this process becomes the parent of its descendants whose own parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def die_with_agent() -> None:
    """Let the kernel kill this process with torchrun's agent, if that started it and may be started again."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
