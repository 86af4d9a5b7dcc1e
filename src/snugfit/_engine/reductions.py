"""What would lower the peak of a training step, each change counted by itself."""

from __future__ import annotations

from dataclasses import replace

from snugfit._core.estimate import PROCESS_EXTRA_BYTES, Reduction
from snugfit._core.parts import part_sizes
from snugfit._engine.step_counter import StepCounter
from snugfit.profiling import unit_stats
from snugfit.strategies.checkpoint.candidates import Candidate, find_candidates

PARTS = 4
"""Micro-batches that are counted without a budget."""


def reductions(network: StepCounter, batch: int, memory: int | None, peak: int) -> tuple[Reduction, ...]:
    """Changes to a step of ``batch`` images, with their peaks beside that of the step as it is."""
    found = [_release(network, batch), *_micro_batches(network, batch, memory), *_int8(network, batch)]
    found.append(_recomputation(network, batch, memory))
    found = [each if (each.peak_bytes or 0) < peak else replace(each, why="does not lower this peak") for each in found]
    if memory is None:
        return tuple(found)
    return tuple(
        replace(each, fits=each.peak_bytes is not None and each.peak_bytes + PROCESS_EXTRA_BYTES <= memory)
        for each in found
    )


def _release(network: StepCounter, batch: int) -> Reduction:
    why = "each gradient is applied and freed in the backward pass, with equal results; snugfit train does so by itself"
    return Reduction("gradients released", network.peak(batch, hold=False), why)


def _micro_batches(network: StepCounter, batch: int, memory: int | None) -> list[Reduction]:
    """As few parts as fit a budget, by doubling."""
    most = batch // network.fewest
    if most < 2:
        return []
    parts = min(PARTS, most) if memory is None else 2
    peak = network.peak(batch, parts=parts)
    while memory is not None and peak + PROCESS_EXTRA_BYTES > memory and 2 * parts <= most:
        parts *= 2
        peak = network.peak(batch, parts=parts)
    norms = "; batch norms see one part at a time" if network.has_batch_norms else ""
    why = f"{parts} parts of up to {part_sizes(batch, parts)[0]} images, whose gradients are summed{norms}"
    return [Reduction("micro-batches", peak, why)]


def _int8(network: StepCounter, batch: int) -> list[Reduction]:
    settings = network.options.settings
    if settings.state != "float32":
        return []
    name = "optimizer state in 8 bits"
    if settings.averages:
        return [
            Reduction(name, None, "the state of schedulefree is weights; sgd and adamw have --optimizer-state int8")
        ]
    peak = network.peak(batch, settings=replace(settings, state="int8"))
    return [Reduction(name, peak, "a quarter of the state, rounded at random in each update; --optimizer-state int8")]


def _recomputation(network: StepCounter, batch: int, memory: int | None) -> Reduction:
    """The fastest schedule that fits a budget; without one, or if none fits, that of the least memory."""
    name, chain = "recomputation", network.chain
    if chain is None:
        return Reduction(name, None, f"the network cannot be divided into units: {network.not_divided}")
    against = chain.reasons_against_units(recomputed=True)
    if against:
        return Reduction(name, None, against[0])
    candidates = find_candidates(chain, unit_stats(chain), network.workload(batch))
    chosen, peak = candidates[-1], _peak_of(network, batch, candidates[-1])
    for each in candidates[:-1] if memory is not None else ():
        if each.schedule.recomputes and each.bytes_at(batch, batch, hold=True) + PROCESS_EXTRA_BYTES <= (memory or 0):
            chosen, peak = each, _peak_of(network, batch, each)
            break
    times = f"{chosen.seconds:.2f} times the time" if chosen.schedule.recomputes else "nothing to gain"
    why = f"units {chosen.schedule} (in parentheses: again in the backward pass), about {times}; --strategy checkpoint"
    return Reduction(name, peak, why)


def _peak_of(network: StepCounter, batch: int, candidate: Candidate) -> int:
    return network.peak(batch, schedule=candidate.schedule)
