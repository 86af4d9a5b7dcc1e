"""The first phase of a pruned run: remove channels, and retrain the pruned blocks to their former outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
from torch import Tensor, fx, nn

from snugfit import surgery
from snugfit._chain import Chain
from snugfit._core.plan import Phase
from snugfit._core.profile import ProbeLine
from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import read_tensors, write_tensors
from snugfit._training.events import Notice
from snugfit._training.loop import stop_if_requested
from snugfit._training.run import Run
from snugfit._training.strategy import BatchSource, TrainingData
from snugfit._upstream import to_channels_last
from snugfit.errors import CheckpointError
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling import Probe
from snugfit.strategies.full_network import load_network
from snugfit.strategies.memory_estimates import fill_synthetic_weights, random_batch, weight_layers, with_safety
from snugfit.strategies.micro_batch import divisors
from snugfit.strategies.sidenet.config import PruneImportance
from snugfit.strategies.sidenet.configurations import PREFIX
from snugfit.strategies.sidenet.frozen import FrozenNetwork

RETRAIN = f"{PREFIX}:retrain"
"""Name of the probe."""
PRUNED_FILE = "pruned.safetensors"
"""Weights of the pruned blocks, in the run folder."""
STEP_IMAGES = 8
"""Images of a retraining step, like the batch that the paper trains at."""
PASS_IMAGES = 1024
"""Most images of a pass; with more images, each pass takes different ones."""
SELECTION_IMAGES = 512
"""Most images for choosing channels and solving blocks: a layer has few weights for the many values of their feature
maps."""
PREPARATION_TIME = 2.0
"""Time per image of choosing channels and solving blocks, over that of a step."""

_CHANNELS, _SOLVED, _RETRAINED = "kept", "solved", "retrained"


@dataclass(frozen=True)
class PrunedPair:
    """A network and its pruned copy, which shares the tensors that retraining does not change.

    ``names`` are those of the tensors that are not shared, and ``until`` the layers of the classifier.
    """

    teacher: fx.GraphModule
    pruned: fx.GraphModule
    cuts: dict[str, surgery.Cut]
    input_shape: tuple[int, ...]
    names: frozenset[str]
    until: frozenset[str]

    @property
    def blocks(self) -> surgery.TeacherStudent:
        """Both networks block by block."""
        return surgery.TeacherStudent(self.teacher, self.pruned, self.cuts, self.input_shape)

    @property
    def state(self) -> dict[str, Tensor]:
        """The pruned and retrained tensors by name, in their pruned shapes."""
        return {name: tensor for name, tensor in self.pruned.state_dict().items() if name in self.names}

    def joint(self, steps: int, micro_batch: int) -> surgery.JointDistillation:
        """The joint retraining of all pruned blocks."""
        return surgery.JointDistillation(
            self.blocks, trained=self.names, until=self.until, steps=steps, micro_batch=micro_batch
        )


@dataclass(frozen=True)
class Retraining:
    """How a network is pruned and retrained; without epochs, the solved weights stay."""

    frozen: FrozenNetwork
    importance: PruneImportance
    epochs: int

    def choose_channels(
        self, teacher: fx.GraphModule, batches: Callable[[], Iterable[Tensor]], micro_batch: int
    ) -> dict[str, list[int]]:
        """The channels that each pruned group keeps, chosen on images (batch, *input_shape)."""
        groups, widths = self.frozen.pruned_groups, self.frozen.widths
        if self.importance == "reconstruction":
            return surgery.channels_by_reconstruction(teacher, groups, widths, batches, micro_batch=micro_batch)
        found = surgery.channel_importance(teacher, groups, batches(), by=self.importance, micro_batch=micro_batch)
        return surgery.most_important(found, widths)

    def prune(self, teacher: fx.GraphModule, kept: dict[str, list[int]]) -> PrunedPair:
        """The full network and a pruned copy with these channels."""
        frozen = self.frozen
        pruned = surgery.copy_for_pruning(teacher, frozen.input_shape, frozen.pruned_groups)
        cuts = surgery.remove_channels(pruned, frozen.pruned_groups, kept)
        names = frozen.pruned_names(pruned)
        until = {name.rpartition(".")[0] for name in frozen.classifier}
        names |= surgery.later_biases(pruned, names, until)
        return PrunedPair(teacher, pruned, cuts, frozen.input_shape, frozenset(names), frozenset(until))


def retraining_probe(retraining: Retraining, chain: Chain, workload: Workload, device: str) -> Probe:
    """The probe of pruning and retraining on one step's images; its size is the number in memory at once."""
    shape = chain.input_shape

    def images(count: int, on: str) -> Tensor:
        return random_batch(shape, workload.classes, count, on)[0]

    def build() -> Callable[[int], object]:
        module = cast(fx.GraphModule, copy.deepcopy(chain).to_module())
        fill_synthetic_weights(module.to_empty(device=device))

        def step(micro_batch: int) -> None:
            batch = images(STEP_IMAGES, device)
            pair = retraining.prune(module, retraining.choose_channels(module, lambda: [batch], micro_batch))
            surgery.distil(pair.blocks, lambda: [batch], micro_batch=micro_batch)
            if retraining.epochs:
                pair.joint(1, micro_batch).step(batch)

        return step

    def floor(micro_batch: int) -> int:
        module = chain.to_module()
        inputs = images(micro_batch, "meta")

        def forward() -> None:
            with torch.no_grad():
                module.eval()(inputs)

        return tensor_peak_bytes(forward, [module, inputs])

    layers, sizes = weight_layers(chain), divisors(STEP_IMAGES)
    return Probe(RETRAIN, build, floor, STEP_IMAGES, sizes=sizes, layers=layers, network=PREFIX, heap="nothing")


