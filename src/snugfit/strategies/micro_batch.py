"""Micro-batches: how many images of a step are in memory at once, with and without accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

from snugfit._core.options import Checked
from snugfit._core.parts import largest_parts
from snugfit._core.profile import ProbeLine
from snugfit._core.workload import Workload

VALIDATION_SHARE = 0.3
"""Seconds of a forward pass over those of a training step."""

NEARLY_AS_FAST = 1.1
"""Ratio of its time to that of the fastest up to which a larger micro-batch is chosen."""

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
        batch_norm: images that batch norms normalise by if a batch is divided: those of each micro-batch (micro, the
            default), or the whole batch (exact, which takes more time, and storage in the cache folder). For accuracy,
            exact is planned, too, where micro-batches have fewer than 8 images.
    """

    batch_norm: BatchNormMode | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class MicroBatching(AccumulationOptions):
    """The settings of a strategy that accumulates gradients; such strategies inherit from it.

    Without accumulation it is the baseline of NeuroFlux's evaluation.

    Attributes:
        name: name of the inheriting strategy in the registry.
        micro_batch: most images in memory at once; set by ``propose``.
        micro_batches: micro-batches accumulated to one step; set by ``propose``.
    """

    name: ClassVar[str]

    micro_batch: int = 0
    micro_batches: int = 1

    def at(self: S, micro_batch: int, batch: int) -> S:
        """These settings with at most ``micro_batch`` images in memory at once, accumulated to ``batch``."""
        return replace(self, micro_batch=micro_batch, micro_batches=-(-batch // micro_batch))

    def images(self, workload: Workload) -> int:
        """Images of a step."""
        return workload.step_images(self.micro_batch, self.micro_batches)

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

    def epoch_seconds(self, line: ProbeLine, workload: Workload, passed: int) -> float:
        """Seconds of an epoch by a step's line, in which ``passed`` images only pass forward."""
        images = self.images(workload)
        trained = max(workload.train_count // images, 1) * images
        return (trained + VALIDATION_SHARE * passed) * self.seconds(line) / self.micro_batch

    def step_bytes(self, line: ProbeLine, workload: Workload) -> float:
        """Upper bound of the peak of a step by its line: of its largest micro-batch, and kernels of its smallest."""
        smallest = self.images(workload) // self.micro_batches
        return line.bytes_at(self.micro_batch) + (line.new_kernel_bytes(smallest) if smallest < self.micro_batch else 0)


def line_name(probe: str, *, hold: bool) -> str:
    """Key of a probe's line, for a step that holds gradients for accumulation or one that does not."""
    return f"{probe}:accumulate" if hold else probe


def step_lines(lines: Mapping[str, ProbeLine], probe: str) -> dict[str, ProbeLine]:
    """The lines, those of a probe's two steps with the kernels that a new batch size leaves in either.

    The step that is measured second finds the kernels of the first, and seems to have none of its own.
    """
    found = {name: lines[name] for name in (line_name(probe, hold=hold) for hold in (False, True)) if name in lines}
    shape_bytes = max((line.shape_bytes for line in found.values()), default=0.0)
    return {**lines, **{name: replace(line, shape_bytes=shape_bytes) for name, line in found.items()}}


def probe_of_line(line: str) -> str:
    """Name of the probe of a line; inverse of :func:`line_name`."""
    return line.removesuffix(line_name("", hold=True))


def hold_modes(accumulate: bool) -> tuple[bool, ...]:
    """Values of ``hold`` of the steps to measure."""
    return (False, True) if accumulate else (False,)


def divisors(batch: int) -> tuple[int, ...]:
    """Sizes of equal micro-batches of a batch, ascending."""
    return tuple(size for size in range(1, batch + 1) if batch % size == 0)


def choose_batch(
    lines: Mapping[str, ProbeLine],
    probe: str,
    headroom: float,
    workload: Workload,
    *,
    accumulate: bool,
    whole: float | None = None,
    fewest: int | None = None,
) -> MicroBatching | None:
    """The whole batch if it fits, else accumulation to it, else the largest batch that fits without accumulation.

    Accumulation divides the batch into as few micro-batches as fit, whose sizes differ by at most one image.
    ``headroom`` is infinite without a budget; ``whole`` is that of a step without accumulation, if it is another.

    With ``fewest`` it is divided into more micro-batches if these are faster, because they leave room for freed memory,
    each of at least so many images; if fewer fit, on average of two thirds of those that do. If ``fewest`` is more
    than one, for the sake of norms, a batch that fits is not divided.

    Returns:
        The settings; None if not even one image fits.
    """
    batch = workload.effective_batch
    largest = _largest(lines.get(probe), headroom if whole is None else whole, batch)
    held = lines.get(line_name(probe, hold=True))
    found = [MicroBatching(batch, accumulate=accumulate)] if largest == batch else []
    if accumulate and held is not None and (fewest == 1 or not found):
        sizes = reversed(largest_parts(batch)[:-1])
        parted = (MicroBatching(size, -(-batch // size)) for size in sizes)
        found += [each for each in parted if _fits(each, held, headroom, workload)]
    if fewest is None:
        found = found[:1]
    elif found:
        many = batch // found[0].micro_batches >= fewest
        parts = batch // fewest if many else int(1.5 * batch / found[0].micro_batch)
        found = [each for each in found if each.micro_batches <= parts or each is found[0]]
    if not found:
        return MicroBatching(largest, accumulate=accumulate) if largest else None

    def image_seconds(each: MicroBatching) -> float:
        return each.seconds(lines[each.line(probe)]) / each.micro_batch

    most = NEARLY_AS_FAST * min(map(image_seconds, found))
    return next(each for each in found if image_seconds(each) <= most)


def _fits(micro: MicroBatching, held: ProbeLine, headroom: float, workload: Workload) -> bool:
    """Whether micro-batches, the smallest of them, too, can train and fit by the line of held gradients."""
    smallest = workload.effective_batch // micro.micro_batches
    return smallest >= held.smallest_batch and micro.step_bytes(held, workload) <= headroom


def _largest(line: ProbeLine | None, headroom: float, limit: int) -> int:
    """Largest batch of a line that fits; 0 if none fits."""
    if line is None:
        return 0
    return limit if headroom == float("inf") else line.largest_batch(headroom, limit)
