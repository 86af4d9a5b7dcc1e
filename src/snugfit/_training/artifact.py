"""The trained weights of a run, as ``model.safetensors``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from snugfit._chain.store import write_tensors
from snugfit._core.manifest import Manifest

MODEL_FILE = "model.safetensors"


def save_model(folder: Path, state: Mapping[str, Tensor], manifest: Manifest) -> Path:
    """Write a state dict into the run folder, atomically and without a second copy of it in memory.

    Raises:
        OutOfStorageError: the disk is full.
    """
    path = folder / MODEL_FILE
    write_tensors(path, state, manifest)
    return path
