"""Keys of measurements: everything that a measurement depends on, as text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from snugfit._chain import Chain
from snugfit._core.serial import to_data
from snugfit._core.workload import Workload
from snugfit._training.strategy import Strategy
from snugfit.profiling import Probe, describe

if TYPE_CHECKING:
    from snugfit.profiling import TensorProbe

Measured = TypeVar("Measured", Probe, "TensorProbe")


def description(workload: Workload, chain: Chain) -> str:
    """What a network computes, as text; empty if no text describes it.

    That is so with a loss or optimizer from Python, and for the forward pass of a network without a graph.
    """
    if "python" in (workload.loss, workload.optimizer.name) or chain.undivided:
        return ""
    return "\n".join(describe(unit.module) for unit in chain.all_units)


def identified(probe: Measured, strategy: Strategy, workload: Workload, network: str) -> Measured:
    """Return the probe with a key of everything that its measurement depends on, except the machine.

    On one machine, measurements with equal keys are interchangeable. The probe's own key, if any, replaces the
    description of the network. Counts of images, epochs, seed and learning rate are not part of the key, nor is the
    strategy if others share the probe. Without a ``network``, it has no key, and is measured in every plan.
    """
    if not network:
        return replace(probe, same="")
    part = probe.same or f"{probe.name}\n{network}"
    optimizer = workload.optimizer
    shared = isinstance(probe, Probe) and probe.shared
    settings = {
        **({} if shared else {"strategy": strategy.name, "settings": to_data(strategy)}),
        "work": {
            "input": workload.input_shape,
            "classes": workload.classes,
            "precision": workload.precision,
            "activations": workload.activations,
            "weights": workload.weight_dtype,
            "optimizer": (optimizer.name, optimizer.momentum > 0, optimizer.weight_decay > 0, optimizer.state),
            "averaged": optimizer.ema is not None,
            "task": (workload.task, workload.anchors, workload.most_boxes),
            "smoothed": workload.label_smoothing > 0,
            "weighted": bool(workload.class_weights),
            "loss": workload.loss,
            "clipped": workload.clip_norm is not None,
            "mixed": workload.mixed,
        },
        "limit": probe.batch_limit,
        "sizes": probe.sizes if isinstance(probe, Probe) else (),
    }
    return replace(probe, same=f"{json.dumps(settings, sort_keys=True)}\n{part}")
