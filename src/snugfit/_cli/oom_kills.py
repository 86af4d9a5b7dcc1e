"""How often the kernel has killed for lack of memory: tells whether a SIGKILL was its own or somebody else's."""

from __future__ import annotations

import contextlib
from pathlib import Path


def memory_kills(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processes that were killed for lack of memory: in this process's control group, or else on this machine.

    A kill for the whole machine's sake is counted by the group of the process that was killed, too.

    Args:
        proc, groups: where the kernel tells of processes and control groups.

    Returns:
        A count that only grows; None where the kernel does not say.
    """
    for path, name in [*_counters(proc, groups), (proc / "vmstat", "oom_kill")]:
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split(maxsplit=1) for line in path.read_text(encoding="ascii").splitlines())
            if name in counts:
                return int(counts[name])
    return None


def _counters(proc: Path, groups: Path) -> list[tuple[Path, str]]:
    """Files that count, of the second version of control groups and of the first, where they are mounted."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, group = line.split(":", 2)
            if not kinds or "memory" in kinds.split(","):
                root, file = (groups, "memory.events") if not kinds else (groups / "memory", "memory.oom_control")
                found += [(root / group.lstrip("/") / file, "oom_kill"), (root / file, "oom_kill")]
    return found
