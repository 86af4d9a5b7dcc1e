"""The command line. The parent process reads arguments and imports no torch; a fresh child does the work."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes long to import: signals are not caught meanwhile
if TYPE_CHECKING:
    from typing import Any, NoReturn

INTERRUPTED = 130


def main() -> None:
    """Entry point of ``snugfit``: run the command of ``sys.argv`` and exit with its code."""
    try:
        _end_at_signals()
    except KeyboardInterrupt:
        _end(2, None)
    from snugfit._cli.startup import prepare_streams

    prepare_streams()
    from snugfit._cli.app import main as run_and_exit

    run_and_exit()


def _end_at_signals() -> None:
    """End at once, with code 130 and one line, at SIGINT and SIGTERM: nothing needs cleaning up while modules load."""
    import _signal  # part of the interpreter; what `signal` adds to it takes milliseconds to load

    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _end)


def _end(number: int, frame: Any) -> NoReturn:
    """Report the interruption without loading a module."""
    import os
    import sys

    said = b'{"schema": 1, "error": {"code": 130, "type": "InterruptedRunError", "message": "interrupted."}}\n'
    for descriptor, line in ((2, b"error: interrupted.\n"), *([(1, said)] if "--json" in sys.argv else [])):
        try:  # contextlib would have to load
            os.write(descriptor, line)
        except OSError:  # no reader; the exit code says it too
            continue
    os._exit(INTERRUPTED)
