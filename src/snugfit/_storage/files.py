"""Files that are replaced as a whole, and descriptors that are read to the last byte."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from snugfit._storage.digests import Digester, FileDigest, sync_file, sync_folder
from snugfit._storage.manifest import Manifest
from snugfit._storage.write_errors import storage_errors
from snugfit.errors import CheckpointError

_MOST_VIEWS = 512
"""Views that one system call fills; the smallest limit among systems is 1024."""


@contextmanager
def replacing(path: Path, manifest: Manifest | None = None) -> Iterator[Digester]:
    """Write a file under a temporary name, sync it to disk and give it its name; an older file is intact until then.

    In a run folder, the manifest lists the file before it gets its name.

    Yields:
        The file, which counts and digests what is written.

    Raises:
        OutOfStorageError, CheckpointError: it cannot be written.
    """
    draft = path.with_name(path.name + ".tmp")
    with storage_errors(path):
        try:
            with draft.open("wb") as file:
                written = Digester(file)
                yield written
                sync_file(file)
            if manifest is not None:
                manifest.commit(draft, path, written.digest())
            else:
                draft.replace(path)
                sync_folder(path.parent)
        finally:
            draft.unlink(missing_ok=True)


def write_json_atomic(path: Path | str, data: Any, manifest: Manifest | None = None) -> FileDigest:
    """Write JSON so that ``path`` holds either its old or its whole new content, whatever happens; returns its digest.

    Raises:
        OutOfStorageError, CheckpointError: it cannot be written; the old content stays.
    """
    with replacing(Path(path), manifest) as file:
        json.dump(data, file, indent=1)
        file.write("\n")
    return file.digest()


def read_exactly(fd: int, views: list[memoryview], offset: int) -> None:
    """Fill ``views`` one after the other from ``offset`` on; the list is used up.

    Raises:
        CheckpointError: the file ends before.
    """
    while views:
        got = os.preadv(fd, views[:_MOST_VIEWS], offset)
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
