"""Keys of measurements: on one machine, measurements with equal keys are interchangeable."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypeVar

from snugfit._core.serial import to_data
from snugfit._core.workload import Workload
from snugfit._training.strategy import Strategy
from snugfit.profiling import Probe, TensorProbe

Measured = TypeVar("Measured", Probe, TensorProbe)


def identified(probe: Measured, strategy: Strategy, workload: Workload, network: str) -> Measured:
    """Return the probe with a key of everything that its measurement depends on, except the machine.

    Args:
        probe: probe of a strategy; its own key, if any, replaces the description of the network.
        strategy: the strategy; the measurement may depend on its settings.
        workload: the workload; counts of images, epochs, seed and learning rate are not part of the key.
        network: description of the whole network.
    """
    part = probe.same or f"{probe.name}\n{network}"
    sizes = probe.sizes if isinstance(probe, Probe) else ()
    settings = {
        "strategy": strategy.name,
        "settings": to_data(strategy),
        "work": _work(workload),
        "limit": probe.batch_limit,
        "sizes": sizes,
    }
    return replace(probe, same=f"{json.dumps(settings, sort_keys=True)}\n{part}")


def _work(workload: Workload) -> dict[str, object]:
    optimizer = workload.optimizer
    return {
        "input": workload.input_shape,
        "classes": workload.classes,
        "precision": workload.precision,
        "optimizer": (optimizer.name, optimizer.momentum > 0, optimizer.weight_decay > 0),
        "task": (workload.task, workload.anchors, workload.most_boxes),
    }
