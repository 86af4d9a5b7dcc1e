"""Digests of files, on disk and while they are written."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 18
"""Largest part of a file in memory, in bytes."""


@dataclass(frozen=True)
class FileDigest:
    """Size and digest of a file, which reveal damage; ``grows`` if data may have been appended since, as to a log.

    The digest is BLAKE2b, 128 bits in hexadecimal, which is faster in software than the SHA family.
    """

    bytes: int
    blake2b: str
    grows: bool = False

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Digest of a whole file; raises OSError if it cannot be read."""
        return cls(*_digest_of(path, None))

    def flaw(self, path: Path) -> str | None:
        """The flaw of a file that should have this digest, as text that follows its name; None if it is sound."""
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return "is no regular file"
            if status.st_size < self.bytes or (status.st_size > self.bytes and not self.grows):
                return f"was truncated or changed: it has {status.st_size} bytes instead of {self.bytes}"
            same = _digest_of(path, self.bytes) == (self.bytes, self.blake2b)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        return None if same else "is damaged or was changed: its digest is not that of what was written"


def _digest_of(path: Path, most: int | None) -> tuple[int, str]:
    """Size and BLAKE2b of a file's first ``most`` bytes."""
    digest, left = hashlib.blake2b(digest_size=16), most
    chunk = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk if left is None else chunk[:left]):
            digest.update(chunk[:count])
            left = None if left is None else left - count
        return file.tell(), digest.hexdigest()


class Digester:
    """Computes the digest of what is written, and passes it on to a file, if there is one."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file, self._digest, self._bytes = file, hashlib.blake2b(digest_size=16), 0

    def write(self, data: Any) -> int:
        """Append data, text as UTF-8; returns its size in bytes."""
        view = memoryview(data.encode() if isinstance(data, str) else data)
        self._digest.update(view)
        self._bytes += view.nbytes
        if self._file is not None:
            self._file.write(view)
        return view.nbytes

    def digest(self, *, grows: bool = False) -> FileDigest:
        """The digest of everything written so far."""
        return FileDigest(self._bytes, self._digest.hexdigest(), grows)


def sync_file(file: IO[bytes]) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in ``folder`` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
