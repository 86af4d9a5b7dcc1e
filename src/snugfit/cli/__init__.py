"""The command line. The parent process reads arguments and knows no torch; the work is done by a fresh child."""

from __future__ import annotations


def main() -> None:
    """Entry point of ``snugfit``: run the command of ``sys.argv`` and exit with its code."""
    from snugfit.cli.app import main as run_and_exit

    run_and_exit()
