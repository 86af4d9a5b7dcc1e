"""A cache of measurements on disk: what was measured once on this machine is not measured again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from snugfit._core.documents import read_data
from snugfit._core.paths import try_write_text
from snugfit._core.profile import ProbeLine, TensorProfile
from snugfit._core.serial import to_data
from snugfit.errors import CheckpointError

AS_MUCH = 1.04
"""Largest ratio of bytes free now to bytes free then at which a measurement from a smaller budget still applies."""
ROOM = 1.1
"""A measurement of several batch sizes is made again in a process that has less than this many times what the smallest
of them needs: of the rest, up to 5 % of a budget stay free, and some MB are taken by what measuring leaves."""


@dataclass(frozen=True)
class Measurement:
    """The results of a probe.

    Attributes:
        line: None if it did not fit, or has none.
        tensors: from a probe of every operator.
        floors: tensor bytes by batch size.
        available_bytes: bytes that were free; None without a budget.
        left_bytes: bytes that measuring it left in memory.
        complete: whether it was measured at its largest batch, so that more memory would not change the result.
    """

    line: ProbeLine | None = None
    tensors: TensorProfile | None = None
    floors: dict[str, int] = field(default_factory=dict)
    available_bytes: int | None = None
    left_bytes: int = 0
    complete: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid batch size."""
        if not all(batch.isdecimal() and len(batch) < 10 for batch in self.floors):
            raise ValueError("a batch size is no number")

    @property
    def fits(self) -> bool:
        """Whether anything could be measured."""
        return self.line is not None or self.tensors is not None

    @property
    def left_by_one_size(self) -> int:
        """``left_bytes`` without the kernels of all batch sizes but one."""
        return self.left_bytes if self.line is None else max(self.left_bytes - int(self.line.sizes_bytes), 0)

    def serves(self, available: float, *, from_disk: bool) -> bool:
        """Whether measuring with this many free bytes would give the same result.

        With fewer free bytes, a smaller batch might fit that was not measured when more were free. So might the
        smallest one alone, which leaves less in memory than all those that another process measured.
        """
        fewest, line = min(map(int, self.floors), default=0), self.line
        if line is not None:
            least = line.bytes_at(line.smallest_batch)
            if line.smallest_batch > fewest > 0 and available < least:
                return False
            if from_disk and len(line.points) > 1 and available < ROOM * (least + line.shape_bytes):
                return False
        then = float("inf") if self.available_bytes is None else self.available_bytes
        return self.complete or available <= (AS_MUCH if self.fits else 1) * then


class Measurements:
    """Measurements in a folder, one file each, or only those of this process without a folder.

    Unreadable files are ignored, and failed writes too: nothing depends on them.

    Args:
        folder: of the files; created when something is stored.
        machine: text that changes whenever measurements would differ: device, threads, versions.
        renew: whether to measure again what is in the folder.
    """

    def __init__(self, folder: Path | None = None, machine: str = "", *, renew: bool = False) -> None:
        self._folder, self._machine, self._renew = folder, machine, renew
        self._here: dict[str, Measurement] = {}
        self._found: set[str] = set()
        self._elsewhere, self._made = set[str](), set[str]()

    @property
    def found(self) -> int:
        """Number of measurements found in the folder that were made before."""
        return len(self.names_found | self._elsewhere)

    @property
    def names_found(self) -> frozenset[str]:
        """Names of the measurements that were found in the folder."""
        return frozenset(map(self._name, self._found))

    @property
    def names_made(self) -> frozenset[str]:
        """Names of the measurements that were made."""
        return frozenset(map(self._name, self._here.keys() - self._found))

    def note_others(self, found: Iterable[str], made: Iterable[str]) -> None:
        """Note the names of measurements that a forked process has found and made, which later ones may find."""
        self._elsewhere |= set(found) - self._made
        self._made |= set(made)

    def find(self, what: str, available: float) -> Measurement | None:
        """The measurement of a text, if it applies with this many free bytes; None for an empty text."""
        if not what:
            return None
        there = None if what in self._here or self._renew else self._read(what)
        if there is not None:
            self._here[what] = there
            self._found.add(what)
        found = self._here.get(what)
        return found if found is not None and found.serves(available, from_disk=what in self._found) else None

    def keep(self, what: str, measured: Measurement, available: float) -> None:
        """Store a measurement made with this many free bytes.

        If nothing fitted, a measurement with more free bytes stays in the folder, for the budgets in which it applies.
        """
        if not what:
            return
        self._found.discard(what)
        before = self._here.get(what)
        self._here[what] = replace(measured, available_bytes=None if available == float("inf") else int(available))
        path = self._path(what)
        if path is not None and (measured.fits or before is None or not before.fits):
            try_write_text(path, json.dumps(to_data(self._here[what])))

    def is_from_disk(self, what: str) -> bool:
        """Whether its measurement comes from another process."""
        return what in self._found

    def _read(self, what: str) -> Measurement | None:
        path = self._path(what)
        try:
            return None if path is None else read_data(Measurement, path)
        except CheckpointError:
            return None

    def _path(self, what: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{self._name(what)}.json"

    def _name(self, what: str) -> str:
        return sha256(f"{self._machine}\n{what}".encode()).hexdigest()[:32]
