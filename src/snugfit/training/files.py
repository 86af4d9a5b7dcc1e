"""Reading and writing files whole, durably, and with snugfit's errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snugfit.errors import CheckpointError, OutOfStorageError, is_out_of_storage
from snugfit.quantities import format_bytes


@contextmanager
def storage_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn "no space left" into :class:`OutOfStorageError`, naming the file and, where known, the bytes it needs."""
    try:
        yield
    except OSError as error:
        if not is_out_of_storage(error):
            raise
        size = f" ({format_bytes(needed)} in all)" if needed is not None else ""
        raise OutOfStorageError(
            f"no space left on the device while writing {path}{size}. Free some space, or use another folder."
        ) from error


def as_bytes(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor of any dtype as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_exactly(fd: int, data: memoryview) -> None:
    """Write all of ``data`` at the file's position."""
    while data:
        data = data[os.write(fd, data) :]


def read_exactly(fd: int, views: list[memoryview], offset: int) -> None:
    """Fill ``views`` one after the other from ``offset`` on; the list is used up.

    Raises:
        CheckpointError: the file ends before.
    """
    while views:
        got = os.preadv(fd, views[:512], offset)
        if got == 0:
            raise CheckpointError(f"a file ends at byte {offset}, before its data does: it was truncated.")
        offset += got
        full = 0
        while full < len(views) and got >= len(views[full]):
            got -= len(views[full])
            full += 1
        del views[:full]
        if got:
            views[0] = views[0][got:]


def sync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in ``folder`` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json_atomic(path: Path | str, data: Any) -> None:
    """Write JSON so that ``path`` holds either its old or its whole new content, whatever happens.

    Raises:
        OutOfStorageError: the disk is full; the old content stays.
    """
    path = Path(path)
    draft = path.with_name(path.name + ".tmp")
    try:
        with storage_errors(path), draft.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)
