"""The first phase of a pruned run: channels are removed, and what is left learns to do what the network did before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
from torch import Tensor, fx, nn

from snugfit.chain import Chain
from snugfit.chain.store import write_tensors
from snugfit.core.cost import Phase
from snugfit.core.profile import ProbeLine
from snugfit.core.request import PruneImportance
from snugfit.core.workload import Workload
from snugfit.errors import CheckpointError
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling import Probe
from snugfit.strategies.prediction import fill_made_up, random_batch, with_safety
from snugfit.strategies.sidenet.configurations import PREFIX
from snugfit.strategies.sidenet.frozen import Frozen
from snugfit.strategies.whole import divisors, load_network
from snugfit.surgery import (
    Cut,
    Recipe,
    adopt_widths,
    channel_importance,
    distil,
    most_important,
    pruned_twin,
    remove_channels,
)
from snugfit.training.events import Notice
from snugfit.training.loop import BatchSource, stop_if_asked
from snugfit.training.run import Run
from snugfit.training.split import TrainingData
from snugfit.training.tensorfile import read_tensors

RETRAIN = f"{PREFIX}:retrain"
"""Name of the probe."""
PRUNED_FILE = "pruned.safetensors"
"""Weights of the pruned blocks, in the run folder."""
STEP_IMAGES = 8
"""Images of a retraining step, like the batch that the paper trains at."""
MOST_IMAGES = 512
"""Images that are looked at, at most: a layer has few weights for the many values of their maps."""

_KEPT, _RETRAINED = "kept", "retrained"


@dataclass(frozen=True)
class Retraining:
    """How a network is pruned and retrained.

    Attributes:
        frozen: the network, and its widths.
        importance: what channels are ranked by.
        epochs: passes over the images with steps.
    """

    frozen: Frozen
    importance: PruneImportance
    epochs: int

    def recipe(self, micro_batch: int) -> Recipe:
        """How a block is retrained with so many images in memory at once."""
        return Recipe(epochs=self.epochs, micro_batch=micro_batch)

    def kept(self, teacher: fx.GraphModule, batches: Iterable[Tensor], micro_batch: int) -> dict[str, list[int]]:
        """The channels that stay of each group that loses some."""
        found = channel_importance(teacher, self.frozen.narrowed, batches, by=self.importance, micro_batch=micro_batch)
        return most_important(found, self.frozen.widths)

    def twin(self, teacher: fx.GraphModule, kept: dict[str, list[int]]) -> tuple[fx.GraphModule, dict[str, Cut]]:
        """The pruned network beside the other one, and what was left of its tensors."""
        groups = self.frozen.narrowed
        twin = pruned_twin(teacher, self.frozen.input_shape, groups)
        return twin, remove_channels(twin, groups, kept)


def retraining_probe(retraining: Retraining, chain: Chain, workload: Workload, device: str) -> Probe:
    """The probe of pruning and retraining on one step's images; its size is how many are in memory at once."""
    shape = chain.input_shape

    def images(count: int, where: str) -> Tensor:
        return random_batch(shape, workload.classes, count, where)[0]

    def build() -> Callable[[int], object]:
        module = cast(fx.GraphModule, copy.deepcopy(chain).to_module())
        fill_made_up(module.to_empty(device=device))

        def step(micro_batch: int) -> None:
            batch = images(STEP_IMAGES, device)
            twin, cuts = retraining.twin(module, retraining.kept(module, [batch], micro_batch))
            distil(module, twin, cuts, lambda _: [batch], shape, retraining.recipe(micro_batch))

        return step

    def floor(micro_batch: int) -> int:
        module = chain.to_module()
        inputs = images(micro_batch, "meta")

        def forward() -> None:
            with torch.no_grad():
                module.eval()(inputs)

        return tensor_peak_bytes(forward, [module, inputs])

    layers = sum(isinstance(layer, (nn.Conv2d, nn.Linear)) for layer in chain.to_module().modules())
    return Probe(RETRAIN, build, floor, STEP_IMAGES, sizes=divisors(STEP_IMAGES), layers=layers, network=PREFIX)


def retrain_phase(line: ProbeLine, room: float, resident_bytes: int, images: int) -> Phase | None:
    """The phase at the largest micro-batch that fits in ``room`` bytes, over so many images; None where none does."""
    sizes = [size for size in divisors(STEP_IMAGES) if size >= line.smallest_batch and line.bytes_at(size) <= room]
    if not sizes:
        return None
    seconds = line.seconds_at(sizes[-1]) * min(images, MOST_IMAGES) / STEP_IMAGES
    return Phase("prune", with_safety(resident_bytes, line.bytes_at(sizes[-1])), seconds, sizes[-1])


def prune_and_retrain(retraining: Retraining, chain: Chain, data: TrainingData, run: Run) -> None:
    """Run the phase, or what is left of it, and write the pruned blocks into the run folder.

    What was decided and learnt is kept after every block, and never made anew.
    """
    phase, position = run.predicted.phases[run.position.phase], run.position
    source = data.retrain or data.train
    run.start_phase(phase, position.phase, len(run.predicted.phases), 1, 1)
    teacher = cast(fx.GraphModule, load_network(chain, run)).eval()
    shape, notes = retraining.frozen.input_shape, position.notes
    with run.limit.room_for_kernels():
        if _KEPT not in notes:
            notes[_KEPT] = retraining.kept(teacher, _images(source, run), phase.batch_size)
        twin, cuts = retraining.twin(teacher, notes[_KEPT])
        names = retraining.frozen.pruned_names(twin)
        if run.resumed:
            twin.load_state_dict(run.resumed_tensors("pruned"), strict=False)

        def state() -> dict[str, Tensor]:
            return {name: tensor for name, tensor in twin.state_dict().items() if name in names}

        def keep(block: int, before: float, after: float) -> None:
            position.step += 1
            notes.setdefault(_RETRAINED, []).append([block, before, after])
            run.emit(Notice(f"block {block} retrained: its error fell from {before:.3f} to {after:.3f}"))
            run.save({"pruned": state()})
            stop_if_asked(run)

        distil(
            teacher, twin, cuts, lambda _: _images(source, run), shape,
            retraining.recipe(phase.batch_size), done=len(notes.get(_RETRAINED, [])),
            on_block=lambda found: keep(found.block, found.before, found.after),
        )  # fmt: skip
    write_tensors(run.folder / PRUNED_FILE, state())
    run.end_phase(phase, 1, 1)
    run.save({})
    stop_if_asked(run)


def _images(source: BatchSource, run: Run) -> Iterator[Tensor]:
    """Images of one pass, without their labels; the same ones in every pass, shuffled alike."""
    steps = max(MOST_IMAGES // STEP_IMAGES, 1)
    for images, _ in islice(source.epoch(0, min(STEP_IMAGES, len(source))), steps):
        run.tick()
        yield images.to(run.device)


def take_pruned(module: nn.Module, run: Run) -> None:
    """Give a network with the run's first weights the pruned blocks that the run has made.

    Raises:
        CheckpointError: they are missing, damaged, or of another network.
    """
    path = run.folder / PRUNED_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, without which the run cannot go on; start it anew.")
    state = read_tensors(path)
    adopt_widths(module, state)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.load_state_dict(state, strict=False)
