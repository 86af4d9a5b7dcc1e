"""Vectors of numbers and of texts in MATLAB files; nothing else is read.

Read by the published format (MathWorks, "MAT-File Format", level 5), with limits, rather than by scipy: a few changed
bytes make ``scipy.io.loadmat`` end the process.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from snugfit._data.files import check_regular
from snugfit.errors import DataError

_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_ENCODINGS = {1: "ascii", 2: "utf-8", 4: "utf-16", 16: "utf-8", 17: "utf-16"}
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = ("double", "single", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_CLASSES = ("nothing", "cell", "struct", "object", "char", "sparse", *_NUMBERS, "function", "opaque")
_COMPLEX, _LOGICAL = 0x800, 0x200
_HEADER = 128
_LONGEST, _LARGEST = 10**6, 1 << 26


def read_vectors(path: Path, *, numbers: Iterable[str] = (), texts: Iterable[str] = ()) -> dict[str, list[str]]:
    """Read variables of a ``.mat`` file (version 5 to 7); every entry as text, as lists in text files have it.

    ``numbers`` are vectors of real numbers, ``texts`` of cells with one text each. Type and shape of a variable are
    checked before its content is read; objects, structures and functions never are.
    """
    if not path.exists():
        raise DataError(f"{path} is missing. Download it again.")
    check_regular(path)
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"over {_LARGEST:,} bytes")
        found = list(_arrays(path.read_bytes()))
        return {
            **{name: _numbers(_one(found, name, _NUMBERS)) for name in numbers},
            **{name: _texts(_one(found, name, ("cell",))) for name in texts},
        }
    except (ValueError, OverflowError, OSError, struct.error, zlib.error) as error:
        raise DataError(f"{path} is damaged or no list of images ({error}). Download it again.") from error


class _Elements:
    """Elements one after another: each a type, a size, and that many bytes."""

    def __init__(self, content: memoryview, order: str) -> None:
        self._content, self._order = content, order

    def __bool__(self) -> bool:
        return len(self._content) > 0

    def next(self) -> tuple[int, memoryview]:
        """Type and content of the next element."""
        kind, size = struct.unpack_from(f"{self._order}II", self._content)
        start, padded = 8, kind != _COMPRESSED
        if kind >> 16:  # at most four bytes, inside the tag
            kind, size, start = kind & 0xFFFF, kind >> 16, 4
            if size > 4:
                raise ValueError(f"an element of {size} bytes in 4")
        if start + size > len(self._content):
            raise ValueError("it breaks off")
        found = self._content[start : start + size]
        taken = 8 if start == 4 else start + size + (-size % 8 if padded else 0)
        self._content = self._content[taken:]
        return kind, found

    def array(self) -> _Array:
        """The next element, which is an array."""
        kind, content = self.next()
        if kind != _MATRIX:
            raise ValueError(f"an element of type {kind} instead of an array")
        return _Array.of(_Elements(content, self._order), self._order)


@dataclass(frozen=True)
class _Array:
    """An array, its content unread."""

    name: str
    kind: str
    shape: tuple[int, ...]
    complex: bool
    content: _Elements
    order: str

    @classmethod
    def of(cls, elements: _Elements, order: str) -> _Array:
        if not elements:
            return cls("", "nothing", (0, 0), False, elements, order)
        flags = struct.unpack_from(f"{order}I", elements.next()[1])[0]
        extents = elements.next()[1]
        shape = struct.unpack(f"{order}{len(extents) // 4}i", extents)
        name = bytes(elements.next()[1]).decode("ascii")
        number = flags & 0xFF
        kind = "logical" if flags & _LOGICAL else (*_CLASSES, "unknown")[min(number, len(_CLASSES))]
        return cls(name, kind, shape, bool(flags & _COMPLEX), elements, order)


def _arrays(content: bytes) -> Iterator[_Array]:
    """The variables of a file."""
    order = {b"IM": "<", b"MI": ">"}.get(content[_HEADER - 2 : _HEADER])
    if order is None or struct.unpack_from(f"{order}H", content, _HEADER - 4)[0] != 0x100:
        raise ValueError("no MATLAB file of version 5 to 7")
    elements, left = _Elements(memoryview(content)[_HEADER:], order), _LARGEST
    while elements:
        kind, found = elements.next()
        if kind == _COMPRESSED:
            unpacked = zlib.decompressobj().decompress(found, left + 1)
            if (left := left - len(unpacked)) < 0:
                raise ValueError(f"it unpacks to over {_LARGEST:,} bytes")
            yield _Elements(memoryview(unpacked), order).array()
        elif kind == _MATRIX:
            yield _Array.of(_Elements(found, order), order)
        else:
            raise ValueError(f"a variable of type {kind}")


def _one(found: list[_Array], name: str, kinds: Sequence[str]) -> _Array:
    """The variable of a name; it must be a vector of the type that is wanted."""
    same = [array for array in found if array.name == name]
    if len(same) != 1:
        raise ValueError(f"it has {len(same)} variables '{name}'")
    (array,) = same
    if array.kind not in kinds:
        raise ValueError(f"'{name}' is of type {array.kind}")
    if array.complex:
        raise ValueError(f"'{name}' holds no real numbers")
    if len(array.shape) != 2 or min(array.shape) != 1 or max(array.shape) > _LONGEST:
        raise ValueError(f"'{name}' is not a list but of shape {array.shape}")
    return array


def _numbers(array: _Array) -> list[str]:
    stored, content = array.content.next()
    if stored not in _STORED:
        raise ValueError(f"'{array.name}' is stored as type {stored}")
    values = np.frombuffer(content, dtype=array.order + _STORED[stored])
    if len(values) != math.prod(array.shape):
        raise ValueError(f"'{array.name}' has {len(values)} numbers instead of {math.prod(array.shape)}")
    return [f"{value:.10g}" for value in values.tolist()]


def _texts(array: _Array) -> list[str]:
    found = [_text(array.content.array()) for _ in range(math.prod(array.shape))]
    if array.content:
        raise ValueError(f"'{array.name}' has more than {len(found)} texts")
    return found


def _text(cell: _Array) -> str:
    if cell.kind != "char" or len(cell.shape) != 2 or cell.shape[0] != 1:
        raise ValueError(f"a cell of type {cell.kind} and shape {cell.shape} instead of one text")
    stored, content = cell.content.next()
    if stored not in _ENCODINGS:
        raise ValueError(f"a text is stored as type {stored}")
    encoding = _ENCODINGS[stored] + ("" if stored not in (4, 17) else "-le" if cell.order == "<" else "-be")
    text = bytes(content).decode(encoding)
    if len(text) != cell.shape[1]:
        raise ValueError(f"a text of {len(text)} characters instead of {cell.shape[1]}")
    return text
