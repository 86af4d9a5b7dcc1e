"""The command line. The parent process reads arguments and knows no torch; the work is done by a fresh child."""

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
    """End at once, with code 130 and one line, at SIGINT and SIGTERM: there is nothing to tidy while modules load."""
    import _signal  # part of the interpreter; what `signal` adds to it takes milliseconds to load

    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _end)


def _end(number: int, frame: Any) -> NoReturn:
    """Say so without any module that would have to load."""
    import os
    import sys

    said = b'{"schema": 1, "error": {"code": 130, "type": "InterruptedRunError", "message": "interrupted."}}\n'
    for descriptor, line in ((2, b"error: interrupted.\n"), *([(1, said)] if "--json" in sys.argv else [])):
        try:  # without contextlib, which would have to load
            os.write(descriptor, line)
        except OSError:  # nobody reads it; the exit code says it too
            continue
    os._exit(INTERRUPTED)
