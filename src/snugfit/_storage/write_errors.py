"""What a file that cannot be written raises, wherever it is written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snugfit._quantities import format_bytes
from snugfit.errors import CheckpointError, OutOfStorageError, is_out_of_storage


@contextmanager
def storage_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Context for writing a file, which needs so many bytes in all, if known.

    Raises:
        OutOfStorageError: the disk is full.
        CheckpointError: the file cannot be written for another reason; refused memory stays an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        if not is_out_of_storage(error):
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}.") from error
        size = f" ({format_bytes(needed)} in all)" if needed is not None else ""
        raise OutOfStorageError(
            f"no space left on the device while writing {path}{size}. Free some space, or use another folder."
        ) from error
