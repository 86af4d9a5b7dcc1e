"""Networks, selections and timed steps for the claims about ``elastic``: all in one process, on made-up images."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Settings
from snugfit import _models as models
from snugfit._chain import Chain, UnitStore, load_into
from snugfit._core.option_groups import DataOptions, ModelOptions, TrainingOptions
from snugfit._core.profile import TensorProfile
from snugfit._core.request import Request
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._engine.builder import assemble
from snugfit._engine.process import baseline, choose_device
from snugfit.lean import use_lean, use_stock
from snugfit.memory import MemoryLimit
from snugfit.memory.scratch import ScratchFile
from snugfit.selection.importance import importance, scratch_bytes
from snugfit.selection.network import Mask, Network
from snugfit.selection.timing import StepTimes
from snugfit.strategies.elastic.probes import ElasticProbes, trial_updates
from snugfit.strategies.elastic.trainer import TensorTrainer, set_modes
from snugfit.strategies.memory_estimates import fill_synthetic_weights, random_batch

IMAGE_SIZE = 224
CLASSES = 200


@dataclass(frozen=True)
class Bench:
    """A profiled network, its time model, and what trains it on one made-up batch.

    Attributes:
        profile: every operator, as ``elastic`` measures it before it plans.
        times: the time model made of it.
        trainer: the network in memory.
        batch: images in a step.
    """

    profile: TensorProfile
    times: StepTimes
    trainer: TensorTrainer
    batch: int
    device: str

    @property
    def network(self) -> Network:
        """The profiled network at the batch."""
        return self.times.network

    def step(self) -> float:
        """Seconds of one training step."""
        images, labels = random_batch((3, IMAGE_SIZE, IMAGE_SIZE), CLASSES, self.batch, self.device)
        started = time.perf_counter()
        self.trainer.step(images, labels)
        return time.perf_counter() - started

    def select(self, mask: Mask, *, lean: bool = True) -> None:
        """Train these tensors from now on."""
        use_lean(self.trainer.module) if lean else use_stock(self.trainer.module)
        self.trainer.select(np.array(self.network.names)[mask])

    def beside_forward(self, mask: Mask, repeats: int) -> dict[str, float]:
        """Median seconds of a step with a selection; and how many forward passes it takes, each timed next to one."""
        self.select(mask)
        images, _ = random_batch((3, IMAGE_SIZE, IMAGE_SIZE), CLASSES, self.batch, self.device)
        turns = [(self.step(), forward_seconds(self.trainer, images)) for _ in range(repeats + 1)][1:]
        return {
            "measured": statistics.median(step for step, _ in turns),
            "passes": statistics.median(step / forward for step, forward in turns),
        }


def bench(settings: Settings) -> Bench:
    """Profile a model of ``settings`` (``model``, ``batch_size``, ``device``) and put it in memory."""
    device = str(choose_device(settings["device"]))
    name, batch = settings["model"], settings["batch_size"]
    with torch.device("meta"):
        chain = Chain.from_module(models.build(name, CLASSES, IMAGE_SIZE), (3, IMAGE_SIZE, IMAGE_SIZE), name)
    workload = Workload(
        name, "made-up", (3, IMAGE_SIZE, IMAGE_SIZE), CLASSES, 1000, 1, 1, batch_size=batch,
        optimizer=OptimizerSettings("sgd", lr=1e-6),
    )  # fmt: skip
    with MemoryLimit(None, baseline(), torch.device(device)) as limit:
        profile = ElasticProbes(chain, workload, device, True).tensors(batch).measure(limit)
    if profile is None:
        raise MemoryError(f"{name} cannot be measured here")
    module = chain.to_module()
    fill_synthetic_weights(module.to_empty(device=device))
    trainer = TensorTrainer(module, chain.forward, workload)
    return Bench(profile, StepTimes(Network(profile, batch)), trainer, batch, device)


def forward_seconds(trainer: TensorTrainer, images: Tensor) -> float:
    """Seconds of a forward pass without gradients."""
    set_modes(trainer.module)
    started = time.perf_counter()
    with torch.no_grad():
        trainer.forward(images)
    return time.perf_counter() - started


def random_masks(network: Network, count: int, seed: int) -> list[Mask]:
    """Selections of every depth and density: those after a random tensor, each with the same random probability."""
    draw = np.random.default_rng(seed)
    masks = []
    for _ in range(count):
        start, density = int(draw.integers(len(network.names))), float(draw.random())
        mask = network.head.copy()
        mask[start:] |= draw.random(len(mask) - start) < density
        mask[start] = True
        masks.append(mask)
    return masks


def alternating(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of several kinds of step, run in turns; the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            times[name].append(step())
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def drawn_importances(
    settings: Settings, weights: Path, sizes: tuple[int, ...], draws: int
) -> dict[int, list[list[float]]]:
    """Importance of every tensor at pre-trained weights, from some draws of each number of images."""
    request = Request(
        model=ModelOptions(settings["model"], str(weights), settings["image_size"]),
        data=DataOptions(settings["data"], max_train=settings["max_train"]),
        training=TrainingOptions(lr=settings["lr"]),
    )
    made = assemble(request)
    data, units = made.training_data(), [unit.module for unit in made.chain.all_units]
    found: dict[int, list[list[float]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        store = UnitStore(Path(folder) / "weights")
        made.store_initial_weights(store)
        for index, unit in enumerate(made.chain.all_units):
            load_into(unit, store.load(index))
            unit.module.eval()
        for size in sizes:
            for draw in range(draws):
                images, labels = next(data.train.epoch(1000 * size + draw, size))
                headroom = scratch_bytes(units, [unit.input_shape for unit in made.chain.all_units], size)
                with ScratchFile(Path(folder) / "scratch", headroom) as scratch:
                    scores = importance(
                        "contribution", units, images, labels, chunk=min(size, 8), scratch=scratch,
                        update=trial_updates(made.workload.optimizer),
                    )  # fmt: skip
                found[size].append(list(scores.values()))
    return found
