"""Safetensors files, written and read one tensor at a time: with a digest, atomically, and without unpickling.

The library's writer needs all tensors row-major at once, which copies every ``channels_last`` network. Its reader maps
the file writable, and such a mapping counts to ``RLIMIT_DATA``. Here neither holds more than the tensors themselves.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snugfit._core.documents import MAX_BYTES, open_regular, parse_json
from snugfit._core.paths import require_weights
from snugfit._storage.digests import FileDigest
from snugfit._storage.files import read_exactly, replacing
from snugfit._storage.manifest import Manifest
from snugfit.errors import CheckpointError, first_line, is_out_of_memory

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_ELEMENTS = 2**60
COPIED_BYTES = 1 << 20
"""Most bytes that are copied at once of a tensor that is written in another order than that of memory."""
MODEL_FILE = "model.safetensors"
_WRAPPERS = ("state_dict", "model")
"""Keys below which training scripts save weights."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Deferred:
    """A tensor that is made only when it is written, of the shape, type and memory layout of ``like``."""

    like: Tensor
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class _Entry:
    """A tensor as a header lists it; ``axes`` is the order in which it is stored, None if that is row-major."""

    dtype: torch.dtype
    shape: list[int]
    first: int
    last: int
    axes: list[int] | None = None


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | Deferred],
    manifest: Manifest | None = None,
    *,
    along_memory: bool = False,
) -> FileDigest:
    """Write a safetensors file, replacing an older one only once all is on disk.

    Tensors may be of any shape, and on any device. Each is looked up when it is written, and at most one is made or
    moved at a time; those in another order in memory are copied in pieces of :data:`COPIED_BYTES`.

    With ``along_memory``, dense tensors are stored in the order of their memory, without a copy, and the order of their
    axes is noted in the header's metadata under ``axes``, which other readers ignore. Otherwise all are row-major. In a
    run folder, the manifest lists the file.

    Raises:
        OutOfStorageError: the disk is full; an older file is intact.
        CheckpointError: a tensor is on the meta device, or the file cannot be written.
    """
    for name, item in tensors.items():
        if not isinstance(item, Deferred) and item.is_meta:
            raise CheckpointError(f"cannot write {path.name}: {name} is not in memory; load it before saving it.")
    entries = _entries(tensors, along_memory)
    with replacing(path, manifest) as file:
        file.write(_header(entries, compact=not along_memory))
        for name, entry in entries.items():
            for piece in _pieces(tensors[name], entry):
                file.write(piece)
    return file.digest()


def read_tensors(path: Path, advice: str = "Restore it.", prefix: str = "") -> dict[str, Tensor]:
    """Read tensors into private memory on the CPU, in the shapes and memory layout that :func:`write_tensors` got.

    With a ``prefix``, those whose names begin with it.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file.
    """
    with _opened(path, advice) as fd:
        entries = {name: each for name, each in _read_entries(fd).items() if name.startswith(prefix)}
        return {name: _restored(_read(fd, each), each.axes) for name, each in entries.items()}


def map_tensors(path: Path, advice: str = "Restore it.") -> dict[str, Tensor]:
    """Map tensors read-only, in their shapes: the system may drop the pages, and no private memory is used.

    For reading only: writing to such a tensor ends the process. Raises as :func:`read_tensors` does.
    """
    with _opened(path, advice) as fd, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        entries = _read_entries(fd)
        mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        return {name: _restored(_mapped(mapped, each), each.axes) for name, each in entries.items()}


def describe_tensors(path: Path, advice: str = "Restore it.") -> dict[str, Tensor]:
    """Names, shapes and types in a safetensors file, as tensors on the meta device; raises as :func:`read_tensors`."""
    with _opened(path, advice) as fd:
        return {
            name: _restored(torch.empty(each.shape, dtype=each.dtype, device="meta"), each.axes)
            for name, each in _read_entries(fd).items()
        }


