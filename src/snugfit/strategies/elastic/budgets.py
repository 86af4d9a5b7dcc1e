"""Predicted peaks of a network of which some tensors train: bytes followed through operators, held against steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from snugfit._core.budget import Budget
from snugfit._core.profile import Profile
from snugfit._core.workload import Workload
from snugfit.errors import InfeasibleBudgetError, InfeasibleTimeError, SnugfitError
from snugfit.selection.choice import Headroom, choose, needed_bytes
from snugfit.selection.network import Mask, Network
from snugfit.selection.timing import StepTimes
from snugfit.strategies.elastic.probes import FULL, HEAD, IMPORTANCE
from snugfit.strategies.memory_estimates import (
    DRIFT_BYTES,
    MB,
    RESERVED_BYTES,
    TENSOR_TO_PROCESS,
    step_headroom,
    with_safety,
)
from snugfit.strategies.micro_batch import MicroBatching


@dataclass(frozen=True)
class Sizes:
    """A profiled network at the batch that it trains at.

    Attributes:
        profile: what was measured.
        workload: what is trained.
        micro: the micro-batches of a step.
    """

    profile: Profile
    workload: Workload
    micro: MicroBatching

    @cached_property
    def memory(self) -> Network:
        """The network at the micro-batch."""
        return self._network(self.micro.micro_batch)

    @cached_property
    def times(self) -> StepTimes:
        """The time model at the effective batch."""
        return StepTimes(self._network(self.micro.effective_batch))

    def _network(self, batch: int) -> Network:
        if self.profile.tensors is None:
            raise ValueError("the profile holds no tensors")
        return Network(self.profile.tensors, batch, self.workload.optimizer.state_per_parameter)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers."""
        return sum(unit.weight_bytes for unit in self.profile.units)

    def analytic(self, mask: Mask) -> int:
        """Bytes of tensors at the peak of a step with a selection: weights, state, maps and gradients."""
        return self.weight_bytes + needed_bytes(
            self.memory, mask, Headroom(1.0, holds_gradients=self.micro.holds_gradients)
        )

    def peak(self, mask: Mask) -> int:
        """Predicted peak of a step with a selection, above what is in memory before it."""
        least, most = self._overheads
        share = (self.analytic(mask) - least[0]) / max(most[0] - least[0], 1)
        return int(self.analytic(mask) + least[1] + max(share, 0.0) * max(most[1] - least[1], 0.0))

    @cached_property
    def _overheads(self) -> tuple[tuple[int, float], tuple[int, float]]:
        """Analytic bytes, and by how much the measured peak lies above them: with the fewest tensors and with all."""
        everything = np.ones(len(self.memory.tensors), dtype=bool)
        found = []
        for name, mask in ((HEAD, self.memory.head), (FULL, everything)):
            analytic = replace(self, micro=replace(self.micro, micro_batches=1)).analytic(mask)
            found.append((analytic, analytic * self._above(name, mask)))
        return found[0], found[1]

    def _above(self, probe: str, mask: Mask) -> float:
        """Share by which the measured peak of a probe lies above the analytic one, at the batch nearest to ours."""
        line = self.profile.lines.get(probe)
        if line is None or not line.points:
            return TENSOR_TO_PROCESS - 1
        point = min(line.points, key=lambda point: abs(point.batch - self.micro.micro_batch))
        analytic = replace(self, micro=MicroBatching(point.batch)).analytic(mask)
        return max(point.peak_bytes / analytic - 1, 0.0)

    def predicted(self, mask: Mask) -> int:
        """Predicted peak of an interval above the baseline, the pass that tells importance apart."""
        return with_safety(self.profile.base_bytes, self.peak(mask))

    def headroom(self, budget: Budget, ratio: float) -> Headroom:
        """What a selection may take of a budget, less weights and what no tensor accounts for."""
        step = step_headroom(budget, self.profile.base_bytes)
        if step == float("inf"):
            return Headroom(ratio, None, self.micro.holds_gradients)
        least, most = self._overheads
        slope = max(most[1] - least[1], 0.0) / max(most[0] - least[0], 1)
        analytic = (step - least[1] + slope * least[0]) / (1 + slope)
        return Headroom(ratio, int(analytic) - self.weight_bytes, self.micro.holds_gradients)

    def most(self, budget: Budget, ratio: float) -> int:
        """Upper bound of the predicted peak of every selection within the budgets."""
        network = self.memory
        alone = (network.own_bytes + network.input_bytes + network.gradient_bytes).astype(np.float64)
        hungriest = choose(self.times, network, alone, Headroom(ratio))
        passed = int(network.pass_bytes[: int(np.argmax(hungriest))].sum())
        most = with_safety(self.profile.base_bytes, self.peak(hungriest) + passed)
        return most if budget.memory_bytes is None else min(most, budget.memory_bytes - RESERVED_BYTES)

    def least(self, ratio: float, wanted: np.ndarray) -> int | None:
        """Smallest predicted peak with one of the tensors above 0, (N,), beside the classifier; None: too slow."""
        network, peaks = self.memory, []
        for alone in np.eye(len(network.names), dtype=bool)[(wanted > 0) & ~network.head]:
            if self.times.smallest_ratio_for(alone) <= ratio:
                peaks.append(self.predicted(network.head | alone))
        return min(peaks, default=None)


def importance_peak(profile: Profile, chunk: int) -> int:
    """Predicted peak of the pass that tells importance; the optimizer state lies in a file meanwhile."""
    return with_safety(profile.base_bytes, profile.lines[IMPORTANCE].bytes_at(chunk))


def budget_for(peak_bytes: int, refused: int | None) -> int:
    """Memory budget that holds a predicted peak, also in the next process, rounded up; above one that was refused."""
    return max(-(-(peak_bytes + RESERVED_BYTES + DRIFT_BYTES) // MB) * MB, (refused or 0) + MB)


def nothing_selected(sizes: Sizes, budget: Budget, importance: np.ndarray) -> SnugfitError:
    """The error for a first selection without any tensor beside the classifier: worth, time or memory lacks."""
    ratio, head_alone = budget.time_ratio or 1.0, "train the classifier alone with --scheme head"
    if not (importance[~sizes.memory.head] > 0).any():
        return InfeasibleTimeError(
            "no update of a tensor beside the classifier lowers the loss",
            smallest_ratio=None,
            advice=f"choose another --lr, rank on more images with --importance-batch, or {head_alone}",
        )
    least, smallest = sizes.least(ratio, importance), sizes.times.smallest_ratio_for(importance)
    if least is None or budget.memory_bytes is None:
        return InfeasibleTimeError(
            f"of the tensors that lower the loss none trains in {ratio:g} of a full step's time",
            smallest_ratio=smallest,
            advice=head_alone,
        )
    enough = budget_for(least, budget.memory_bytes)
    return InfeasibleBudgetError(
        f"of the tensors that lower the loss none fits a budget of {budget}.",
        closest="elastic",
        lacking_bytes=enough - budget.memory_bytes,
        smallest_bytes=enough,
    )


def largest_chunk(profile: Profile, budget: Budget, sizes: Sequence[int]) -> int:
    """Most images at once at which the pass that tells importance fits the budget; 0 when none does."""
    line, headroom = profile.lines.get(IMPORTANCE), step_headroom(budget, profile.base_bytes)
    if line is None:
        return 0
    return max((size for size in sizes if size >= line.smallest_batch and line.bytes_at(size) <= headroom), default=0)
