"""The manifest of a run folder: the digest of every file, written before the file itself gets its name.

A process may be killed between writing the manifest and renaming the file. So the manifest keeps two digests of each
file that was being replaced, the old and the new one (None: no file), and one digest of every other file. A file is
sound if it has one of its digests. The manifest is replaced as a whole, and holds a digest of itself.

It does not list itself, the lock, drafts (``*.tmp``), hidden files and TensorBoard's events, which are never read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from shlex import quote

from snugfit._core.documents import read_data
from snugfit._core.serial import to_data
from snugfit._storage.digests import Digester, FileDigest, sync_file, sync_folder
from snugfit._storage.lock import LOCK_FILE, run_lock
from snugfit._storage.write_errors import storage_errors
from snugfit.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
FORMAT = 1
"""Version of its layout."""

_CACHE = "cache"
_EVENTS = "events.out.tfevents"
_LONGEST = 255
"""Bytes of one part of a path, as file systems have it."""

States = tuple["FileDigest | None", ...]


@dataclass(frozen=True)
class _Entry:
    states: tuple[FileDigest | None, ...]


@dataclass(frozen=True)
class _Content:
    format: int
    digest: str
    files: dict[str, _Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Flaw:
    """A file that is missing or not as it was written, and why, as text that follows its name."""

    path: Path
    missing: bool
    reason: str


class Manifest:
    """Digests of the files of a run folder, and of its caches (``cache/``), which may be elsewhere."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder, self._cache = Path(folder), Path(cache or folder / _CACHE)
        self._files: dict[str, States] = {}
        self._postponed = False

    @classmethod
    def read(cls, folder: Path, cache: Path | None = None) -> Manifest:
        """The manifest of a run folder; raises CheckpointError if there is none, or it is damaged."""
        path = Path(folder) / MANIFEST_FILE
        if not Path(folder).exists():
            raise CheckpointError(f"{folder} is not a run folder: it does not exist.")
        if not path.exists():
            if Path(folder).is_dir() and {each.name for each in Path(folder).iterdir()} <= {LOCK_FILE}:
                raise CheckpointError(
                    f"{folder} is not a run folder: it is empty, so no run has begun. Repeat the command of the run."
                )
            raise CheckpointError(
                f"{folder} is not a run folder, or incomplete: it has no {MANIFEST_FILE}, which shows damage. "
                "Restore it from a copy, or start a new run."
            )
        content = read_data(_Content, path, CheckpointError, "Restore it.")
        if content.format != FORMAT:
            raise CheckpointError(f"{path} has format {content.format}, and this version reads {FORMAT}.")
        if content.digest != _digest(content.files):
            raise CheckpointError(f"{path} is damaged: its digest is not that of what was written. Restore it.")
        for name, entry in content.files.items():
            if not (_is_inside(name) and entry.states):
                raise CheckpointError(f"{path} lists {name!r:.80}, which is no file of a run. Restore it.")
        manifest = cls(folder, cache)
        manifest._files = {name: entry.states for name, entry in content.files.items()}
        return manifest

    @classmethod
    def of(cls, folder: Path) -> Manifest:
        """A new manifest that lists the files of a folder as they are."""
        manifest = cls(folder)
        manifest.announce({path: FileDigest.of(path) for path in manifest.unlisted()})
        return manifest

    @classmethod
    def reopen(cls, folder: Path, cache: Path | None = None) -> Manifest:
        """The manifest of a folder that will be written to, after drafts are removed; empty if nothing was written yet.

        Raises:
            CheckpointError: it is damaged, or missing from a folder that holds files.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        manifest = cls(folder, cache)
        for draft in manifest._present("*.tmp"):
            draft.unlink()
        if (Path(folder) / MANIFEST_FILE).exists() or any(manifest.unlisted()):
            manifest = cls.read(folder, cache)
        manifest._files = {name: manifest._found(name, states) for name, states in manifest._files.items()}
        return manifest

    def listed(self, name: str) -> FileDigest | None:
        """The newest digest of a file; None if it has none, or is removed."""
        return self._files.get(name, (None,))[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the listed files."""
        return tuple(self._files)

    def announce(self, new: Mapping[Path, FileDigest | None]) -> None:
        """Note the digests that files are about to have; None for files that are about to be removed.

        Everything that was announced before must be done by now.

        Raises:
            OutOfStorageError, CheckpointError: the manifest cannot be written; it is as it was.
        """
        if self._postponed:
            self._files.update({self.name(path): (digest,) for path, digest in new.items()})
            return
        settled = {name: states[-1:] for name, states in self._files.items() if states[-1] is not None}
        for path, digest in new.items():
            name = self.name(path)
            before: States = settled.get(name, (None,))
            settled[name] = before if before == (digest,) else (*before, digest)
        self._write(settled)

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove files, which may be missing."""
        gone = list(paths)
        listed = {path: None for path in gone if self.name(path) in self._files}
        if listed:
            self.announce(listed)
        for path in gone:
            path.unlink(missing_ok=True)
        if listed:
            self.settle()  # before something else gets their names

    def settle(self) -> None:
        """Note that every announced change is done."""
        self.announce({})

    def add(self, path: Path) -> None:
        """List a file that is complete."""
        self.announce({path: FileDigest.of(path)})

    def commit(self, draft: Path, path: Path, digest: FileDigest) -> None:
        """Rename a draft, which is on disk, to its final name."""
        self.announce({path: digest})
        draft.replace(path)
        sync_folder(path.parent)

    @contextmanager
    def rewriting(self, *folders: str) -> Iterator[None]:
        """Context in which all files of some folders are written again; they are listed at its end."""
        kept = {name: states[-1:] for name, states in self._files.items() if name.split("/")[0] not in folders}
        self._write({name: states for name, states in kept.items() if states[-1] is not None})
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False
        self.settle()

    def check(self, *names: str) -> None:
        """Check files that are about to be read; missing files that are not listed are left to the reader.

        Raises:
            CheckpointError: one is missing, damaged, or was not written by the run.
        """
        for name in names:
            path = self.path(name)
            if name not in self._files and path.exists():
                raise CheckpointError(f"{path} is not a file of this run: its {MANIFEST_FILE} does not list it.")
            self._refuse(list(filter(None, [self._flaw(name)])))

    def check_all(self, but: Iterable[str] = ()) -> None:
        """Check every listed file, ``but`` some.

        Raises:
            CheckpointError: some are missing or damaged; names the first.
        """
        self._refuse([flaw for flaw in self.flaws() if self.name(flaw.path) not in but])

    def flaws(self) -> Iterator[Flaw]:
        """Files that are missing or damaged."""
        yield from filter(None, map(self._flaw, sorted(self._files)))

    def unlisted(self) -> Iterator[Path]:
        """Files in the folder and its caches that are not listed."""
        for path in self._present():
            inside = path.relative_to(self._cache if path.is_relative_to(self._cache) else self.folder)
            hidden = any(part.startswith(".") or part.endswith(".tmp") for part in inside.parts)
            known = path.name in (MANIFEST_FILE, LOCK_FILE) or path.name.startswith(_EVENTS)
            if not hidden and not known and self.name(path) not in self._files:
                yield path

    def _present(self, pattern: str = "*") -> list[Path]:
        """Files in the folder and its caches."""
        folders = {self.folder, self._cache} if self._cache.is_dir() else {self.folder}
        return sorted({path for folder in folders for path in folder.rglob(pattern) if path.is_file()})

    def path(self, name: str) -> Path:
        """Path of a listed file."""
        return self._cache / name.partition("/")[2] if name.startswith(f"{_CACHE}/") else self.folder / name

    def name(self, path: Path) -> str:
        """Name of a file: its path in the run folder, with slashes."""
        if path.is_relative_to(self._cache):
            return f"{_CACHE}/{path.relative_to(self._cache).as_posix()}"
        return path.relative_to(self.folder).as_posix()

    def _found(self, name: str, states: States) -> States:
        """The digest that a file has, if it was being replaced when a process ended."""
        path = self.path(name)
        found = [state for state in states if (not path.exists() if state is None else state.flaw(path) is None)]
        return tuple(found[-1:]) if len(states) > 1 and found else states

    def _flaw(self, name: str) -> Flaw | None:
        path, states = self.path(name), self._files.get(name, (None,))
        if None in states and not path.exists():
            return None
        reasons = [state.flaw(path) for state in states if state is not None]
        if not reasons or None in reasons:
            return None
        return Flaw(path, not path.exists(), str(reasons[-1]))

    def _refuse(self, flaws: list[Flaw]) -> None:
        if flaws:
            more = f", and {len(flaws) - 1} more files are not sound" if len(flaws) > 1 else ""
            raise CheckpointError(
                f"{flaws[0].path} {flaws[0].reason}{more}. Restore it from a copy, or start a new run; "
                f"`snugfit verify {quote(str(self.folder))}` names every such file."
            )

    def _write(self, files: dict[str, States]) -> None:
        entries = {name: _Entry(states) for name, states in files.items()}
        path, draft = self.folder / MANIFEST_FILE, self.folder / f"{MANIFEST_FILE}.tmp"
        with storage_errors(path):
            try:
                with draft.open("wb") as file:
                    content = to_data(_Content(FORMAT, _digest(entries), entries))
                    file.write(json.dumps(content, indent=1).encode() + b"\n")
                    sync_file(file)
                draft.replace(path)
                sync_folder(self.folder)
            finally:
                draft.unlink(missing_ok=True)
        self._files = files


def check_files(folder: Path, *names: str) -> None:
    """Check files of a run folder that are about to be read.

    Raises:
        CheckpointError: one is missing or damaged, or the folder has no manifest.
    """
    Manifest.read(folder).check(*names)


@contextmanager
def listing(folder: Path) -> Iterator[Manifest | None]:
    """Context in which files are added to a finished run, with its manifest; None in a folder of another kind.

    Raises:
        UsageError: another process writes to it.
        CheckpointError: the manifest is damaged.
    """
    if not (Path(folder) / MANIFEST_FILE).exists():
        yield None
        return
    with run_lock(Path(folder)):
        manifest = Manifest.reopen(folder)
        yield manifest
        manifest.settle()


def _is_inside(name: str) -> bool:
    """Whether a name is that of a file in a run folder."""
    parts = PurePosixPath(name).parts
    fits = len(name) < 2048 and all(len(part.encode("utf-8", "surrogatepass")) <= _LONGEST for part in parts)
    return fits and bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


def _digest(entries: Mapping[str, _Entry]) -> str:
    made = Digester()
    made.write(json.dumps(to_data(dict(entries)), sort_keys=True))
    return made.digest().blake2b
