"""What this machine, and the control groups of this process, have for a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snugfit._quantities import format_bytes

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 2**60
"""Version 1 writes a number close to 2^63 where there is no limit."""


@dataclass(frozen=True)
class MachineMemory:
    """Memory for one run, in bytes: what other processes do not use. Files that the kernel can drop do not count.

    Attributes:
        ram_bytes: of the machine.
        group_bytes: of the control group that leaves least; None if none has a limit.
        size_bytes: of the one that leaves less, other processes included.
    """

    ram_bytes: int
    group_bytes: int | None = None
    size_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """The smaller of the two."""
        return self.ram_bytes if self.group_bytes is None else min(self.ram_bytes, self.group_bytes)

    def __str__(self) -> str:
        where = "this machine" if self.free_bytes == self.ram_bytes else "its control group"
        others = format_bytes(max(self.size_bytes - self.free_bytes, 0))
        return f"of the {format_bytes(self.size_bytes)} of {where}, other processes use {others}"


@dataclass(frozen=True)
class MemoryGroup:
    """The files of a memory control group, of version 1 or 2."""

    folder: Path
    version: int

    def free_bytes(self, own_bytes: int) -> tuple[int, int] | None:
        """Its limit minus what other processes use, and its limit; ``own_bytes`` are those of the caller.

        None without a limit.
        """
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        limits = [limit for name in names if (limit := _number(self.folder / name)) is not None]
        used = _number(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if used is None or min(limits, default=_UNLIMITED) >= _UNLIMITED:
            return None
        found, prefix = counts(self.folder / "memory.stat"), "" if self.version == 2 else "total_"
        droppable = sum(found.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        return max(min(limits) - max(used - droppable - own_bytes, 0), 0), min(limits)


def memory_groups(proc: Path = PROC, groups: Path = GROUPS) -> Iterator[MemoryGroup]:
    """The memory control groups of this process that can be read, each before the one that contains it."""
    yield from (MemoryGroup(folder, version) for folder, version in _control_groups("memory", proc, groups))


def has_core_quota(proc: Path = PROC, groups: Path = GROUPS) -> bool:
    """Whether a control group limits the processor time of this process, as ``docker run --cpus`` does."""
    quotas = (
        _text(folder / ("cpu.max" if version == 2 else "cpu.cfs_quota_us"))
        for folder, version in _control_groups("cpu", proc, groups)
    )
    return any(quota.split()[0].isdigit() for quota in quotas if quota.strip())  # else "max 100000", or "-1"


def _control_groups(controller: str, proc: Path, groups: Path) -> Iterator[tuple[Path, int]]:
    """Folders of the control groups of this process that can be read, from the inside out, and their version."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and controller not in kinds.split(","):
                continue
            version, root = (1, groups / controller) if kinds else (2, groups)
            inner = root / os.path.normpath(path).lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_dir():
                    yield folder, version
                if folder == root:
                    break


def machine_memory(own_bytes: int, proc: Path = PROC, groups: Path = GROUPS) -> MachineMemory:
    """Memory for a run whose processes use ``own_bytes`` already."""
    found = counts(proc / "meminfo")
    available = found["MemAvailable:"] * 1024 if "MemAvailable:" in found else int(_virtual_memory().available)
    machine = available + own_bytes, installed_bytes(proc)
    free = [left for group in memory_groups(proc, groups) if (left := group.free_bytes(own_bytes)) is not None]
    return MachineMemory(machine[0], min(free)[0] if free else None, min([machine, *free])[1])


def private_bytes(process: int | str = "self") -> int:
    """Private anonymous memory of a process, in bytes; 0 if it has ended, or cannot be read."""
    return counts(PROC / str(process) / "status").get("RssAnon:", 0) * 1024


def counts(path: Path) -> dict[str, int]:
    """Lines that begin with a name and a number, such as those of ``memory.stat``; none if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
    return {}


def installed_bytes(proc: Path = PROC) -> int:
    """All memory of this machine."""
    return counts(proc / "meminfo").get("MemTotal:", 0) * 1024 or int(_virtual_memory().total)


def _virtual_memory() -> Any:
    """What psutil says, where there is no /proc/meminfo."""
    import psutil  # 0.6 MB

    return psutil.virtual_memory()


def _number(path: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return int(_text(path))
    return None


def _text(path: Path) -> str:
    """A small file's text; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="ascii")
    return ""
