"""One process at a time writes in a run folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from snugfit.errors import UsageError

LOCK_FILE = "lock"
PATIENCE_SECONDS = 5.0
"""Longest wait for a lock; a process that was killed holds it until its memory is freed."""


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Context in which no other process writes in a run folder; nothing is locked if the folder does not exist.

    The system releases the lock when the process ends for any reason. The file stays, and has no meaning of its own.

    Raises:
        UsageError: another process has the lock.
    """
    if not Path(folder).is_dir():
        yield
        return
    path = Path(folder) / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        advice = "Remove that link" if path.is_symlink() else "Make it writable"
        raise UsageError(f"cannot lock the run folder with {path}: {error.strerror}. {advice}.") from error
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Wait a little for the lock; go on without one on a file system that has none."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return
            if time.monotonic() >= end:
                raise UsageError(
                    f"another process is at work on the run in {path.parent}; wait until it has ended, or stop it."
                ) from error
            time.sleep(0.05)
        else:
            return
