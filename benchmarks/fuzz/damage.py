"""Damage to a tree of files, determined by a random generator: bytes, tokens, values of JSON, and files as such."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_INTEGERS = (0, 1, -1, 2, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, -(2**31))
_TOKENS = (
    "nan", "NaN", "inf", "-Infinity", "1e400", "-1", "0", "3000000000", "99999999999999999999999", "1.5", "true",
    "null", "[]", "{}", '""', "'", '"', "../../x", "/etc/hostname", "\x00", "\ud7ff", "💥", "~nobody/x", "*a",
    "&a [*a, *a]", "!!python/name:os.system", "- ", ": ", "\t", "\n", "#", "%", "\\ud800", "x" * 5000, "[" * 3000,
    '{"a":' * 3000, "1" * 5000,
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", "../../x", "\x00",
    "\ud800", "9" * 400, [], {}, [[]], [None], {"": {}}, [1] * 300, "nan", "1e400",
)  # fmt: skip
_TEXTS = frozenset({".json", ".yaml", ".yml", ".csv", ".txt", ".jsonl", ""})
_LARGEST = 1 << 20
_WORD = re.compile(r"[^\s,:\[\]{}\"']+")


def damage(root: Path, rng: random.Random) -> None:
    """Damage one or a few of the files below ``root``."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        files = _files(root)
        if not files:
            return
        suffix = rng.choice(sorted({path.suffix for path in files}))  # rare kinds as often as images
        path = rng.choice([path for path in files if path.suffix == suffix])
        if rng.random() < 0.08:
            rng.choice(_FILES)(path, rng, root)
        else:
            path.write_bytes(_damaged(path.read_bytes(), path.suffix, rng))


def _files(root: Path) -> list[Path]:
    """The regular files, but for those that damage has made huge."""
    found = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in found if path.stat().st_size <= _LARGEST)


def _damaged(data: bytes, suffix: str, rng: random.Random) -> bytes:
    if suffix == ".json" and rng.random() < 0.5:
        found = _other_value(data, rng)
        if found is not None:
            return found
    ways = _BYTES + _WORDS * 2 if suffix in _TEXTS else _BYTES
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        data = rng.choice(ways)(data, rng)[:_LARGEST]
    return data


def _other_value(data: bytes, rng: random.Random) -> bytes | None:
    """JSON with a value replaced, a key lost, or a list repeated; None for what is no JSON."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    places: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        value = waiting.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(value, key) for key in keys]
        waiting += [value[key] for key in keys]
    if not places:
        return json.dumps(rng.choice(_VALUES)).encode()
    for _ in range(rng.choice((1, 1, 3))):
        holder, key = rng.choice(places)
        if isinstance(holder, dict) and rng.random() < 0.15:
            holder.pop(key, None)
        elif rng.random() < 0.15:
            other, place = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[place])) if _holds(other, place) else None
        elif _holds(holder, key):
            holder[key] = rng.choice(_VALUES)
    return json.dumps(content).encode()


def _holds(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _flip(data: bytes, rng: random.Random) -> bytes:
    return _replaced(data, rng, lambda old: bytes([old[0] ^ 1 << rng.randrange(8)]) if old else b"", 1)


def _byte(data: bytes, rng: random.Random) -> bytes:
    return _replaced(data, rng, lambda old: bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))]), 1)


def _integer(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice((2, 4, 8))
    value = rng.choice(_INTEGERS) % (1 << 8 * size)
    return _replaced(data, rng, lambda old: value.to_bytes(size, rng.choice(("little", "big"))), size)


def _float(data: bytes, rng: random.Random) -> bytes:
    value = rng.choice((float("nan"), float("inf"), -1e38, 1e-45))
    return _replaced(data, rng, lambda old: struct.pack("<f", value), 4)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return _replaced(data, rng, lambda old: b"", rng.choice((1, 4, 64, 1024)))


def _end(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _noise(data: bytes, rng: random.Random) -> bytes:
    return _replaced(data, rng, lambda old: rng.randbytes(rng.choice((1, 4, 64))), 0)


def _repeat(data: bytes, rng: random.Random) -> bytes:
    return _replaced(data, rng, lambda old: old * rng.choice((2, 8, 200)), rng.choice((1, 8, 100)))


def _swap(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[start:] + data[:start]


def _replaced(data: bytes, rng: random.Random, make: Callable[[bytes], bytes], size: int) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + make(data[start : start + size]) + data[start + size :]


def _word(data: bytes, rng: random.Random) -> bytes:
    """Another word in place of one, or beside it."""
    text = data.decode("utf-8", "surrogateescape")
    words = list(_WORD.finditer(text))
    if not words:
        return data
    found, token = rng.choice(words), rng.choice(_TOKENS)
    kept = found.group() if rng.random() < 0.2 else ""
    return (text[: found.start()] + kept + token + text[found.end() :]).encode("utf-8", "surrogateescape")


def _line(data: bytes, rng: random.Random) -> bytes:
    """A line lost, repeated or moved."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    line = lines.pop(rng.randrange(len(lines)))
    for _ in range(rng.choice((0, 1, 2, 50))):
        lines.insert(rng.randrange(len(lines) + 1), line)
    return b"".join(lines)


def _remove(path: Path, rng: random.Random, root: Path) -> None:
    path.unlink()


def _empty(path: Path, rng: random.Random, root: Path) -> None:
    path.write_bytes(b"")


def _fifo(path: Path, rng: random.Random, root: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, rng: random.Random, root: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, rng: random.Random, root: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice((".", "..", "nowhere", path.name, "/dev/null", str(root))))


def _link_beside(path: Path, rng: random.Random, root: Path) -> None:
    beside = path.with_name(f"link{rng.choice(('', path.suffix))}")
    if not beside.is_symlink():
        beside.symlink_to(rng.choice((".", "..", path.name, str(root))))


def _huge(path: Path, rng: random.Random, root: Path) -> None:
    os.truncate(path, rng.choice((1 << 20, 1 << 33, 1 << 40)))


def _rename(path: Path, rng: random.Random, root: Path) -> None:
    target = rng.choice((path, path.parent)) if path.parent != root else path
    name = rng.choice((b"\xff\xfe", b"a\nb", "\u202e猫".encode(), b"-", b"x" * 200))
    if not (beside := target.with_name(os.fsdecode(name) + path.suffix)).exists():
        target.rename(beside)


def _copy(path: Path, rng: random.Random, root: Path) -> None:
    """The content of another file."""
    other = rng.choice(_files(root))
    if other != path:
        shutil.copy(other, path)


_BYTES = [_flip, _byte, _integer, _float, _cut, _end, _noise, _repeat, _swap]
_WORDS = [_word, _word, _line]
_FILES = [_remove, _empty, _fifo, _folder, _link, _link_beside, _huge, _rename, _copy]
