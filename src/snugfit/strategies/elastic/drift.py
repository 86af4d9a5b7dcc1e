"""When steps take other than predicted for long, the operators are measured anew (ElasticTrainer section 5.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from torch import nn

from snugfit._chain import Chain
from snugfit._core.record import IntervalRecord
from snugfit._core.tensors import OperatorFacts, StepSeconds, TensorProfile
from snugfit._training.events import Notice
from snugfit._training.run import Run
from snugfit.profiling.operator import timed
from snugfit.selection.network import Mask, Network
from snugfit.selection.timing import StepTimes
from snugfit.strategies.elastic.budgets import Sizes
from snugfit.strategies.elastic.probes import ElasticProbes
from snugfit.strategies.elastic.settings import ElasticSettings
from snugfit.strategies.elastic.trainer import TensorTrainer
from snugfit.strategies.memory_estimates import random_batch, with_safety

DRIFT = 0.25
"""Share by which steps may differ from their prediction before it counts as drift."""
PAIRS = 7
"""Steps with the selection, and as many with the classifier alone, that decide whether steps have drifted."""
_MAPS = 8
"""Maps of an operator's size, at most, while it is measured: its input, copy, output, gradients and what is kept."""
LEAST_SECONDS = 0.05
"""Steps shorter than this differ by more than that from one epoch to the next anyway."""


def looks_drifted(interval: IntervalRecord) -> bool:
    """Whether the steps of an interval took another time than predicted; perhaps the machine was busy."""
    measured, predicted = interval.measured_seconds, interval.predicted_seconds
    return measured > LEAST_SECONDS and abs(measured / predicted - 1) > DRIFT


def drifted(trainer: TensorTrainer, sizes: Sizes, run: Run, input_shape: tuple[int, ...]) -> bool:
    """Whether steps with the selection take another time than predicted, beside steps of the classifier alone.

    A selection follows from seconds of operators over those of others, so only these can be wrong. Both kinds of step
    are run in turns, and of each the shortest counts: a busy machine lengthens both. Full steps would tell the same,
    but may not fit the memory budget. The steps change nothing.

    Args:
        trainer: with the selection in force.
        sizes: the model of times that the selection was made by.
        run: the run under way.
        input_shape: of one image.
    """
    network = sizes.memory
    predicted = ratio_without_updates(sizes.times, network.mask(trainer.selected))
    head = set(network.selected(network.head))
    batch = random_batch(input_shape, run.workload.classes, sizes.micro.micro_batch, str(run.device))
    alone, selected = float("inf"), float("inf")
    for only in (head, None):  # the first of each generates kernels
        with run.limit.allow_kernels():
            trainer.dry_step(*batch, only)
    for _ in range(PAIRS):
        alone = min(alone, timed(partial(trainer.dry_step, *batch, head), run.device)[1])
        selected = min(selected, timed(partial(trainer.dry_step, *batch), run.device)[1])
        run.tick()
        if abs(selected / alone / predicted - 1) <= DRIFT:
            return False
    return True


def ratio_without_updates(times: StepTimes, mask: Mask) -> float:
    """Predicted seconds of a step with a selection over those of the classifier alone, both without their updates."""
    updates = np.array([tensor.update_seconds for tensor in times.network.tensors])
    head = times.network.head
    return float((times.step_seconds(mask) - updates[mask].sum()) / (times.least - updates[head].sum()))


def profile_again(
    strategy: ElasticSettings, chain: Chain, sizes: Sizes, run: Run, parameters: Iterable[nn.Parameter]
) -> TensorProfile | None:
    """Measure every operator of the network in memory again, at the largest batch that the run's predicted peak holds.

    All ``parameters`` may train in it, not only those of the present selection: the next one is made among all.
    Updates are not run, and neither are whole steps: these are taken to have changed as the sums over operators have.

    Returns:
        The new profile; None if that peak, or the memory budget, does not allow it.
    """
    old = sizes.memory.profile
    probes = ElasticProbes(chain, run.workload, str(run.device), strategy.lean)
    tensors, batch = None, min(old.batch, strategy.micro_batch)
    while batch and profiling_peak(sizes, batch) > run.predicted.peak_bytes:
        batch //= 2
    if batch:
        with _trainable(parameters):
            tensors = probes.tensors(batch, live=True).measure_operators(run.limit)
        run.tick()
    if tensors is None:
        run.emit(Notice("steps have drifted from their prediction, but there is no memory to measure operators anew"))
        return None
    run.emit(Notice("steps have drifted from their prediction; operators were measured anew"))
    tensors = replace(tensors, operators=_with_updates(tensors.operators, old))
    return replace(tensors, steps=_changed(old, tensors))


def profiling_peak(sizes: Sizes, batch: int) -> int:
    """Predicted peak of measuring operators beside the network, its optimizer state and all."""
    operators = sizes.memory.operators
    largest = max((op.output_bytes for op in operators), default=0) * batch
    weights = max((sum(tensor.bytes for tensor in op.tensors) for op in operators), default=0)
    state = sizes.memory.state_bytes(sizes.times.everything)
    held = sizes.weight_bytes + state + 2 * weights + _MAPS * largest
    return with_safety(sizes.profile.base_bytes, held)


def _with_updates(operators: Sequence[OperatorFacts], old: TensorProfile) -> tuple[OperatorFacts, ...]:
    """Operators whose updates take as long as they took before."""
    known = {tensor.name: tensor.update_seconds for tensor in old.tensors}
    return tuple(
        replace(op, tensors=tuple(replace(t, update_seconds=known.get(t.name, 0.0)) for t in op.tensors))
        for op in operators
    )


@contextmanager
def _trainable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which all of them require gradients."""
    flags = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _changed(old: TensorProfile, new: TensorProfile) -> StepSeconds | None:
    """The whole steps, scaled as the sums of their operators have changed."""
    steps = old.steps
    if steps is None:
        return None
    before, after = (Network(profile, steps.batch) for profile in (old, new))
    everything = np.ones(len(before.names), dtype=bool)

    def scale(full: bool) -> float:
        masks = [everything if full else network.head for network in (before, after)]
        sums = [n.forward_seconds() + n.backward_seconds(m) for n, m in zip((before, after), masks, strict=True)]
        return sums[1] / sums[0]

    return StepSeconds(steps.batch, steps.stock * scale(True), steps.full * scale(True), steps.head * scale(False))
