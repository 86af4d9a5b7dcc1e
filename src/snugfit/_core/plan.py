"""A plan: candidates with predicted costs, their ranking by an aim, and the chosen one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from snugfit._core.budget import Aim, Budget
from snugfit._core.hardware import Hardware
from snugfit._core.registry import find_config
from snugfit._core.run_memory import DevicePlan, RunMemory
from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import Workload
from snugfit._quantities import format_bytes

FEWEST_NORM_IMAGES = 8
"""With fewer images, batch norms are expected to cost more accuracy than training without exact gradients does.

MobileNetV2 from ImageNet weights, an epoch of flowers at 96 px in steps of 16 images (one run each, 250 test images):
normalised 16 together 73 %, 8 together 72, 4 together 46, 2 together 52; in steps of 2 images 32."""
FEW_NORM_IMAGES_LOSS = 3
"""Expected loss of accuracy with fewer, as an ordinal number: more than that of any strategy."""


@dataclass(frozen=True)
class Phase:
    """A part of a run whose prediction is checked separately: a block, the whole network, the final test.

    Attributes:
        peak_bytes: peak memory above the baseline.
        batch_size: samples in memory at once.
        units: names of the units that it trains.
        storage_bytes: bytes of its cache.
        steps: whether it has training steps.
        kept_bytes: what of the peak is freed memory that the heap keeps from step to step, for speed.
    """

    name: str
    peak_bytes: int
    seconds: float
    batch_size: int
    units: tuple[str, ...] = ()
    storage_bytes: int = 0
    steps: bool = True
    kept_bytes: int = 0


@dataclass(frozen=True)
class Shortfall:
    """Why a strategy proposes nothing, and which budget suffices.

    The smallest sufficient memory budget and time ratio are None if memory or time is not the reason.
    """

    reasons: tuple[str, ...]
    smallest_bytes: int | None = None
    smallest_ratio: float | None = None


@dataclass(frozen=True)
class Cost:
    """Predicted cost of a whole run.

    Attributes:
        peak_bytes: largest peak of all phases, above the baseline.
        seconds_per_epoch: seconds of one epoch (every block's pass over the data once).
        seconds: total seconds, including cache writes.
        storage_bytes: most bytes on disk at any time.
        host_bytes: most bytes of a GPU's activations that are in host memory at any time.
        sent_bytes: total bytes sent over the network.
        phases: the phases in order.
    """

    peak_bytes: int
    seconds_per_epoch: float
    seconds: float
    storage_bytes: int = 0
    sent_bytes: int = 0
    phases: tuple[Phase, ...] = ()
    host_bytes: int = 0

    @property
    def least_peak_bytes(self) -> int:
        """The peak if the heap keeps no freed memory: what the run cannot do without."""
        if not any(phase.kept_bytes for phase in self.phases):
            return self.peak_bytes
        return max(phase.peak_bytes - phase.kept_bytes for phase in self.phases)


@dataclass(frozen=True)
class Correction:
    """Factors of predicted time and peak memory, derived from a number of past runs on this machine."""

    seconds: float = 1.0
    peak: float = 1.0
    runs: int = 0


@dataclass(frozen=True)
class Candidate:
    """One strategy with its settings.

    >>> Candidate("backprop", feasible=False, reasons=("needs 177.0 MB",), smallest_bytes=177_000_000).reasons
    ('needs 177.0 MB',)

    Attributes:
        strategy: name in the registry.
        feasible: whether it fits the budget.
        settings: fields of the strategy's dataclass.
        predicted: predicted cost; also of infeasible candidates, if it could be estimated.
        reasons: why it does not fit or was not considered.
        smallest_bytes: smallest sufficient memory budget, for infeasible candidates.
        exact: whether its gradients are those of plain backpropagation.
        smallest_ratio: smallest sufficient time ratio, for candidates that are too slow.
        correction: factors from past runs in the prediction.
        considered: whether the strategy was considered.
        fine_tunes: whether it is the way to fine-tune on few images, and the workload does.
        norm_images: images that batch norms normalise together in training, if gradients are exact and these are fewer
            than the batch size asked for; None otherwise, and without batch norms that train.
    """

    strategy: str
    feasible: bool
    settings: dict[str, Any] = field(default_factory=dict)
    predicted: Cost | None = None
    reasons: tuple[str, ...] = ()
    smallest_bytes: int | None = None
    exact: bool = False
    smallest_ratio: float | None = None
    correction: Correction = field(default_factory=Correction)
    considered: bool = True
    fine_tunes: bool = False
    norm_images: int | None = None

    @property
    def normalises_few(self) -> bool:
        """Whether batch norms normalise so few images together that accuracy is expected to suffer."""
        return self.norm_images is not None and self.norm_images < FEWEST_NORM_IMAGES

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of phases that train a part of the network; otherwise those of the whole network."""
        phases = self.predicted.phases if self.predicted else ()
        parts = tuple(phase.batch_size for phase in phases if phase.units)
        return parts or tuple(dict.fromkeys(phase.batch_size for phase in phases))

    @property
    def processes(self) -> int:
        """Number of processes that it trains on."""
        return int(self.settings.get("processes", 1))

    @property
    def terms(self) -> tuple[str, ...]:
        """Terms of its settings in a plan's table."""
        return find_config(self.strategy).terms(self.settings)


@dataclass(frozen=True)
class Plan:
    """The answer to "will it fit, how, and what will it cost?".

    >>> import snugfit
    >>> small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "memory": "100MB"}
    >>> plan = snugfit.plan("smallconv", "digits", **small).plan
    >>> plan.choice.strategy, plan.choice.predicted.peak_bytes <= plan.budget.memory_bytes
    ('backprop', True)
    >>> Plan.from_json(plan.to_json()) == plan
    True

    Attributes:
        workload, budget, hardware: the input of the plan.
        candidates: all strategies, feasible ones first, best first; those not considered last.
        chosen: index into ``candidates``; None if nothing fits.
        aim: the criterion of the choice.
        explanation: sentences about the choice and its alternatives.
        command: arguments of the command that runs the choice; None if nothing fits, or if model or data were passed
            from Python. Planned without data, it has ``DATA`` in place of the data.
        memory: private memory of all processes at rest, and the machine's; None on CUDA.
        device_memory: what the process takes of a device with a memory of its own; None on the processor.
    """

    workload: Workload
    budget: Budget
    hardware: Hardware
    candidates: tuple[Candidate, ...] = ()
    chosen: int | None = None
    aim: Aim = "time"
    explanation: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    memory: RunMemory | None = None
    device_memory: DevicePlan | None = None

    def __post_init__(self) -> None:
        if self.chosen is not None and not 0 <= self.chosen < len(self.candidates):
            raise ValueError(f"'chosen' is {self.chosen}, and there are {len(self.candidates)} candidates")

    @property
    def choice(self) -> Candidate | None:
        """The chosen candidate."""
        return None if self.chosen is None else self.candidates[self.chosen]

    @property
    def growth_bytes(self) -> int | None:
        """What the run may add to its processes at rest: its budget, or the predicted peak; None if it may add nothing.

        A plan keeps a budget of 1 MB if a budget of all processes is smaller than these at rest.
        """
        if self.budget.memory_bytes is not None:
            total = self.budget.total_memory_bytes
            full = self.memory and total is not None and self.memory.rest_bytes + self.budget.memory_bytes > total
            return None if full else self.budget.memory_bytes
        return None if self.choice is None or self.choice.predicted is None else self.choice.predicted.peak_bytes

    @property
    def total_bytes(self) -> int | None:
        """All processes of the run: at rest, and what the run may add; None if either is unknown."""
        growth = self.growth_bytes
        return None if self.memory is None or growth is None else self.memory.rest_bytes + growth

    @property
    def machine_warning(self) -> str:
        """A warning that the machine lacks memory for the predicted peak; empty if not, or if nothing is chosen."""
        cost = self.choice.predicted if self.choice else None
        if cost is None or self.memory is None:
            return ""
        needed, free = self.memory.rest_bytes + cost.least_peak_bytes, self.memory.machine.free_bytes
        if needed <= free:
            return ""
        return (
            f"the run is predicted to need {format_bytes(needed)} in all, and {format_bytes(free)} are free for it. "
            "End other processes, or give --total-memory auto, which leaves them theirs."
        )

    @property
    def free_bytes(self) -> int:
        """What the machine has above the processes at rest; 0 if unknown."""
        return 0 if self.memory is None else max(self.memory.headroom_bytes, 0)

    @property
    def rest_text(self) -> str:
        """What a budget of all processes holds already, for an error; empty with another budget."""
        memory = self.memory
        if memory is None or self.budget.total_memory is None:
            return ""
        rest = f"its processes rest at {format_bytes(memory.rest_bytes)}"
        if self.budget.total_memory != memory.auto_bytes:
            return f"; {rest}"
        return f": {memory.machine} and the library code of a step {format_bytes(memory.mapped_bytes)}; {rest}"

    def smallest_budget(self, growth_bytes: int) -> int:
        """The budget, by the flag that bounds the memory, that allows so much growth of the process that trains."""
        if self.memory is None or self.budget.total_memory is None:
            return growth_bytes
        return self.memory.total_for(growth_bytes)

    def to_json(self) -> dict[str, Any]:
        """JSON-able form; keys follow ``snugfit plan --json``."""
        data = to_data(self)
        if self.memory is not None:
            sums = {"rest_bytes": self.memory.rest_bytes, "free_bytes": self.memory.machine.free_bytes}
            data["memory"] |= {**sums, "growth_bytes": self.growth_bytes, "total_bytes": self.total_bytes}
        if self.device_memory is not None and self.choice and self.choice.predicted:
            data["device_memory"] |= self.device_memory.parts(int(self.choice.predicted.peak_bytes))
        for candidate in data["candidates"]:
            cost = candidate["predicted"]
            if cost is not None:
                cost["peak_bytes"] = int(cost["peak_bytes"])
        return dict(data)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Inverse of :meth:`to_json`."""
        return from_data(cls, data)


def ranked(candidates: Iterable[Candidate], aim: Aim = "time") -> tuple[Candidate, ...]:
    """Candidates: feasible ones first, best first; those not considered last.

    A strategy that is exact only by its settings never counts as faster than one that is always exact: past runs
    correct the predicted seconds of each strategy by themselves. No time is worth what batch norms of few images cost:
    a candidate with such norms comes last, unless the aim is memory.
    """
    found = list(candidates)
    exact = (_amounts(each)[0] for each in found if each.feasible and find_config(each.strategy).exact)
    least = min(exact, default=0.0)

    def key(candidate: Candidate) -> tuple[float, ...]:
        seconds, peak = _amounts(candidate)
        by_settings = candidate.exact and not find_config(candidate.strategy).exact
        if by_settings:
            seconds = max(seconds, least)
        by_aim = {
            "time": (candidate.normalises_few, seconds, by_settings, peak),
            "memory": (peak, by_settings, seconds),
            "accuracy": (expected_loss(candidate), seconds, by_settings, peak),
        }
        return (not candidate.feasible, not candidate.considered, *by_aim[aim])

    return tuple(sorted(found, key=key))


def _amounts(candidate: Candidate) -> tuple[float, float]:
    """Predicted seconds, and peak without kept memory, which only a choice has; infinite without a prediction."""
    cost = candidate.predicted
    return (inf, inf) if cost is None else (cost.seconds, cost.least_peak_bytes)


def expected_loss(candidate: Candidate) -> int:
    """Expected loss of accuracy of a strategy, as an ordinal number; 0 with exact gradients and enough images.

    It is less by a strategy that fine-tunes on few images and keeps more of the pre-trained network.
    """
    if candidate.fine_tunes:
        return -1
    if candidate.normalises_few:
        return FEW_NORM_IMAGES_LOSS
    return 0 if candidate.exact else find_config(candidate.strategy).expected_loss
