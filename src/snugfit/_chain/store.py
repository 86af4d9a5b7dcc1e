"""Weights of units on disk, one safetensors file each.

Files are written here tensor by tensor, since ``safetensors.torch.save_file`` wants every tensor contiguous at once,
which would double a channels_last unit. They are read with safetensors' ``pread`` backend, into private memory; or
mapped, read-only, which the library's own mapping is not: a writable private one counts to ``RLIMIT_DATA``.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from snugfit._chain.unit import Unit
from snugfit._core.digests import Digester, sync_file, sync_folder
from snugfit._core.documents import MOST_BYTES, check_regular, open_regular, parse_json
from snugfit._core.manifest import Manifest
from snugfit.errors import CheckpointError, OutOfStorageError, is_out_of_storage

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}


class UnitStore:
    """One file per unit in a folder, such as ``unit_003_features.10.safetensors``.

    Args:
        folder: made if missing.
        manifest: lists what is written, where the folder belongs to a run.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder, self._manifest = Path(folder), manifest
        self.folder.mkdir(parents=True, exist_ok=True)

    def has(self, index: int) -> bool:
        """Whether weights of the ``index``-th unit are stored."""
        return self._find(index) is not None

    def save(self, index: int, unit_or_state: Unit | Mapping[str, torch.Tensor]) -> Path:
        """Write a unit's weights, replacing older ones only once all is on disk; returns the file.

        At most one tensor is copied at a time.

        Raises:
            OutOfStorageError: the disk is full; what was stored before is intact.
            CheckpointError: the weights are not in memory, or the file cannot be written.
        """
        if isinstance(unit_or_state, Unit):
            name, state = unit_or_state.name, dict(unit_or_state.module.state_dict())
        else:
            name, state = "", dict(unit_or_state)
        suffix = f"_{re.sub(r'[^A-Za-z0-9._-]', '_', name)}" if name else ""
        path = self._find(index) or self.folder / f"unit_{index:03d}{suffix}.safetensors"
        write_tensors(path, state, self._manifest)
        return path

    def load(self, index: int) -> dict[str, torch.Tensor]:
        """Read a unit's weights into private memory, in one pass over the file.

        Raises:
            CheckpointError: nothing is stored, or the file is truncated or corrupt.
        """
        path = self.path(index)
        with _damaged(path):
            check_regular(path)
            with safe_open(path, framework="pt", device="cpu", backend="pread") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def map(self, index: int) -> dict[str, torch.Tensor]:
        """A unit's weights as read-only maps of the file, which the system may drop: no private memory at all.

        For forward passes only; writing to such a tensor ends the process.

        Raises:
            CheckpointError: nothing is stored, or the file is truncated or corrupt.
        """
        path = self.path(index)
        with _damaged(path):
            return _map_tensors(path)

    def path(self, index: int) -> Path:
        """The file of a unit's weights.

        Raises:
            CheckpointError: nothing is stored.
        """
        path = self._find(index)
        if path is None:
            raise CheckpointError(f"no weights of unit {index} in {self.folder}; the run folder is incomplete.")
        return path

    def _find(self, index: int) -> Path | None:
        pattern = re.compile(rf"unit_{index:03d}(_.*)?\.safetensors")
        return next((path for path in sorted(self.folder.iterdir()) if pattern.fullmatch(path.name)), None)


@contextlib.contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it and restore or retrain the unit.") from error


def _map_tensors(path: Path) -> dict[str, torch.Tensor]:
    with os.fdopen(open_regular(path), "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(mapped[:8], "little")
    if start > MOST_BYTES:
        raise ValueError("its header is longer than any may be")
    header = parse_json(mapped[8:start])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return {name: _mapped_tensor(mapped, entry, start) for name, entry in header.items() if name != "__metadata__"}


def _mapped_tensor(mapped: mmap.mmap, entry: Mapping[str, Any], start: int) -> torch.Tensor:
    dtype, (first, last) = _TYPES[entry["dtype"]], entry["data_offsets"]
    count = math.prod(entry["shape"])
    if last - first != count * dtype.itemsize or min([first, *entry["shape"]]) < 0:
        raise ValueError("sizes in its header disagree")
    if not count:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + first).reshape(entry["shape"])


def write_tensors(path: Path, state: Mapping[str, torch.Tensor], manifest: Manifest | None = None) -> None:
    """Write tensors as safetensors, atomically and durably: temporary file, fsync, rename, fsync of the folder.

    They are asked for one after another, so that a mapping may make them as it is asked.

    Args:
        path: the file.
        state: tensors by name.
        manifest: lists the file, in a run folder.

    Raises:
        OutOfStorageError: the disk is full; an older file is intact.
        CheckpointError: a tensor is on the meta device, or the file cannot be written.
    """
    released = next((name for name, tensor in state.items() if tensor.is_meta), None)
    if released is not None:
        raise CheckpointError(f"cannot write {path.name}: {released} is not in memory; load the unit before saving it.")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            written = Digester(file)
            _write(written, state)
            sync_file(file)
        if manifest is not None:
            manifest.commit(temporary, path, written.digest())
        else:
            temporary.replace(path)
            sync_folder(path.parent)
    except OSError as error:
        if is_out_of_storage(error):
            raise OutOfStorageError(
                f"no space left for {path.name} in {path.parent}; free some or choose another folder."
            ) from error
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def load_into(unit: Unit, state: Mapping[str, torch.Tensor]) -> None:
    """Give a unit its weights: a released unit takes the tensors themselves, one in memory copies them.

    A released unit gets new ``Parameter`` objects, so optimizers are made afterwards.

    Raises:
        CheckpointError: names or shapes are not the unit's.
    """
    own = unit.module.state_dict()
    _check_matches(unit.name, own, state)
    assign = any(tensor.is_meta for tensor in own.values())
    unit.module.load_state_dict(
        {name: tensor.to(own[name].dtype) for name, tensor in state.items()}, strict=True, assign=assign
    )


def release(unit: Unit) -> None:
    """Free a unit's weights: parameters and stored buffers become meta tensors. Gradients go too."""
    replace_stored(unit, lambda tensor: torch.empty_like(tensor, device="meta"))


def replace_stored(unit: Unit, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every tensor of a unit's state dict by ``make(tensor)``; parameters stay parameters."""
    for name, tensor in unit.module.state_dict(keep_vars=True).items():
        owner, _, attribute = name.rpartition(".")
        value = make(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        setattr(unit.module.get_submodule(owner), attribute, value)


def _check_matches(unit: str, own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in own.items():
        if name not in state:
            raise CheckpointError(f"unit {unit}: the stored weights lack {name}; they belong to another model.")
        if state[name].shape != tensor.shape:
            shapes = f"{tuple(state[name].shape)}, not {tuple(tensor.shape)}"
            raise CheckpointError(f"unit {unit}: stored {name} has shape {shapes}; it belongs to another model.")
    extra = next((name for name in state if name not in own), None)
    if extra is not None:
        raise CheckpointError(f"unit {unit} has no {extra}; the stored weights belong to another model.")


def _write(file: Digester, state: Mapping[str, torch.Tensor]) -> None:
    """The safetensors layout: header length, JSON header padded to 8 bytes, then the tensors back to back."""
    facts = {name: (tensor.dtype, list(tensor.shape), tensor.nbytes) for name, tensor in state.items()}
    ordered = sorted(facts, key=lambda name: (-facts[name][0].itemsize, name))
    header, offset = {}, 0
    for name in ordered:
        dtype, shape, size = facts[name]
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        file.write(_raw(state[name]))


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
