"""The recomputation schedules that are worth considering, from the cost of each unit on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snugfit._chain import Chain
from snugfit._core.profile import UnitStats
from snugfit._core.workload import Workload
from snugfit.strategies.full_network import PLAIN_PROBE
from snugfit.strategies.micro_batch import probe_of_line
from snugfit.strategies.recomputation.dynamic_program import UnitCost, schedule_cost
from snugfit.strategies.recomputation.paging_program import frontier, paged_bytes
from snugfit.strategies.recomputation.schedule import Schedule
from snugfit.strategies.recomputation.unit_costs import unit_costs

PREFIX = "checkpoint:"
PAGING = " pages "
HARDLY_MORE = 1.005
"""Ratio of bytes at the smallest batch below which two schedules are equally small."""
INTERMEDIATE = 5
"""Number of candidates between the schedule without recomputation and the schedule with the least memory."""


@dataclass(frozen=True)
class Candidate:
    """A schedule and its expected cost.

    Attributes:
        seconds: time of a step, relative to a step without recomputation.
        fixed_bytes: weights, buffers and optimizer state, and gradients of all weights if they are clipped.
        gradient_bytes: gradients of all weights, if they are in memory only while micro-batches hold them.
        sample_bytes: peak of feature maps and of gradients while they are applied, at the smallest trainable batch.
        batch_bytes: the same at the effective batch.
        paged_bytes: of an image on disk.
    """

    schedule: Schedule
    seconds: float
    fixed_bytes: int
    gradient_bytes: int
    sample_bytes: int
    batch_bytes: int
    paged_bytes: int = 0

    @property
    def probe(self) -> str:
        """Name of its probe with gradients applied at once."""
        return probe_name(self.schedule, self.paged_bytes)

    def bytes_at(self, images: int, batch: int, *, hold: bool) -> int:
        """Tensor bytes at ``images`` of an effective batch, interpolated between one image and the batch."""
        share = (images - 1) / max(batch - 1, 1)
        activations = self.sample_bytes + share * (self.batch_bytes - self.sample_bytes)
        return int(self.fixed_bytes + activations + (self.gradient_bytes if hold else 0))


def probe_name(schedule: Schedule, paged: int = 0) -> str:
    """Name of the probe of a schedule that pages so many bytes of an image; the plain network's if it does neither."""
    if schedule.paged:
        return f"{PREFIX}{schedule}{PAGING}{paged}"
    return f"{PREFIX}{schedule}" if schedule.recomputes else PLAIN_PROBE


def schedule_of_probe(name: str, count: int) -> tuple[Schedule, int]:
    """The schedule, of ``count`` units, that a probe was measured with, and the bytes of an image that it pages."""
    if name == PLAIN_PROBE:
        return Schedule.keeping(count), 0
    text, _, paged = name.removeprefix(PREFIX).partition(PAGING)
    return Schedule.parse(text), int(paged or 0)


def schedule_probes(names: Iterable[str]) -> list[str]:
    """Names of the schedules' probes among ``names``, without the suffix for held gradients."""
    probes = dict.fromkeys(map(probe_of_line, names))
    return [probe for probe in probes if probe == PLAIN_PROBE or probe.startswith(PREFIX)]


def find_candidates(
    chain: Chain, stats: Sequence[UnitStats], workload: Workload, disk_speed: float | None = None
) -> list[Candidate]:
    """Schedules from the fastest, which recomputes nothing, to the one with the least memory.

    The candidates between these two are the fastest at memory limits that are evenly spaced on a logarithmic scale.
    The schedule with the least memory for the effective batch may not be the one with the least memory for few images,
    where the gradients of weights count more; those for a quarter of the batch and for the smallest trainable batch are
    candidates, too. The last candidate has the least memory at the smallest batch; among those that need hardly more,
    it is the one that needs least at the effective batch. With the speed of a disk, in bytes per second, they may page.
    """
    batch, paging = workload.effective_batch, disk_speed is not None
    full, some, few = (_costs(chain, stats, each, disk_speed) for each in (batch, max(batch // 4, 1), 1))
    weights = 4 * sum(unit.parameters for unit in stats)
    fixed = sum(unit.weight_bytes for unit in stats) + int(weights * workload.optimizer.state_per_parameter)
    if workload.holds_gradients:
        fixed, weights = fixed + weights, 0
    plain, _ = schedule_cost(Schedule.keeping(len(full)), full)
    candidates: list[Candidate] = []
    fast = subsample(frontier(full, paging=paging), full, INTERMEDIATE)
    for schedule in {*fast, *(frontier(costs, paging=paging)[0] for costs in (some, few))}:
        (seconds, batch_bytes), (_, sample_bytes) = schedule_cost(schedule, full), schedule_cost(schedule, few)
        moved = -(-paged_bytes(schedule, full) // batch)
        candidates.append(Candidate(schedule, seconds / plain, fixed, weights, sample_bytes, batch_bytes, moved))
    most = HARDLY_MORE * min(each.fixed_bytes + each.sample_bytes for each in candidates)
    small = [each for each in candidates if each.fixed_bytes + each.sample_bytes <= most]
    least = min(small, key=lambda each: (each.batch_bytes, each.seconds))
    return sorted(candidates, key=lambda each: (each is least, each.seconds))


def _costs(chain: Chain, stats: Sequence[UnitStats], batch: int, disk_speed: float | None) -> list[UnitCost]:
    try:
        return unit_costs(chain, stats, batch, disk_speed=disk_speed)
    except ValueError:  # torch's BatchNorm refuses a single value per channel
        return unit_costs(chain, stats, batch + 1, disk_speed=disk_speed)


def subsample(schedules: Sequence[Schedule], costs: Sequence[UnitCost], between: int) -> list[Schedule]:
    """The first and the last schedule of a frontier and at most ``between`` others, the fastest first."""
    sizes = [schedule_cost(schedule, costs)[1] for schedule in schedules]
    steps = between + 1
    limits = [sizes[-1] * (sizes[0] / sizes[-1]) ** (step / steps) for step in range(1, steps)]
    middle = [max(at for at, size in enumerate(sizes) if size <= max(limit, sizes[0])) for limit in limits]
    return [schedules[at] for at in dict.fromkeys((len(schedules) - 1, *middle, 0))]
