"""Training positions on disk, from which a run that was killed at any moment continues exactly."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from snugfit._core.documents import read_data
from snugfit._core.serial import to_data
from snugfit._storage.digests import FileDigest, sync_folder
from snugfit._storage.files import write_json_atomic
from snugfit._storage.manifest import Manifest
from snugfit._storage.tensor_file import Deferred, read_tensors, write_tensors
from snugfit._storage.write_errors import storage_errors
from snugfit.errors import CheckpointError

FORMAT = 1
"""Version of the layout on disk."""

_POSITION = "position.json"


@dataclass(frozen=True)
class Checkpoint:
    """One complete saved position: JSON data, and groups of tensors."""

    folder: Path
    position: dict[str, Any]
    groups: tuple[str, ...]

    def load(self, group: str, prefix: str = "") -> dict[str, Tensor]:
        """Read one group's tensors, in their shapes, onto the CPU, in private memory; or those of a ``prefix``.

        Raises:
            CheckpointError: there is no such group, or its file is truncated.
        """
        if group not in self.groups:
            raise CheckpointError(f"{self.folder} has no tensors '{group}', only {', '.join(self.groups)}.")
        advice = "Resume from another checkpoint, or start again."
        return read_tensors(self.folder / f"{group}.safetensors", advice, prefix)


@dataclass(frozen=True)
class _Description:
    """What ``position.json`` holds."""

    format: int
    files: dict[str, FileDigest]
    position: dict[str, Any]


class CheckpointStore:
    """Keeps the newest checkpoint of a run in ``folder/NNNNNN``.

    A checkpoint is written under a temporary name, synced to disk and renamed; then the previous one is deleted. So a
    complete one exists at every moment, once the first is written.
    """

    def __init__(self, folder: Path | str, manifest: Manifest | None = None) -> None:
        self.folder, self._manifest = Path(folder), manifest

    def save(
        self,
        tensors: Mapping[str, Mapping[str, Tensor | Deferred]],
        position: dict[str, Any],
        others: Mapping[Path, FileDigest | None] = MappingProxyType({}),
    ) -> Path:
        """Save tensors of any shape, by group and name, and a JSON-able position; returns the new checkpoint's folder.

        The manifest lists ``others`` with the checkpoint's: digests of other files at this moment, or None for files
        that are about to be removed.

        Raises:
            OutOfStorageError: the disk is full; the previous checkpoint stays.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        older = self._numbered()
        final = self.folder / f"{int(older[-1].name) + 1 if older else 0:06d}"
        draft = final.with_name(final.name + ".tmp")
        for unfinished in self.folder.glob("*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with storage_errors(draft):
                files = _write(draft, tensors, position)
                if self._manifest is not None:
                    gone = {path: None for folder in older for path in folder.iterdir()}
                    new = {final / name: digest for name, digest in files.items()}
                    self._manifest.announce({**gone, **new, **others})
                draft.rename(final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        sync_folder(self.folder)
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None if none was ever completed.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        failures: list[CheckpointError] = []
        for folder in reversed(self._numbered()):
            try:
                return _open(folder)
            except CheckpointError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return None

    def _numbered(self) -> list[Path]:
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((f for f in folders if f.name.isdecimal()), key=lambda f: int(f.name))


def _write(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor | Deferred]], position: dict[str, Any]
) -> dict[str, FileDigest]:
    """Write a checkpoint's files, with tensors of any shape; returns the digest of each file by its name."""
    folder.mkdir()
    groups = {
        group: write_tensors(folder / f"{group}.safetensors", members, along_memory=True)
        for group, members in tensors.items()
    }
    described = write_json_atomic(folder / _POSITION, to_data(_Description(FORMAT, groups, position)))
    return {_POSITION: described, **{f"{group}.safetensors": digest for group, digest in groups.items()}}


def _open(folder: Path) -> Checkpoint:
    """Check the size and digest of every file of a checkpoint."""
    described = read_data(_Description, folder / _POSITION, CheckpointError, "Start the run again.")
    if described.format != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {described.format}, this version reads {FORMAT}. "
            "Resume with the version of snugfit that wrote it."
        )
    for group, expected in described.files.items():
        path = folder / f"{group}.safetensors"
        if flaw := expected.flaw(path):
            raise CheckpointError(f"{path} {flaw}. Start the run again.")
    return Checkpoint(folder, described.position, tuple(described.files))
