"""The command line. The parent process reads arguments and knows no torch; the work is done by a fresh child."""

from __future__ import annotations


def main() -> None:
    """Entry point of ``snugfit``: run the command of ``sys.argv`` and exit with its code."""
    try:
        from snugfit.cli.start import end_at_signals, prepare_streams

        end_at_signals()
    except KeyboardInterrupt:
        raise SystemExit(_interrupted()) from None
    prepare_streams()
    from snugfit.cli.app import main as run_and_exit

    run_and_exit()


def _interrupted() -> int:
    """Say so without any module that would have to load."""
    import os

    os.write(2, b"error: interrupted.\n")
    return 130
