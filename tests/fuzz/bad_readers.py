"""Readers with the defects that fuzzing is to find."""

import ctypes
import time
from pathlib import Path

from snugfit.errors import DataError


def hangs(root: Path) -> None:
    time.sleep(1000)


def spins(root: Path) -> None:
    while True:
        pass


def crashes(root: Path) -> None:
    ctypes.string_at(0)


def grows(root: Path) -> None:
    bytearray(1 << 40)


def raises(root: Path) -> None:
    raise KeyError("field")


def says_nothing(root: Path) -> None:
    raise DataError("")


def exits(root: Path) -> None:
    raise SystemExit(0)


def refuses(root: Path) -> None:
    raise DataError("the file is damaged. Get it anew.")


def reads(root: Path) -> None:
    print("what a reader prints is no answer")


BAD = (hangs, spins, crashes, grows, raises, says_nothing, exits, refuses, reads)
READERS = {read.__name__: read for read in BAD}
