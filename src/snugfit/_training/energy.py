"""Energy from the RAPL counters that Linux provides under /sys/class/powercap."""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules used by the processor's packages; of the whole machine, not of this process alone."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._counters = _readable(root)
        self._last = {path: _read(path) for path in self._counters}

    @property
    def counts(self) -> bool:
        """Whether there is a readable counter."""
        return bool(self._counters)

    def spent(self) -> float:
        """Joules since the last call, or since the meter was created; 0 without a counter."""
        total = 0
        for path, largest in self._counters.items():
            now = _read(path)
            total += (now - self._last[path]) % max(largest, 1)
            self._last[path] = now
        return total / 1e6


def _readable(root: Path) -> dict[Path, int]:
    """Counters of whole packages (``intel-rapl:0``, not its part ``intel-rapl:0:1``); each wraps to 0 at that value."""
    found = {}
    for zone in sorted(root.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:
            continue
        try:
            _read(zone / "energy_uj")
            found[zone / "energy_uj"] = _read(zone / "max_energy_range_uj")
        except (OSError, ValueError):  # readable by root alone on many systems
            continue
    return found


def _read(path: Path) -> int:
    return int(path.read_text())
