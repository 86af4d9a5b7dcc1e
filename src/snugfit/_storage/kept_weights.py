"""Weights of the best epoch so far, in a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from snugfit._storage.manifest import Manifest
from snugfit._storage.tensor_file import Deferred, map_tensors, write_tensors


class KeptWeights:
    """One file per epoch, such as ``best/epoch_0003.safetensors``, listed in a manifest.

    A better epoch's file is written before its checkpoint, and the former one removed after it. So the file that the
    newest checkpoint refers to exists at every moment.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self._manifest = folder, manifest

    def save(self, epoch: int, weights: Mapping[str, Tensor | Deferred]) -> None:
        """Store the weights, of any shapes, of an epoch, without a copy in memory.

        Raises:
            OutOfStorageError: the disk is full.
        """
        self.folder.mkdir(exist_ok=True)
        aligned = dict(sorted(weights.items(), key=lambda item: -_type(item[1]).itemsize))
        write_tensors(self._path(epoch), aligned, self._manifest, along_memory=True)

    def map(self, epoch: int) -> dict[str, Tensor]:
        """Map an epoch's weights, in their shapes, read-only; this takes no private memory.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return map_tensors(self._path(epoch), "Start the run again.")

    def others(self, epoch: int | None) -> list[Path]:
        """The files of other epochs than this."""
        kept = None if epoch is None else self._path(epoch)
        return [path for path in sorted(self.folder.glob("*.safetensors")) if path != kept]

    def remove_all(self) -> None:
        """Remove all files; a finished run has its weights elsewhere."""
        self._manifest.remove(self.others(None))
        if self.folder.exists():
            self.folder.rmdir()

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch_{epoch:04d}.safetensors"


def _type(item: Tensor | Deferred) -> torch.dtype:
    return (item.like if isinstance(item, Deferred) else item).dtype