def retrain_phase(line: ProbeLine, headroom: float, resident_bytes: int, images: int, epochs: int) -> Phase | None:
    """The phase at the largest micro-batch that fits in ``headroom`` bytes; None if none fits.

    ``images`` are available, for ``epochs`` passes of steps; ``resident_bytes`` are in memory before the phase.
    """
    sizes = [size for size in divisors(STEP_IMAGES) if size >= line.smallest_batch and line.bytes_at(size) <= headroom]
    if not sizes:
        return None
    passes = PREPARATION_TIME * min(images, SELECTION_IMAGES) + epochs * min(images, PASS_IMAGES)
    seconds = line.seconds_at(sizes[-1]) / STEP_IMAGES * passes / (PREPARATION_TIME + bool(epochs))
    return Phase("prune", with_safety(resident_bytes, line.bytes_at(sizes[-1])), seconds, sizes[-1], steps=False)


def prune_and_retrain(retraining: Retraining, chain: Chain, data: TrainingData, run: Run) -> None:
    """Run the phase, or the rest of it, and write the pruned blocks into the run folder.

    A checkpoint is written after every block and every pass, so that a resumed run repeats none of them.
    """
    phase, position = run.predicted.phases[run.position.phase], run.position
    source, notes = data.others.get("retrain_data", data.train), position.notes
    run.start_phase(phase, position.phase, len(run.predicted.phases), 1, 1)
    teacher = cast(fx.GraphModule, load_network(chain, run)).eval()

    def selection() -> Iterator[Tensor]:
        return _images(source, run, 0, SELECTION_IMAGES)

    with run.limit.allow_kernels():
        if _CHANNELS not in notes:
            notes[_CHANNELS] = retraining.choose_channels(teacher, selection, phase.batch_size)
        pair = retraining.prune(teacher, notes[_CHANNELS])
        if run.resumed:
            pair.pruned.load_state_dict(run.resumed_tensors("pruned"), strict=False)

        def save_block(found: surgery.BlockDistillation) -> None:
            position.step += 1
            notes.setdefault(_SOLVED, []).append([found.block, found.before, found.after])
            run.emit(Notice(f"block {found.block}: its error fell from {found.before:.3f} to {found.after:.3f}"))
            run.save({"pruned": pair.state})
            stop_if_requested(run)

        done = len(notes.get(_SOLVED, []))
        surgery.distil(pair.blocks, selection, micro_batch=phase.batch_size, done=done, on_block=save_block)
        _retrain(retraining, pair, source, phase.batch_size, run)
    write_tensors(run.folder / PRUNED_FILE, pair.state, run.manifest)
    run.end_phase(phase, 1, 1)
    run.save({})
    stop_if_requested(run)


def _retrain(retraining: Retraining, pair: PrunedPair, source: BatchSource, micro_batch: int, run: Run) -> None:
    """Train all pruned blocks together, from the first unfinished pass on."""
    done = run.position.notes.setdefault(_RETRAINED, [])
    steps = min(source.steps(min(STEP_IMAGES, len(source))), PASS_IMAGES // STEP_IMAGES)
    if len(done) >= retraining.epochs:
        return
    joint = pair.joint(steps * retraining.epochs, micro_batch)
    if done:
        joint.load_state(run.resumed_tensors("joint"), steps * len(done))
    for epoch in range(len(done), retraining.epochs):
        errors = [joint.step(images) for images in _images(source, run, epoch + 1, PASS_IMAGES)]
        done.append(sum(errors) / len(errors))
        run.position.step += 1
        run.emit(Notice(f"retraining, pass {epoch + 1} of {retraining.epochs}: error {done[-1]:.3f}"))
        run.save({"pruned": pair.state, "joint": joint.state()})
        stop_if_requested(run)


def _images(source: BatchSource, run: Run, epoch: int, most: int) -> Iterator[Tensor]:
    """Images (batch, *input_shape) of one pass, without labels; a repeated pass takes the same images."""
    for images, _ in islice(source.epoch(epoch, min(STEP_IMAGES, len(source))), max(most // STEP_IMAGES, 1)):
        run.tick()
        yield images.to(run.device)


def load_pruned(module: nn.Module, run: Run) -> None:
    """Replace blocks of a network with initial weights by the run's pruned blocks, in place.

    Raises:
        CheckpointError: the file of the blocks is missing, damaged, or of another network.
    """
    path = run.folder / PRUNED_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the run cannot be resumed without it. Start a new run.")
    state = read_tensors(path)
    surgery.adopt_widths(module, state)
    to_channels_last(module)
    module.load_state_dict(state, strict=False)
