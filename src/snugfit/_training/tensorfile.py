"""Safetensors files written and read one tensor at a time, with a digest, in private memory.

The library's own writer wants row-major tensors (a copy of every ``channels_last`` one) and its reader maps the file.
Here a dense tensor is stored along its memory, its axis order noted in the header's metadata under ``axes``; both ways
hold no more than the tensors themselves, and any safetensors reader can open the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snugfit._core.digests import Digester, FileDigest
from snugfit._core.documents import MOST_BYTES, open_regular, parse_json
from snugfit._training.files import as_bytes, read_exactly, write_exactly
from snugfit.errors import CheckpointError
from snugfit.memory import is_out_of_memory

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Deferred:
    """A tensor that is made only when it is written, of the shape, type and memory layout of ``like``."""

    like: Tensor
    make: Callable[[], Tensor]


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Deferred]) -> FileDigest:
    """Write a safetensors file, sync it to disk, and return its size and digest.

    Tensors may be on any device; those that are neither contiguous nor dense are copied one at a time.
    """
    shown = {name: item.like if isinstance(item, Deferred) else item for name, item in tensors.items()}
    stored = {name: _along_memory(tensor) for name, tensor in shown.items()}
    header = _header(stored)
    digester = Digester()
    digester.write(header)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_exactly(fd, memoryview(header))
        for name, (tensor, _) in stored.items():
            item = tensors[name]
            made = _along_memory(item.make())[0] if isinstance(item, Deferred) else tensor
            data = as_bytes(made.contiguous().cpu())
            digester.write(data)
            write_exactly(fd, data)
        os.fsync(fd)
        return digester.digest()
    finally:
        os.close(fd)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of :func:`write_tensors`: CPU tensors in private memory, in the memory layout that they had.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file.
    """
    try:
        fd = open_regular(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot read {path}: {reason}. Start the run anew.") from error
    try:
        header, start = _read_header(fd, path)
        axes = parse_json(header.pop("__metadata__", {}).get("axes", "{}"))
        return {name: _read_tensor(fd, entry, start, axes.get(name)) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, CheckpointError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path} is damaged ({error}). Resume from another checkpoint, or start anew.") from error
    finally:
        os.close(fd)


def _along_memory(tensor: Tensor) -> tuple[Tensor, list[int] | None]:
    """The tensor with its axes in the order of its memory, and that order; unchanged and None when it is row-major."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor, None
    strides = tensor.stride()
    axes = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    turned = tensor.permute(axes)
    return (turned, axes) if turned.is_contiguous() else (tensor, None)


def _header(stored: Mapping[str, tuple[Tensor, list[int] | None]]) -> bytes:
    axes = {name: order for name, (_, order) in stored.items() if order is not None}
    entries: dict[str, Any] = {"__metadata__": {"axes": json.dumps(axes)}} if axes else {}
    end = 0
    for name, (tensor, _) in stored.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(fd: int, path: Path) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(path.stat().st_size, MOST_BYTES):
        raise ValueError("its header is longer than the file, or than any may be")
    return parse_json(os.pread(fd, length, 8)), 8 + length


def _read_tensor(fd: int, entry: dict[str, Any], start: int, axes: list[int] | None) -> Tensor:
    shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
    first, last = entry["data_offsets"]
    if not 0 <= first <= last <= os.fstat(fd).st_size - start or last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError("sizes in its header disagree with each other or the file")
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        read_exactly(fd, [as_bytes(tensor)], start + first)
    return tensor if axes is None else tensor.permute([axes.index(axis) for axis in range(len(axes))])
