"""Measure the operators again when step time drifts from its prediction (ElasticTrainer section 5.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from torch import nn

from snugfit._chain import Chain
from snugfit._core.profile import StepSeconds, TensorProfile
from snugfit._core.record import IntervalRecord
from snugfit._training.events import Notice
from snugfit._training.run import Run
from snugfit.profiling.operator import timed
from snugfit.selection.network import Mask, Network
from snugfit.selection.timing import StepTimes
from snugfit.strategies.elastic.budgets import ElasticSettings, SelectionCosts
from snugfit.strategies.elastic.probes import ElasticProbes
from snugfit.strategies.elastic.trainer import TensorTrainer
from snugfit.strategies.memory_estimates import random_batch, with_safety

DRIFT = 0.25
"""Relative difference between measured and predicted step time above which it counts as drift."""
STEP_PAIRS = 7
"""Steps with the selection, and steps with only the classifier, that are run to detect drift."""
_FEATURE_MAPS = 8
"""Most feature maps of an operator's size during its measurement: input, copy, output, gradients, kept tensors."""
MIN_STEP_SECONDS = 0.05
"""Shorter steps vary by more than ``DRIFT`` between epochs."""


def looks_drifted(interval: IntervalRecord) -> bool:
    """Whether step time in an interval differs from its prediction; the machine may have been busy."""
    measured, predicted = interval.measured_seconds, interval.predicted_seconds
    return measured > MIN_STEP_SECONDS and abs(measured / predicted - 1) > DRIFT


def drifted(trainer: TensorTrainer, costs: SelectionCosts, run: Run, input_shape: tuple[int, ...]) -> bool:
    """Whether steps with the selection, relative to steps of only the classifier, differ from their prediction.

    A selection depends on ratios of operator times, so only ratios matter. Both kinds of step alternate, and the
    shortest of each counts, because a busy machine lengthens both. Full steps may not fit the memory budget. The steps
    change nothing.
    """
    network = costs.memory
    predicted = ratio_without_updates(costs.times, network.mask(trainer.selected))
    head = set(network.selected(network.head))
    batch = random_batch(input_shape, run.workload.classes, costs.micro.micro_batch, str(run.device))
    alone, selected = float("inf"), float("inf")
    for only in (head, None):  # the first of each generates kernels
        with run.limit.allow_kernels():
            trainer.dry_step(*batch, only)
    for _ in range(STEP_PAIRS):
        alone = min(alone, timed(partial(trainer.dry_step, *batch, head), run.device)[1])
        selected = min(selected, timed(partial(trainer.dry_step, *batch), run.device)[1])
        run.tick()
        if abs(selected / alone / predicted - 1) <= DRIFT:
            return False
    return True


def ratio_without_updates(times: StepTimes, mask: Mask) -> float:
    """Predicted seconds of a step with a selection (N,) over one of only the classifier, both without updates."""
    updates = np.array([tensor.update_seconds for tensor in times.network.tensors])
    head = times.network.head
    return float((times.step_seconds(mask) - updates[mask].sum()) / (times.least - updates[head].sum()))


def profile_again(
    strategy: ElasticSettings, chain: Chain, costs: SelectionCosts, run: Run, parameters: Iterable[nn.Parameter]
) -> TensorProfile | None:
    """Measure every operator of the network in memory again, at the largest batch within the run's predicted peak.

    All ``parameters`` may train, because the next selection chooses among all of them. Neither updates nor whole steps
    are run: times of updates stay, and those of whole steps are scaled by the change in the sums over operators.

    Returns:
        The new profile; None if the predicted peak or the memory budget does not allow it.
    """
    old, tensors = costs.memory.profile, None
    batch = min(old.batch, strategy.micro_batch)
    while batch and profiling_peak(costs, batch) > run.predicted.least_peak_bytes:
        batch //= 2
    if batch:
        probes = ElasticProbes(chain, run.workload, str(run.device), strategy.lean)
        with _trainable(parameters):
            tensors = probes.tensors(batch, live=True).measure_operators(run.limit)
        run.tick()
    if tensors is None:
        run.emit(Notice("steps have drifted from their prediction, but there is no memory to measure operators again"))
        return None
    run.emit(Notice("steps have drifted from their prediction; operators were measured again"))
    known = {tensor.name: tensor.update_seconds for tensor in old.tensors}
    operators = tuple(
        replace(op, tensors=tuple(replace(t, update_seconds=known.get(t.name, 0.0)) for t in op.tensors))
        for op in tensors.operators
    )
    tensors = replace(tensors, operators=operators)
    return replace(tensors, steps=_scaled_steps(old, tensors))


def profiling_peak(costs: SelectionCosts, batch: int) -> int:
    """Predicted peak of measuring operators with the network and its whole optimizer state in memory."""
    operators = costs.memory.operators
    largest = max((op.output_bytes for op in operators), default=0) * batch
    weights = max((sum(tensor.bytes for tensor in op.tensors) for op in operators), default=0)
    state = costs.memory.state_bytes(costs.times.everything)
    held = costs.weight_bytes + state + 2 * weights + _FEATURE_MAPS * largest
    return with_safety(costs.profile.base_bytes, held)


@contextmanager
def _trainable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which all parameters require gradients."""
    flags = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _scaled_steps(old: TensorProfile, new: TensorProfile) -> StepSeconds | None:
    """Times of whole steps, scaled by the change in the sums over operators."""
    steps = old.steps
    if steps is None:
        return None
    before, after = (Network(profile, steps.batch) for profile in (old, new))

    def seconds(network: Network, *, full: bool) -> float:
        mask = np.ones(len(network.names), dtype=bool) if full else network.head
        return network.forward_seconds() + network.backward_seconds(mask)

    full, head = (seconds(after, full=each) / seconds(before, full=each) for each in (True, False))
    return replace(steps, stock=steps.stock * full, full=steps.full * full, head=steps.head * head)
