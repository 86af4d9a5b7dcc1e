"""Energy from the RAPL counters that Linux provides under /sys/class/powercap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class _Counter:
    """One package's counter, which wraps to 0 after ``range_uj`` microjoules."""

    path: Path
    range_uj: int

    def read(self) -> int:
        return int(self.path.read_text())


class EnergyMeter:
    """Joules used by the processor's packages; of the whole machine, not of this process alone.

    Args:
        root: folder of the counters.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._counters = _readable(root)
        self._last = [counter.read() for counter in self._counters]

    @property
    def counts(self) -> bool:
        """Whether there is a readable counter."""
        return bool(self._counters)

    def spent(self) -> float:
        """Joules since the last call, or since the meter was created; 0 without a counter."""
        total = 0
        for index, counter in enumerate(self._counters):
            now = counter.read()
            total += (now - self._last[index]) % max(counter.range_uj, 1)
            self._last[index] = now
        return total / 1e6


def _readable(root: Path) -> list[_Counter]:
    """Counters of whole packages (``intel-rapl:0``), without their parts (``intel-rapl:0:1``)."""
    found = []
    for zone in sorted(root.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:
            continue
        try:
            counter = _Counter(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
            counter.read()
        except (OSError, ValueError):  # readable by root alone on many systems
            continue
        found.append(counter)
    return found
