"""Default folders of caches and data."""

from __future__ import annotations

import contextlib
import os
import tempfile
from hashlib import sha256
from pathlib import Path

from snugfit.errors import CheckpointError, DataError, UsageError

PROFILE_CACHES = ("auto", "renew", "off")
"""What ``--profile-cache`` takes in place of a folder."""


def cache_dir() -> Path:
    """Folder for derived or downloaded files; a temporary one if the home folder is read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    for folder in (Path(base) / "snugfit", Path(tempfile.gettempdir()) / f"snugfit-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise DataError("no writable folder for derived files; set XDG_CACHE_HOME to one.")


def expanded(path: str | Path) -> Path:
    """The path, with ``~`` as the home folder; raises DataError if the user after ``~`` is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"'{path}' begins with ~ and a name that no user has. Give the whole path.") from error


def data_root(data_dir: str | Path | None) -> Path:
    """The folder of data sets: ``data_dir``, else ``SNUGFIT_DATA``, else ``data`` in snugfit's cache folder."""
    named = data_dir or os.environ.get("SNUGFIT_DATA")
    if not named:
        return cache_dir() / "data"
    root = expanded(named)
    if not root.is_dir():
        raise DataError(f"the data folder '{root}' does not exist. Give another with --data-dir or SNUGFIT_DATA.")
    return root


def require_weights(path: Path) -> None:
    """Raise CheckpointError unless there is a file of weights at a path; its contents are not looked at."""
    if not path.exists():
        raise CheckpointError(f"there is no weights file {path}.")
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file, and is not read; give a file of weights.")


def profiles_folder(where: str) -> Path | None:
    """The folder of ``--profile-cache``; None if it is off or no folder is writable."""
    if where == "off":
        return None
    if where not in PROFILE_CACHES:
        folder = expanded(where).absolute()
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--profile-cache is auto, renew, off or a folder, and '{where}' is a file.")
        return folder
    try:
        return cache_dir() / "profiles"
    except DataError:
        return None


def run_cache_folder(cache_dir: str | None, folder: Path) -> Path | None:
    """The folder of a run below ``--cache-dir``, unique even for runs of one name; None without ``--cache-dir``."""
    if cache_dir is None:
        return None
    where = sha256(str(folder.resolve()).encode(errors="surrogateescape")).hexdigest()[:8]
    return expanded(cache_dir) / f"{shortened(folder.name, 246)}-{where}"


def shortened(name: str, most: int) -> str:
    """A name of at most so many bytes: file systems have 255 for one part of a path."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= most else encoded[:most].decode(errors="ignore")


def writable_folder(*wanted: str | None) -> str:
    """The first of these folders that exists and is writable, or else the folder that will contain it.

    Without any, it is the system's folder of temporary files.
    """
    for path in filter(None, wanted):
        folder = expanded(path).absolute()
        found = next(each for each in (folder, *folder.parents) if each.is_dir())
        if os.access(found, os.W_OK):
            return str(found)
    return tempfile.gettempdir()


def try_write_text(path: Path, text: str) -> None:
    """Replace a file atomically, since other processes may read it; ignore failures."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)