def as_bytes(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor of any dtype and shape as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _entries(tensors: Mapping[str, Tensor | Deferred], along_memory: bool) -> dict[str, _Entry]:
    """The entry of each tensor, of any shape: in the given order, or large elements first, so that all are aligned."""
    lengths = {name: _entry_of(item, along_memory) for name, item in tensors.items()}
    ordered = lengths if along_memory else sorted(lengths, key=lambda name: (-lengths[name].dtype.itemsize, name))
    entries, end = {}, 0
    for name in ordered:
        first, end = end, end + lengths[name].last
        entries[name] = replace(lengths[name], first=first, last=end)
    return entries


def _entry_of(item: Tensor | Deferred, along_memory: bool) -> _Entry:
    tensor = item.like if isinstance(item, Deferred) else item
    axes = _axes(tensor) if along_memory else None
    shape = list(tensor.shape) if axes is None else [tensor.shape[axis] for axis in axes]
    return _Entry(tensor.dtype, shape, 0, tensor.nbytes, axes)


def _pieces(item: Tensor | Deferred, entry: _Entry) -> Iterator[memoryview]:
    """The bytes of a tensor of any shape, copied a piece at a time if they are not stored in the order of memory."""
    tensor = (item.make() if isinstance(item, Deferred) else item).detach().cpu()
    tensor = tensor if entry.axes is None else tensor.permute(entry.axes)
    rows = 1 if tensor.is_contiguous() else -(-tensor.nbytes // COPIED_BYTES)
    for piece in tensor.chunk(rows) if rows > 1 else (tensor,):
        yield as_bytes(piece.contiguous())


def _axes(tensor: Tensor) -> list[int] | None:
    """The axes of a dense tensor of any shape in the order of its memory; None if it is row-major, or not dense."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    axes = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    return axes if tensor.permute(axes).is_contiguous() else None


def _header(entries: Mapping[str, _Entry], compact: bool) -> bytes:
    """The length of the header, and the header as JSON, padded to 8 bytes."""
    axes = {name: entry.axes for name, entry in entries.items() if entry.axes is not None}
    data: dict[str, Any] = {"__metadata__": {"axes": json.dumps(axes)}} if axes else {}
    for name, entry in entries.items():
        offsets = [entry.first, entry.last]
        data[name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(data, separators=(",", ":") if compact else None).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _opened(path: Path, advice: str) -> Iterator[int]:
    """The descriptor of a file; errors while it is read name the file."""
    try:
        fd = open_regular(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}. {advice}") from error
    try:
        yield fd
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise
        raise CheckpointError(f"{path} is damaged ({error}). {advice}") from error
    finally:
        os.close(fd)


def _read_entries(fd: int) -> dict[str, _Entry]:
    """What a header lists, with positions in the file; many kinds of errors if it does not describe this file."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(size, MAX_BYTES):
        raise ValueError("its header is longer than the file, or than any may be")
    header = parse_json(os.pread(fd, length, 8))
    axes = parse_json(header.pop("__metadata__", {}).get("axes", "{}"))
    entries = {name: _entry(given, 8 + length, axes.get(name)) for name, given in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda each: (each.first, each.last)):
        if entry.first != end:
            raise ValueError("its tensors overlap, or leave bytes out")
        end = entry.last
    if end != size:
        raise ValueError("sizes in its header disagree with the file")
    return entries


def _entry(given: Mapping[str, Any], start: int, axes: list[int] | None) -> _Entry:
    shape, dtype, (first, last) = given["shape"], _DTYPES[given["dtype"]], given["data_offsets"]
    spread = math.prod(max(length, 1) for length in shape)
    if min([first, *shape]) < 0 or last - first != math.prod(shape) * dtype.itemsize or spread >= _MOST_ELEMENTS:
        raise ValueError("sizes in its header disagree with each other")
    if axes is not None and sorted(axes) != list(range(len(shape))):
        raise ValueError("its order of axes is none")
    return _Entry(dtype, shape, start + first, start + last, axes)


def _read(fd: int, entry: _Entry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if tensor.numel():
        read_exactly(fd, [as_bytes(tensor)], entry.first)
    return tensor


def _mapped(mapped: mmap.mmap, entry: _Entry) -> Tensor:
    count = math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(mapped, dtype=entry.dtype, count=count, offset=entry.first).reshape(entry.shape)


def _restored(tensor: Tensor, axes: list[int] | None) -> Tensor:
    """A tensor in its original shape, from the order of axes in which it is stored."""
    return tensor if axes is None else tensor.permute([axes.index(axis) for axis in range(len(axes))])


def save_model(folder: Path, state: Mapping[str, Tensor | Deferred], manifest: Manifest) -> Path:
    """Write a run's trained weights, a state dict, in their shapes, atomically and without a second copy in memory.

    Raises:
        OutOfStorageError: the disk is full.
    """
    path = folder / MODEL_FILE
    write_tensors(path, state, manifest)
    return path


def read_weights(path: Path, device: str = "cpu") -> Mapping[str, Tensor]:
    """Read a state dict from safetensors or a weights-only ``.pth``; pickled code is never run.

    On the device ``cpu`` the tensors must not be written to; on ``meta`` there are names and shapes alone.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than weights.
    """
    require_weights(path)
    if path.suffix == ".safetensors":
        return (describe_tensors if device == "meta" else map_tensors)(path, "Give another file of weights.")
    return _state_in(path, _read_pth(path, device))


def _read_pth(path: Path, device: str) -> object:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path} is damaged or not a weights file ({first_line(error)}).") from error
    except MemoryError:
        raise
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
