"""Which recomputation schedules are worth measuring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snugfit._chain import Chain
from snugfit._core.profile import UnitFacts
from snugfit._core.workload import Workload
from snugfit.strategies.checkpoint.dynamic_program import SLOTS, Programme, Stage, price
from snugfit.strategies.checkpoint.schedule import Schedule
from snugfit.strategies.checkpoint.unit_costs import stages_of
from snugfit.strategies.full_network import PLAIN_PROBE
from snugfit.strategies.micro_batch import probe_of_line

PREFIX = "checkpoint:"
BETWEEN = 5
"""Schedules that are offered between the one that recomputes nothing and the one in least memory."""


@dataclass(frozen=True)
class Way:
    """A schedule, and what it is expected to take.

    Attributes:
        schedule: which units run again.
        seconds: of a step, over those of a step that recomputes nothing.
        fixed_bytes: weights, buffers and optimizer state.
        gradient_bytes: of all weights, where they are held for another micro-batch.
        sample_bytes: most bytes of maps, and of gradients that are being applied, for as few images as it can train on.
        batch_bytes: the same for the whole effective batch.
    """

    schedule: Schedule
    seconds: float
    fixed_bytes: int
    gradient_bytes: int
    sample_bytes: int
    batch_bytes: int

    @property
    def key(self) -> str:
        """Name of its probe, with gradients applied at once."""
        return key_of(self.schedule)

    @property
    def smallest_bytes(self) -> int:
        """Tensor bytes of as few images as possible, gradients applied at once."""
        return self.fixed_bytes + self.sample_bytes

    def least_bytes(self, *, hold: bool) -> int:
        """Tensor bytes of the whole batch, or with held gradients of the smallest part of it."""
        if hold:
            return self.smallest_bytes + self.gradient_bytes
        return self.fixed_bytes + self.batch_bytes

    def bytes_at(self, images: int, batch: int, *, hold: bool) -> int:
        """Tensor bytes of some images of an effective batch, about: in proportion between one image and all of them."""
        share = (images - 1) / max(batch - 1, 1)
        maps = self.sample_bytes + share * (self.batch_bytes - self.sample_bytes)
        return int(self.fixed_bytes + maps + (self.gradient_bytes if hold else 0))


def key_of(schedule: Schedule) -> str:
    """Name of the probe of a schedule; without recomputation, that of the plain network."""
    return f"{PREFIX}{schedule}" if schedule.recomputes else PLAIN_PROBE


def schedule_of(key: str, count: int) -> Schedule:
    """The schedule, of ``count`` units, that a probe was measured with."""
    return Schedule.keeping(count) if key == PLAIN_PROBE else Schedule.parse(key.removeprefix(PREFIX))


def keys_in(names: Iterable[str]) -> list[str]:
    """Those of the names that are probes of schedules with gradients applied at once, or would be."""
    keys = dict.fromkeys(map(probe_of_line, names))
    return [key for key in keys if key == PLAIN_PROBE or key.startswith(PREFIX)]


def ways_of(chain: Chain, facts: Sequence[UnitFacts], workload: Workload) -> list[Way]:
    """Schedules from the one that recomputes nothing on, the fastest first; the last takes the least memory.

    Between those two, the fastest ones in amounts of memory that are evenly spaced on a logarithmic scale. What takes
    the least memory for the whole batch may not do so for few images, for which the gradients of weights count more:
    the last one takes the least for as few images as possible.

    Args:
        chain: the chain, on the meta device.
        facts: of its units.
        workload: what is trained.
    """
    batch = workload.effective_batch
    whole, few = _stages(chain, facts, batch), _stages(chain, facts, 1)
    weights = 4 * sum(fact.parameters for fact in facts)
    fixed = sum(fact.weight_bytes for fact in facts) + weights * workload.optimizer.state_per_parameter
    plain, _ = price(Schedule.keeping(len(whole)), whole)
    ways: list[Way] = []
    for schedule in {*thinned(frontier(whole), whole, BETWEEN), frontier(few)[0]}:
        (seconds, batch_bytes), (_, sample_bytes) = price(schedule, whole), price(schedule, few)
        ways.append(Way(schedule, seconds / plain, fixed, weights, sample_bytes, batch_bytes))
    least = min(ways, key=lambda way: (way.sample_bytes, way.batch_bytes, way.seconds))
    return sorted(ways, key=lambda way: (way is least, way.seconds))


def _stages(chain: Chain, facts: Sequence[UnitFacts], batch: int) -> list[Stage]:
    try:
        return stages_of(chain, facts, batch)
    except ValueError:  # torch's BatchNorm refuses a single value per channel
        return stages_of(chain, facts, batch + 1)


def frontier(stages: Sequence[Stage]) -> list[Schedule]:
    """Every schedule that is faster than those in less memory, that in least memory first, plain backpropagation last.

    Slots are smaller for the schedules in least memory, which are found by themselves.
    """
    plain = Schedule.keeping(len(stages))
    _, most = price(plain, stages)
    found = [plain, *Programme(stages, int(most * (1 + len(stages) / SLOTS)) + 1).frontier()]
    least = min(price(schedule, stages)[1] for schedule in found)
    found += Programme(stages, least).frontier()
    best: list[Schedule] = []
    for schedule in sorted(found, key=lambda each: price(each, stages)[::-1]):
        if not best or price(schedule, stages)[0] < price(best[-1], stages)[0] * (1 - 1e-9):
            best.append(schedule)
    return best


def thinned(schedules: Sequence[Schedule], stages: Sequence[Stage], between: int) -> list[Schedule]:
    """A few schedules of a frontier, the fastest first; the first and the last one of it are among them."""
    sizes = [price(schedule, stages)[1] for schedule in schedules]
    steps = between + 1
    limits = [sizes[-1] * (sizes[0] / sizes[-1]) ** (step / steps) for step in range(1, steps)]
    middle = [max(at for at, size in enumerate(sizes) if size <= max(limit, sizes[0])) for limit in limits]
    return [schedules[at] for at in dict.fromkeys((len(schedules) - 1, *middle, 0))]
