"""Where data sets are. The only file of this room that reads the environment."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from snugfit.errors import DataError


def cache_dir() -> Path:
    """Folder for files that snugfit derives or downloads; a temporary one where the home folder is read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    for folder in (Path(base) / "snugfit", Path(tempfile.gettempdir()) / f"snugfit-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise DataError("no folder to keep derived files in: set XDG_CACHE_HOME to one that can be written.")


def data_root(data_dir: str | Path | None) -> Path:
    """Folder that holds data sets: ``data_dir``, else ``SNUGFIT_DATA``, else ``data`` in snugfit's cache folder.

    Raises:
        DataError: the folder was named but does not exist.
    """
    named = data_dir or os.environ.get("SNUGFIT_DATA")
    if not named:
        return cache_dir() / "data"
    root = Path(named).expanduser()
    if not root.is_dir():
        raise DataError(f"the data folder '{root}' does not exist. Give another with --data-dir or SNUGFIT_DATA.")
    return root


def find(root: Path, folders: tuple[str, ...], markers: tuple[str, ...]) -> Path | None:
    """First of ``folders`` under ``root`` (globs allowed) that holds one of ``markers``; None when none does."""
    for pattern in folders:
        matches = [root] if pattern == "." else sorted(root.glob(pattern))
        for folder in matches:
            if any((folder / marker).exists() for marker in markers):
                return folder
    return None


def image_folder(path: str, data_dir: str | Path | None) -> Path:
    """Resolve the PATH of ``folder:PATH``: as it stands, else under the data folder.

    Raises:
        DataError: there is no such folder.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not folder.is_absolute() and (data_dir or os.environ.get("SNUGFIT_DATA")):
        below = data_root(data_dir) / folder
        if below.is_dir():
            return below
    raise DataError(f"the image folder '{path}' does not exist. Give a folder with one sub-folder per class.")
