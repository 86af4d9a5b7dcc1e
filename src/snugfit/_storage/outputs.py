"""Output files and folders, which are checked before the work that fills them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import IO

from snugfit._core.paths import expanded
from snugfit._storage.lock import LOCK_FILE
from snugfit.errors import OutOfStorageError, UsageError

OUT = "Choose another --out."


def require_places(out: str | Path | None, cache_dir: str | Path | None) -> None:
    """Check the folders that a run will write to, as :func:`require_run_folder` and :func:`require_folder` do."""
    if out is not None:
        require_run_folder(out)
    if cache_dir is not None:
        require_folder(expanded(cache_dir), "Choose another --cache-dir.")


def require_run_folder(folder: str | Path) -> None:
    """Check that a new run folder can be created.

    Raises:
        UsageError: it is not empty, or cannot be created or written.
        OutOfStorageError: the disk is full.
    """
    with _refusing(folder, OUT):
        if Path(folder).is_dir() and any(path.name != LOCK_FILE for path in Path(folder).iterdir()):
            again = f"--resume {quote(str(folder))}"
            raise UsageError(f"{folder} is not empty; choose another --out, or continue it with {again}.")
    require_folder(folder)


def require_folder(folder: str | Path, advice: str = OUT) -> None:
    """Check that a folder can be written, or created and written; nothing is left behind.

    Raises:
        UsageError: it cannot; the advice says what to do.
        OutOfStorageError: the disk is full.
    """
    made: list[Path] = []
    with _refusing(folder, advice):
        try:
            for path in reversed([Path(folder), *Path(folder).parents]):
                if not path.is_dir():
                    _make(path)
                    made.append(path)
            with tempfile.TemporaryFile(dir=folder):
                pass
        finally:
            for path in reversed(made):
                with contextlib.suppress(OSError):
                    path.rmdir()


def require_file(path: str | Path, advice: str = OUT) -> None:
    """Check that a file can be written, as :func:`require_folder` does; nothing is created or changed."""
    with _refusing(path, advice):
        if not _is_special(path):
            with tempfile.TemporaryFile(dir=_target(path).parent):
                pass
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def whole_file(path: str | Path, advice: str = OUT) -> Iterator[IO[str]]:
    """Write a text file under a temporary name, and rename it once it is complete.

    Of a link, the file that it leads to is replaced. A device or pipe is written directly.

    Yields:
        The file, open for writing.

    Raises:
        UsageError: it cannot be written; the advice says what to do.
        OutOfStorageError: the disk is full.
    """
    with _refusing(path, advice):
        if _is_special(path):
            with _opened(Path(path), "w") as file:
                yield file
            return
        target = _target(path)
        unfinished = target.with_name(f"{target.name[:200]}.{os.getpid()}.part")
        try:
            with _opened(unfinished, "x") as file:
                yield file
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    if folder.is_symlink():
        raise FileNotFoundError(errno.ENOENT, "a link there leads nowhere")
    if folder.exists():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
    folder.mkdir()


def _opened(path: Path, mode: str) -> IO[str]:
    return path.open(mode, encoding="utf-8", errors="surrogateescape", newline="")


def _target(path: str | Path) -> Path:
    """The file of a path, after links are followed; raises OSError if it is a folder, or links lead in a circle."""
    target = Path(os.path.realpath(path))
    if target.is_dir() or str(path).endswith("/"):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def _is_special(path: str | Path) -> bool:
    """Whether it is a device or pipe."""
    with contextlib.suppress(FileNotFoundError):
        mode = Path(path).stat().st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


@contextlib.contextmanager
def _refusing(path: str | Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfStorageError(f"no space left to write {path}; free some. {advice}") from error
        raise UsageError(f"cannot write {path}: {error.strerror or error}. {advice}") from error
