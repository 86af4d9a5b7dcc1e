"""Settings of ``elastic``, and predicted peaks of selections: bytes of operators, calibrated by measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from snugfit._core.budget import Budget
from snugfit._core.profile import Profile
from snugfit._core.workload import Workload
from snugfit._quantities import MB
from snugfit.errors import InfeasibleBudgetError, InfeasibleTimeError, SnugfitError
from snugfit.selection.choice import Headroom, choose, needed_bytes
from snugfit.selection.network import Mask, Network
from snugfit.selection.timing import StepTimes
from snugfit.strategies.elastic.config import ElasticOptions, ElasticScheme
from snugfit.strategies.elastic.probes import FULL, HEAD, IMPORTANCE
from snugfit.strategies.memory_estimates import (
    DRIFT_BYTES,
    RESERVED_BYTES,
    TENSOR_TO_PROCESS,
    step_headroom,
    with_full_safety,
    with_safety,
)
from snugfit.strategies.micro_batch import MicroBatching

OPERATOR_SHARE = 0.05
"""Share of a selection's tensor bytes that single operators may add: their workspace is not in proportion to tensors. A
selection of VGG-8 took 5 % more than predicted in proportion."""


@dataclass(frozen=True)
class SelectionCosts:
    """Memory and time of selections, in a profiled network at the micro-batches of a step."""

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
        return StepTimes(self._network(self.micro.images(self.workload)))

    def _network(self, batch: int) -> Network:
        if self.profile.tensors is None:
            raise ValueError("the profile holds no tensors")
        return Network(self.profile.tensors, batch, self.workload.optimizer.state_per_parameter)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers."""
        return sum(unit.weight_bytes for unit in self.profile.units)

    def analytic_bytes(self, mask: Mask) -> int:
        """Tensor bytes at the peak of a step with a selection (N,): weights, state, feature maps and gradients."""
        headroom = Headroom(1.0, holds_gradients=self.micro.holds_gradients)
        return self.weight_bytes + needed_bytes(self.memory, mask, headroom)

    def peak(self, mask: Mask) -> int:
        """Predicted peak of a step with a selection (N,), above the memory before it."""
        (least, least_excess), slope = self._overheads[0], self._slope
        analytic = self.analytic_bytes(mask)
        return int(analytic * (1 + OPERATOR_SHARE) + least_excess + slope * max(analytic - least, 0))

    @property
    def _slope(self) -> float:
        """Excess of the measured peak per analytic byte, between the fewest tensors and all."""
        least, most = self._overheads
        return max(most[1] - least[1], 0.0) / max(most[0] - least[0], 1)

    @cached_property
    def _overheads(self) -> tuple[tuple[int, float], tuple[int, float]]:
        """Analytic bytes and excess of the measured peak over them: with the fewest tensors and with all."""
        costs = replace(self, micro=replace(self.micro, micro_batches=1))
        head, full = self.memory.head, self.times.everything
        least, most = costs.analytic_bytes(head), costs.analytic_bytes(full)
        return (least, least * self._excess_share(HEAD, head)), (most, most * self._excess_share(FULL, full))

    def _excess_share(self, probe: str, mask: Mask) -> float:
        """Relative excess of a probe's measured peak over the analytic one, at the nearest measured batch size."""
        line = self.profile.lines.get(probe)
        if line is None or not line.points:
            return TENSOR_TO_PROCESS - 1
        point = min(line.points, key=lambda point: abs(point.batch - self.micro.micro_batch))
        analytic = replace(self, micro=MicroBatching(point.batch)).analytic_bytes(mask)
        return max(point.peak_bytes / analytic - 1, 0.0)

    def predicted_peak(self, mask: Mask) -> int:
        """Predicted peak of an interval with a selection (N,), above the baseline; without the importance pass."""
        return with_safety(self.profile.base_bytes, self.peak(mask))

    def headroom(self, budget: Budget, ratio: float) -> Headroom:
        """Headroom of a selection within a budget: without weights and without overhead beyond tensors."""
        step = step_headroom(budget, self.profile.base_bytes)
        if step == float("inf"):
            return Headroom(ratio, None, self.micro.holds_gradients)
        (least, least_excess), slope = self._overheads[0], self._slope
        analytic = (step - least_excess + slope * least) / (1 + OPERATOR_SHARE + slope)
        return Headroom(ratio, int(analytic) - self.weight_bytes, self.micro.holds_gradients)

    def max_peak(self, budget: Budget, ratio: float) -> int:
        """Upper bound of the predicted peaks of all selections within the budgets."""
        network = self.memory
        alone = (network.own_bytes + network.input_bytes + network.gradient_bytes).astype(np.float64)
        largest = choose(self.times, network, alone, Headroom(ratio))
        passed = int(network.pass_bytes[: int(np.argmax(largest))].sum())
        most = with_safety(self.profile.base_bytes, self.peak(largest) + passed)
        return most if budget.memory_bytes is None else min(most, budget.memory_bytes - RESERVED_BYTES)

    def min_peak(self, ratio: float, wanted: np.ndarray) -> int | None:
        """Smallest predicted peak of the classifier and one tensor with ``wanted`` (N,) > 0; None: all too slow."""
        network, peaks = self.memory, []
        for alone in np.eye(len(network.names), dtype=bool)[(wanted > 0) & ~network.head]:
            if self.times.smallest_ratio_for(alone) <= ratio:
                peaks.append(self.predicted_peak(network.head | alone))
        return min(peaks, default=None)


