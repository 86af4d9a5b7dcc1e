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

from snugfit._core.digests import Digester, FileDigest, sync_file, sync_folder
from snugfit._core.manifest import Manifest
from snugfit._quantities import format_bytes
from snugfit.errors import CheckpointError, OutOfStorageError, is_out_of_storage


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


def write_json_atomic(path: Path | str, data: Any, manifest: Manifest | None = None) -> FileDigest:
    """Write JSON so that ``path`` holds either its old or its whole new content, whatever happens.

    Args:
        path: the file.
        data: JSON-able data.
        manifest: lists the file, in a run folder.

    Returns:
        The digest of the new content.

    Raises:
        OutOfStorageError: the disk is full; the old content stays.
    """
    path = Path(path)
    draft = path.with_name(path.name + ".tmp")
    try:
        with storage_errors(path):
            with draft.open("wb") as file:
                written = Digester(file)
                json.dump(data, written, indent=1)
                written.write("\n")
                sync_file(file)
            commit(draft, path, written.digest(), manifest)
    finally:
        draft.unlink(missing_ok=True)
    return written.digest()


def commit(draft: Path, path: Path, digest: FileDigest, manifest: Manifest | None) -> None:
    """Give a draft, which is on disk, its name; in a run folder its manifest lists it first."""
    if manifest is not None:
        manifest.commit(draft, path, digest)
    else:
        draft.replace(path)
        sync_folder(path.parent)
