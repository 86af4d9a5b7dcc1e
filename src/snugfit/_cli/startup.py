"""How a process of the command line begins: with streams that exist, and signals that raise once it has loaded."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


class ReaderGoneError(Exception):
    """Nobody reads stdout any more; no BrokenPipeError, which rich takes for its own."""


class _Notes(io.FileIO):
    """stderr: what cannot be written (no space, no reader) is dropped, for it must not end a run."""

    def write(self, data: Any) -> int:
        """Write, or pretend to."""
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return len(data)


class _Results(io.FileIO):
    """stdout: what cannot be written is an error that names it; a reader that went away is none."""

    def write(self, data: Any) -> int:
        """Write.

        Raises:
            ReaderGoneError: nobody reads any more.
            OutOfStorageError, UsageError: it cannot be written otherwise.
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
            raise kind(f"cannot write the result to stdout: {error.strerror}. Send it elsewhere.") from error


def prepare_streams() -> None:
    """Open what is missing of stdin, stdout and stderr on the null device, so that no file takes their numbers."""
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
    """Point stdout at nothing once it cannot be written, so that the interpreter's last flush stays silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def ignore_signals() -> None:
    """Ignore signals once all is done: nothing is left to interrupt but the end of the interpreter.

    A signal then would show a traceback from a module that is being torn down, or replace the exit code.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


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


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent is killed: an orphan must not write to a resumed run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_agent() -> None:
    """The same if torchrun started this process: the agent may be started again while this process lives on."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
