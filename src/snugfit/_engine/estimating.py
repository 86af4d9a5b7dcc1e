"""Estimates of a training step's memory, why it needs that, and what would lower it, each change counted by itself.

See :mod:`snugfit._engine.step_counter`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from snugfit._chain.store import copy_empty
from snugfit._core.amounts import parse_batches, parse_bytes
from snugfit._core.estimate import KINDS, PROCESS_EXTRA_BYTES, EstimateOptions, MemoryEstimate, Reduction, StepEstimate
from snugfit._core.parts import part_sizes
from snugfit._engine.loading import ModuleOrFactory, build_on_meta
from snugfit._engine.step_counter import StepCounter
from snugfit._quantities import format_bytes
from snugfit.errors import ModelError, first_line
from snugfit.memory.deferred_imports import defer_imports
from snugfit.memory.process import library_import
from snugfit.memory.step_bytes import UPDATE
from snugfit.profiling import unit_stats
from snugfit.strategies.checkpoint.candidates import find_candidates

PARTS = 4
"""Micro-batches that are counted without a budget."""


def estimate_step(model: str | ModuleOrFactory, options: EstimateOptions) -> MemoryEstimate:
    """How much memory training needs; see :func:`snugfit.estimate`."""
    defer_imports(library_import)
    network = StepCounter(*_on_meta(model, options), options)
    memory = None if options.memory is None else parse_bytes(options.memory)
    sizes = list(parse_batches(options.batch_size))
    largest = None
    with network.failures():
        if memory is not None:
            largest = network.largest_batch(memory)
            sizes += [largest] * (largest > 0 and largest not in sizes)
        steps = tuple(_step(network, size, memory) for size in dict.fromkeys(sizes))
    if options.measure:
        steps = tuple(replace(each, measured_bytes=network.measured(each.batch_size)) for each in steps)
    return MemoryEstimate(
        model=network.name,
        input_shape=options.shape,
        parameters=sum(parameter.numel() for parameter in network.module.parameters()),
        optimizer=options.optimizer,
        steps=steps,
        notes=_notes(network, steps[0]),
        divided=network.chain is not None,
        memory_bytes=memory,
        largest_batch=largest,
        inputs=options.inputs,
    )


def _on_meta(model: str | ModuleOrFactory, options: EstimateOptions) -> tuple[nn.Module, str]:
    """An own copy of the network without weights, and its name."""
    if isinstance(model, str):
        return build_on_meta(model, options.classes or 10, options.shape), model
    if not isinstance(model, nn.Module):
        try:
            with torch.device("meta"):
                model = model()
        except Exception as error:
            raise ModelError(
                f"the function that makes the model fails on the meta device ({first_line(error)}); pass the module."
            ) from error
    try:
        return copy_empty(model, model, "meta"), type(model).__name__
    except Exception as error:
        raise ModelError(f"{type(model).__name__} cannot be copied without weights: {first_line(error)}.") from error


def _step(network: StepCounter, batch: int, memory: int | None) -> StepEstimate:
    counter = network.by_kind(batch)
    at_peak: dict[Any, int] = counter.bytes_at_peak()
    during: Literal["forward", "backward", "update"]
    during = "update" if counter.peak_layer == UPDATE else "backward" if counter.peak_backward else "forward"
    return StepEstimate(
        batch_size=batch,
        peak_bytes=counter.peak,
        layer=counter.peak_layer,
        during=during,
        at_peak=at_peak,
        whole={kind: counter.marked[kind] for kind in at_peak if kind != "temporaries"},
        lower=reductions(network, batch, memory, counter.peak),
        fits=None if memory is None else counter.peak + PROCESS_EXTRA_BYTES <= memory,
    )


def _notes(network: StepCounter, step: StepEstimate) -> tuple[str, ...]:
    """Why a step needs what it needs, in short lines."""
    kind, most = max(step.at_peak.items(), key=lambda item: item[1])
    place = {"update": "the update", "forward": f"the forward pass of {step.layer}"}
    where = place.get(step.during, f"the backward pass of {step.layer}")
    state = network.options.settings.state_per_parameter
    notes = [
        f"At batch {step.batch_size} the peak is in {where}; {most / step.peak_bytes:.0%} of it are {KINDS[kind]}.",
        f"Each image keeps {format_bytes(step.whole['activations'] / step.batch_size)} for the backward pass; weights, "
        f"gradients and optimizer state ({state:g} x the trained weights) do not depend on the batch size.",
    ]
    if network.chain is None:
        notes.append(f"The network was counted as a whole, because it cannot be divided: {network.not_divided}")
    return tuple(notes)


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
    room = -1 if memory is None else memory - PROCESS_EXTRA_BYTES
    fitting = (
        each for each in candidates if each.schedule.recomputes and each.bytes_at(batch, batch, hold=True) <= room
    )
    chosen = next(fitting, None) or min(candidates, key=lambda each: (each.batch_bytes, each.seconds))
    times = f"{chosen.seconds:.2f} times the time" if chosen.schedule.recomputes else "nothing to gain"
    why = f"units {chosen.schedule} (in parentheses: again in the backward pass), about {times}; --strategy checkpoint"
    return Reduction(name, network.peak(batch, schedule=chosen.schedule), why)
