"""Files of weights: safetensors, or a ``.pth`` that holds nothing but weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from snugfit.errors import CheckpointError


def read_weights(path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Read a state dict from safetensors or a weights-only ``.pth``; pickled code is never run.

    On the ``meta`` device names and shapes alone are read.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than weights.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no regular file, and is not read; give a file of weights.")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path, device)
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no weights file {path}.") from error
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} is damaged or not a weights file ({reason}).") from error
    except Exception as error:  # torch.load raises pickle errors of its own kind for anything but weights
        raise CheckpointError(f"{path} holds more than weights, and is not read: convert it to safetensors.") from error
    for key in ("state_dict", "model"):  # what training scripts wrap weights in
        if isinstance(state, dict) and (key == "state_dict" or isinstance(state.get(key), dict)):
            state = state.get(key, state)
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path} does not hold weights by name; save module.state_dict() instead.")
    return dict(state)


def _read_safetensors(path: Path, device: str) -> dict[str, torch.Tensor]:
    if device != "meta":
        return dict(load_file(path))
    with safe_open(path, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
