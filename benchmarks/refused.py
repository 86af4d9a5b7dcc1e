"""Whether a strategy that is said not to fit a budget is really refused memory there, at its smallest setting.

Loads data and network under the enforced limit as a plan does, then runs two training steps of what the strategy would
measure, on made-up images: of the least of its ways at the fewest images where any way would do, and of the neediest
part where it needs every one (units in ``blockwise``). Prints one JSON object.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.common import program
from snugfit._core.amounts import parse_bytes
from snugfit._core.option_groups import BudgetOptions, DataOptions, ModelOptions, TrainingOptions
from snugfit._core.request import Request, StrategyOptions
from snugfit._engine.builder import assemble, make_strategies
from snugfit._engine.process import choose_device, describe_hardware
from snugfit.memory import MemoryLimit, PeakMeter, is_out_of_memory, make_meter, prepare_process
from snugfit.profiling import META_PASS_BYTES, Probe, smallest_floor

NEEDS_ALL = {"blockwise": ("",), "elastic": ("elastic:head", "elastic:importance")}
"""Strategies that need every part, and how the names of those parts begin; of any other strategy one way will do."""

app = program("refused")


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Attributes:
        probe: the step.
        batch: images.
        floor_bytes: its tensors, as known without running it.
    """

    probe: Probe
    batch: int
    floor_bytes: int


@app.default
def main(
    *,
    model: str,
    strategy: str,
    memory: str,
    data: str = "cifar10",
    image_size: int | None = None,
    max_train: int | None = None,
    max_val: int | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    device: str | None = None,
    threads: int | None = None,
) -> None:
    """Try a strategy's smallest setting under a memory limit; the flags are those of ``snugfit train``.

    Args:
        model: network.
        strategy: strategy.
        memory: memory budget.
        data: data set, from the folder SNUGFIT_DATA.
        image_size: side of the images in pixels.
        max_train: training images.
        max_val: validation (and test) images.
        epochs: epochs.
        batch_size: effective batch size.
        device: cpu or cuda[:N].
        threads: compute threads.
    """
    request = Request(
        model=ModelOptions(model=model, image_size=image_size),
        data=DataOptions(data=data, max_train=max_train, max_val=max_val),
        budget=BudgetOptions(memory=memory),
        training=TrainingOptions(epochs=epochs, batch_size=batch_size),
        strategy=StrategyOptions(strategy=strategy),
    )
    chosen, baseline = choose_device(device), prepare_process(threads)
    meter = make_meter(baseline, chosen)
    with MemoryLimit(parse_bytes(memory), baseline, chosen) as limit:
        found = attempt(request, limit, meter)
        found["peak_bytes"] = meter.mark()
    print(json.dumps(found))


def attempt(request: Request, limit: MemoryLimit, meter: PeakMeter) -> dict[str, Any]:
    """Load everything and run the steps: ``refused``, and what was tried."""
    tried: dict[str, Any] = {"tried": "loading data and network", "batch": 0}
    try:
        trial = smallest_trial(request, limit)
        tried = {"tried": trial.probe.name, "batch": trial.batch, "floor_bytes": trial.floor_bytes}
        meter.restart()
        with limit.allow_kernels():
            step = trial.probe.build()
            step(trial.batch)
        step(trial.batch)  # with optimizer state
    except (RuntimeError, MemoryError, SystemError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        return {**tried, "refused": True}
    return {**tried, "refused": False}


def smallest_trial(request: Request, limit: MemoryLimit) -> Trial:
    """The step that must fit if the strategy is to."""
    assembly = assemble(request)
    hardware, (strategy,) = describe_hardware(choose_device(None)), make_strategies(request).strategies
    parts = NEEDS_ALL.get(request.strategy.strategy)
    with limit.allow_address_space(META_PASS_BYTES):
        probes = strategy.probes(assembly.workload, assembly.chain, hardware)
        steps = [probe for probe in probes if isinstance(probe, Probe) and probe.name.startswith(parts or ("",))]
        trials = [Trial(probe, *smallest_floor(probe.floor)) for probe in steps]
    return (max if parts else min)(trials, key=lambda trial: trial.floor_bytes)


if __name__ == "__main__":
    app()
