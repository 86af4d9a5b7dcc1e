"""Files of data sets: entries of a folder, names in lists, and text within limits.

**Links** to files and folders are followed, out of the data set too. A folder is read once, so a link to a parent
folder, or to one that was read before, adds nothing. A file is listed once in its class; if links put a file into two
classes or two splits, :func:`check_disjoint` refuses it.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
import stat
from collections.abc import Collection, Iterator
from itertools import chain, islice
from pathlib import Path, PurePosixPath

import numpy as np

from snugfit.errors import DataError

LARGEST_TEXT = 1 << 28
"""Largest size in bytes of a text; a list of ImageNet's 1.3 million images has some 60 MB."""
LONGEST_LINE = 1 << 20
LONGEST_NAME = 1024
"""Largest number of characters of a file's name in a list."""
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}


class FileNames:
    """Many file names in one byte string: a tenth of the memory of as many path objects."""

    def __init__(self) -> None:
        self._text, self._ends = bytearray(), [0]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Path:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return Path(os.fsdecode(bytes(self._text[self._ends[index] : self._ends[index + 1]])))

    def __iter__(self) -> Iterator[Path]:
        return map(self.__getitem__, range(len(self)))

    def append(self, path: Path) -> None:
        """Add one name at the end."""
        self._text += os.fsencode(path)
        self._ends.append(len(self._text))


def below(folder: Path, name: str, place: str) -> Path:
    """The file that a list names at ``place``, below the folder of the listed images and not out of it."""
    parts = PurePosixPath(name).parts if "\0" not in name else ()
    if not parts or parts[0] == "/" or ".." in parts or len(name) > LONGEST_NAME:
        raise DataError(f"{place}: {reprlib.repr(name)} is not a file below {folder}. Name images relative to it.")
    return folder / name


def visible(entry: Path) -> bool:
    """Whether an entry is neither hidden nor added to an archive by macOS."""
    return not entry.name.startswith((".", "__MACOSX"))


def walk(folder: Path, suffixes: Collection[str], links: list[Path]) -> list[Path]:
    """Visible regular files with one of the suffixes, sub-folders included, in sorted order; each real file once.

    Suffixes are in lower case. Every followed link is added to ``links``.
    """
    before, found = len(links), list[Path]()
    if folder.is_symlink() or folder.parent.is_symlink():
        links.append(folder)
    entered = {_identity(each) for each in (folder, *folder.resolve().parents)}
    waiting = [_entries(folder)]
    while waiting:
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
            continue
        is_folder, is_image = entry.is_dir(), entry.suffix.lower() in suffixes
        if entry.is_symlink() and (is_folder or is_image):
            links.append(entry)
        if is_folder:
            if (identity := _identity(entry)) not in entered:
                entered.add(identity)
                waiting.append(_entries(entry))
        elif is_image:
            check_regular(entry)
            found.append(entry)
    if len(links) == before:
        return found
    return list({os.path.realpath(file): file for file in reversed(found)}.values())[::-1]


def _entries(folder: Path) -> Iterator[Path]:
    return iter(sorted(filter(visible, folder.iterdir())))


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def check_disjoint(*groups: FileNames) -> None:
    """Refuse a file that links put into several classes or splits. Takes eight bytes per file."""
    hashes = [hash(os.path.realpath(file)) for group in groups for file in group]
    values = np.array(hashes, dtype=np.int64)
    order = np.argsort(values, kind="stable")
    for place in np.flatnonzero(values[order][1:] == values[order][:-1]):
        first, second = (next(islice(chain(*groups), int(order[place + step]), None)) for step in (0, 1))
        if os.path.realpath(first) == os.path.realpath(second):
            raise DataError(f"{first} and {second} are one file, through a link. Keep it in one class of one split.")


def check_regular(path: Path) -> None:
    """Refuse anything but a regular file: reading a FIFO or a device may never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}. Restore or remove it.") from error
    if not stat.S_ISREG(mode):
        raise DataError(f"{path} is not a regular file but a {_KINDS.get(stat.S_IFMT(mode), 'device')}. Remove it.")


@contextlib.contextmanager
def opening(what: str) -> Iterator[None]:
    """Turn an ``OSError``, such as of permissions or a damaged disk, into a ``DataError`` that names the file."""
    try:
        yield
    except OSError as error:
        path = os.fsdecode(error.filename) if error.filename else what
        shown = path if len(path) < 300 else f"{path[:300]}..."
        raise DataError(f"{shown} cannot be read: {error.strerror or error}. Correct or remove it.") from error


def lines(path: Path, largest: int = LARGEST_TEXT) -> Iterator[str]:
    """Lines of a UTF-8 text file of at most ``largest`` bytes, without white space around them, read one at a time."""
    check_regular(path)
    try:
        if (size := path.stat().st_size) > largest:
            raise DataError(f"{path} has {size:,} bytes; at most {largest:,} are read. Divide or replace it.")
        with path.open(encoding="utf-8") as file:
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{path} has a line of over {LONGEST_LINE:,} characters. Replace it.")
                yield line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}. Replace or remove it.") from error
