"""Files of weights: those that training starts from, and those of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from snugfit._storage.manifest import Manifest
from snugfit._storage.tensor_file import describe_tensors, map_tensors, write_tensors
from snugfit.errors import CheckpointError

MODEL_FILE = "model.safetensors"
_WRAPPERS = ("state_dict", "model")
"""Keys below which training scripts save weights."""


def save_model(folder: Path, state: Mapping[str, Tensor], manifest: Manifest) -> Path:
    """Write a run's trained weights, a state dict, in their shapes, atomically and without a second copy in memory.

    Raises:
        OutOfStorageError: the disk is full.
    """
    path = folder / MODEL_FILE
    write_tensors(path, state, manifest)
    return path


def read_weights(path: Path, device: str = "cpu") -> Mapping[str, Tensor]:
    """Read a state dict from safetensors or a weights-only ``.pth``; pickled code is never run.

    Args:
        path: the file.
        device: ``cpu``, for tensors that must not be written to, or ``meta``, for names and shapes alone.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than weights.
    """
    if not path.exists():
        raise CheckpointError(f"there is no weights file {path}.")
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file, and is not read; give a file of weights.")
    if path.suffix == ".safetensors":
        return (describe_tensors if device == "meta" else map_tensors)(path, "Give another file of weights.")
    return _state_in(path, _read_pth(path, device))


def _read_pth(path: Path, device: str) -> object:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} is damaged or not a weights file ({reason}).") from error
    except Exception as error:  # torch.load raises pickle errors of its own kind for anything but weights
        raise CheckpointError(f"{path} holds more than weights, and is not read: convert it to safetensors.") from error


def _state_in(path: Path, content: object) -> Mapping[str, Tensor]:
    """The weights by name, in their shapes, of a ``.pth`` with or without a wrapper."""
    for key in _WRAPPERS:
        if isinstance(content, dict) and (key == "state_dict" or isinstance(content.get(key), dict)):
            content = content.get(key, content)
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{path} does not hold weights by name; save module.state_dict() instead.")
    return content