@dataclass(frozen=True)
class ElasticSettings(ElasticOptions, MicroBatching):
    """Settings of ``elastic``: its options, and values that ``propose`` sets.

    Attributes:
        time_ratio: rho, step time over that of full training.
        budget_bytes: memory budget of selections.
        chunk: images at once in the importance pass.
    """

    name: ClassVar[str] = "elastic"
    exact: ClassVar[bool] = False

    scheme: ElasticScheme = "elastic"
    time_ratio: float | None = None
    budget_bytes: int | None = None
    chunk: int = 0

    @property
    def selects(self) -> bool:
        """Whether tensors are selected at run time."""
        return self.scheme == "elastic"

    @property
    def prunes(self) -> bool:
        """Whether channels are removed at run time."""
        return self.scheme == "prunetrain"

    @property
    def budget(self) -> Budget:
        """The budget of its selections."""
        return Budget(self.budget_bytes, None, self.time_ratio)

    def costs(self, workload: Workload, profile: Profile) -> SelectionCosts:
        """Memory and time of selections with these settings."""
        return SelectionCosts(profile, workload, MicroBatching(self.micro_batch, self.micro_batches))

    def fixed(self, network: Network) -> Mask:
        """The tensors that a baseline trains (N,), bool (ElasticTrainer section 8).

        ``full`` and ``prunetrain`` train everything, ``head`` the classifier (traditional transfer learning),
        ``bn+bias`` all tensors of norms, every bias, and the classifier.
        """
        if self.scheme == "head":
            return network.head
        if self.scheme == "bn+bias":
            norms = np.array(["norm" in network.operators[place].kind.lower() for place in network.place])
            biases = np.array([name.endswith("bias") for name in network.names])
            return np.asarray(norms | biases | network.head)
        return np.ones(len(network.names), dtype=bool)

    def spans(self, epochs: int) -> list[range]:
        """Epochs of each interval."""
        length = self.interval if self.selects or self.prunes else epochs
        return [range(start, min(start + length, epochs)) for start in range(0, epochs, length)]


def importance_peak(profile: Profile, chunk: int) -> int:
    """Predicted peak of the importance pass, during which the optimizer state is in a file."""
    return with_safety(profile.base_bytes, profile.lines[IMPORTANCE].bytes_at(chunk))


def budget_for(peak_bytes: int, refused: int | None) -> int:
    """Memory budget, rounded up, for a predicted peak in this and the next process; above the refused budget."""
    needed = with_full_safety(peak_bytes) + RESERVED_BYTES + DRIFT_BYTES
    return max(-(-needed // MB) * MB, (refused or 0) + MB)


def nothing_selected(costs: SelectionCosts, budget: Budget, importance: np.ndarray) -> SnugfitError:
    """The error if the first selection contains only the classifier, for lack of importance (N,), time or memory."""
    ratio, head_alone = budget.time_ratio or 1.0, "train the classifier alone with --scheme head"
    if not (importance[~costs.memory.head] > 0).any():
        return InfeasibleTimeError(
            "no update of a tensor outside the classifier lowers the loss",
            smallest_ratio=None,
            advice=f"choose another --lr, rank on more images with --importance-batch, or {head_alone}",
        )
    least, smallest = costs.min_peak(ratio, importance), costs.times.smallest_ratio_for(importance)
    if least is None or budget.memory_bytes is None:
        return InfeasibleTimeError(
            f"none of the tensors that lower the loss trains in {ratio:g} of a full step's time",
            smallest_ratio=smallest,
            advice=head_alone,
        )
    enough = budget_for(least, budget.memory_bytes)
    return InfeasibleBudgetError(
        f"none of the tensors that lower the loss fits a budget of {budget}.",
        closest="elastic",
        lacking_bytes=enough - budget.memory_bytes,
        smallest_bytes=enough,
    )


def largest_chunk(profile: Profile, budget: Budget, sizes: Sequence[int]) -> int:
    """Most images at once with which the importance pass fits the budget; 0 if none fits."""
    line, headroom = profile.lines.get(IMPORTANCE), step_headroom(budget, profile.base_bytes)
    if line is None:
        return 0
    return max((size for size in sizes if size >= line.smallest_batch and line.bytes_at(size) <= headroom), default=0)
