"""Micro-batches: how many images of a step are in memory at once, with and without accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

from snugfit._core.options import Checked
from snugfit._core.profile import ProbeLine

VALIDATION_SHARE = 0.3
"""Seconds of a forward pass over those of a training step."""

S = TypeVar("S", bound="MicroBatching")


@dataclass(frozen=True)
class AccumulationOptions(Checked):
    """Accumulation.

    Attributes:
        accumulate: accumulate micro-batches to the batch size if a whole batch does not fit (off: one step for each
            batch that fits).
    """

    accumulate: bool = field(default=True, kw_only=True)


BatchNormMode = Literal["exact", "micro"]
"""Images that BatchNorm normalises by: those of a whole step, or of a micro-batch."""


@dataclass(frozen=True)
class BatchNormOptions(AccumulationOptions):
    """Accumulation, and how batch norms work with it.

    Attributes:
        batch_norm: images that batch norms normalise by if a batch is divided into micro-batches: those of each
            micro-batch (micro), or all of the batch, as if it were not divided (exact). Exact takes more time, and
            storage in the cache folder. micro by default; exact is planned, too, if accuracy is the aim and exact
            gradients do not fit, or only in micro-batches of fewer than 8 images.
    """

    batch_norm: BatchNormMode | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class MicroBatching(AccumulationOptions):
    """The settings of a strategy that accumulates gradients; such strategies inherit from it.

    Without accumulation it is the baseline of NeuroFlux's evaluation.

    Attributes:
        name: name of the inheriting strategy in the registry.
        micro_batch: images in memory at once; set by ``propose``.
        micro_batches: micro-batches accumulated to one step; set by ``propose``.
    """

    name: ClassVar[str]

    micro_batch: int = 0
    micro_batches: int = 1

    def at(self: S, micro_batch: int, batch: int) -> S:
        """These settings with ``micro_batch`` images in memory at once, accumulated to ``batch``."""
        return replace(self, micro_batch=micro_batch, micro_batches=max(batch // micro_batch, 1))

    @property
    def effective_batch(self) -> int:
        """Images of a step."""
        return self.micro_batch * self.micro_batches

    @property
    def holds_gradients(self) -> bool:
        """Whether weight gradients are held over micro-batches instead of applied and freed one by one."""
        return self.micro_batches > 1

    def line(self, probe: str) -> str:
        """Key of a probe's line: of the step that holds gradients if this one does."""
        return line_name(probe, hold=self.holds_gradients)

    def seconds(self, line: ProbeLine) -> float:
        """Seconds of a micro-batch; a probe that holds gradients runs two of them."""
        return line.seconds_at(self.micro_batch) / (2 if self.holds_gradients else 1)

    def epoch_seconds(self, line: ProbeLine, train_count: int, passed: int) -> float:
        """Seconds of an epoch by a step's line, in which ``passed`` images only pass forward."""
        steps = max(train_count // self.effective_batch, 1) * self.micro_batches
        seconds = self.seconds(line)
        return steps * seconds + VALIDATION_SHARE * passed * seconds / self.micro_batch


def line_name(probe: str, *, hold: bool) -> str:
    """Key of a probe's line, for a step that holds gradients for accumulation or one that does not."""
    return f"{probe}:accumulate" if hold else probe


def probe_of_line(line: str) -> str:
    """Name of the probe of a line; inverse of :func:`line_name`."""
    return line.removesuffix(line_name("", hold=True))


def hold_modes(accumulate: bool) -> tuple[bool, ...]:
    """Values of ``hold`` of the steps to measure."""
    return (False, True) if accumulate else (False,)


def divisors(batch: int) -> tuple[int, ...]:
    """Sizes of micro-batches that accumulate to exactly the effective batch, ascending."""
    return tuple(size for size in range(1, batch + 1) if batch % size == 0)


def choose_batch(
    lines: Mapping[str, ProbeLine],
    probe: str,
    headroom: float,
    batch: int,
    *,
    accumulate: bool,
    whole: float | None = None,
) -> MicroBatching | None:
    """The whole batch if it fits, else accumulation to it, else the largest batch that fits without accumulation.

    ``headroom`` is infinite without a budget; ``whole`` is that of a step without accumulation, if it is another.

    Returns:
        The settings; None if not even one image fits.
    """
    largest = _largest(lines.get(probe), headroom if whole is None else whole, batch)
    held = lines.get(line_name(probe, hold=True))
    if accumulate and held is not None and largest < batch:
        most = _largest(held, headroom, batch)
        sizes = [size for size in divisors(batch)[:-1] if held.smallest_batch <= size <= most]
        if sizes:
            return MicroBatching(sizes[-1], batch // sizes[-1])
    return MicroBatching(largest, accumulate=accumulate) if largest else None


def _largest(line: ProbeLine | None, headroom: float, limit: int) -> int:
    """Largest batch of a line that fits; 0 if none fits."""
    if line is None:
        return 0
    return limit if headroom == float("inf") else line.largest_batch(headroom, limit)
