"""Where data sets are."""

from __future__ import annotations

import os
from pathlib import Path

from snugfit._core.paths import data_root, expanded
from snugfit.errors import DataError


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
    folder = expanded(path)
    if folder.is_dir():
        return folder
    if not folder.is_absolute() and (data_dir or os.environ.get("SNUGFIT_DATA")):
        below = data_root(data_dir) / folder
        if below.is_dir():
            return below
    raise DataError(f"the image folder '{path}' does not exist. Give a folder with one sub-folder per class.")
