"""Retraining of pruned blocks without labels: each reproduces the output of the block before pruning.

The paper retrains on ImageNet (Yoosefi et al., section V, step 3), which a device does not have. Here the unpruned
network is the teacher, on any images, block by block in order of execution. A block's input comes from the pruned
blocks before it, its target from the teacher on the same images, so that it also compensates for their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain.blocks import find_blocks
from snugfit._chain.propagation import in_mode
from snugfit._chain.subgraph import subgraph_module
from snugfit.errors import DivergedError, ModelError, UsageError
from snugfit.surgery.reconstruction import Regression
from snugfit.surgery.reshape import Cut

Batches = Callable[[], Iterable[Tensor]]
"""Images of one pass, (B, C, H, W) each; the same ones at every call."""


@dataclass(frozen=True)
class BlockDistillation:
    """The result of retraining one block, by its index into ``find_blocks``.

    Attributes:
        solved: layers whose weights were found in closed form; none if that would not bring the block closer.
        before, after: squared error of the block's output divided by the squared sum of the teacher's, including errors
            of earlier blocks that reached its input.
    """

    block: int
    solved: tuple[str, ...]
    before: float
    after: float


def distil(
    pair: TeacherStudent,
    batches: Batches,
    *,
    ridge: float = 1e-3,
    micro_batch: int = 8,
    done: int = 0,
    on_block: Callable[[BlockDistillation], object] | None = None,
) -> list[BlockDistillation]:
    """Solve for the weights of every block that reads fewer channels than before; change nothing else.

    Layers that lost inputs get the weights of a ridge regression. Memory holds the teacher's and the student's prefix
    running micro-batches without a graph. BatchNorm stays in evaluation mode and keeps its scale.
    :class:`JointDistillation` can train all blocks together afterwards.

    Args:
        pair: the two networks.
        batches: images without labels.
        ridge: how strongly the current weights are kept, in units of the inputs' mean square.
        micro_batch: images run at once.
        done: number of blocks retrained before an interruption; the student has their weights.
        on_block: called with every finished block.

    Raises:
        UsageError: there are no images.
        DivergedError: a block's error is infinite or not a number.
    """
    with in_mode(pair.modules[0]), in_mode(pair.student):
        found = []
        for block in pair.readers[done:]:
            found.append(_retrain(pair, block, lambda: _micro_batches(batches(), micro_batch), ridge))
            if on_block is not None:
                on_block(found[-1])
        return found


def _micro_batches(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Images (B, C, H, W) in parts of at most ``size``."""
    for batch in batches:
        yield from torch.split(batch, size)


class TeacherStudent:
    """A teacher and a student with the same layers, block by block.

    Args:
        teacher: the network before channels were removed. It may share the weights of unpruned blocks with the student
            (``copy_for_pruning``) and is not changed.
        student: the network after removal.
        cuts: from ``remove_channels``.
        input_shape: channels, height, width of one image.

    Raises:
        ModelError: the networks have different layers.
    """

    def __init__(
        self, teacher: fx.GraphModule, student: fx.GraphModule, cuts: Mapping[str, Cut], input_shape: tuple[int, ...]
    ) -> None:
        self.student, self.cuts = student, cuts
        self.blocks = tuple(find_blocks(module, input_shape) for module in (teacher, student))
        nodes = [[str(node.target) for block in blocks for node in block.nodes] for blocks in self.blocks]
        if nodes[0] != nodes[1]:
            raise ModelError("the pruned network does not have the layers of its teacher; prune a copy of the teacher.")
        self.modules = (teacher, student)
        self.parts = tuple(
            [subgraph_module(module, block.nodes, block.entry) for block in blocks]
            for module, blocks in zip(self.modules, self.blocks, strict=True)
        )
        touched = {name.rpartition(".")[0] for name in cuts}
        reading = {name.rpartition(".")[0] for name, cut in cuts.items() if 1 in cut.kept}
        layers = [{str(node.target) for node in block.nodes} for block in self.blocks[1]]
        self.readers = [index for index, own in enumerate(layers) if own & reading]
        self.first = next((index for index, own in enumerate(layers) if own & touched), len(layers))
        self.reading = reading
        self.weights = {name for name, _ in student.named_parameters()}

    @torch.no_grad()
    def inputs(self, images: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Inputs (B, C, H, W) of a block of the teacher and of the student."""
        theirs = images
        for part in self.parts[0][: min(block, self.first)]:
            theirs = part(theirs)
        own = theirs.clone()  # a block may start with an activation in place
        for at in range(self.first, block):
            theirs, own = self.parts[0][at](theirs), self.parts[1][at](own)
        return theirs, own

    def layer_ends(self, block: int, node: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        """The part that computes a layer's output in the teacher's block, and its input in the student's.

        None: the input.
        """
        at = [str(each.target) for each in self.blocks[1][block].nodes].index(str(node.target))
        theirs, own = self.blocks[0][block], self.blocks[1][block]
        source = node.all_input_nodes[0]
        until = own.nodes[: own.nodes.index(source) + 1] if source is not own.entry else ()
        before = subgraph_module(self.student, until, own.entry) if until else None
        return subgraph_module(self.modules[0], theirs.nodes[: at + 1], theirs.entry), before

    def surviving(self, values: Tensor, node: fx.Node) -> Tensor:
        """The channels of the teacher's values (B, C, ...) at a node that the student still has."""
        while len(node.all_input_nodes) == 1:  # from a pool or activation back to what makes or scales the channels
            cut = self.cuts.get(f"{node.target}.weight")
            if cut is not None:
                axis = -1 if isinstance(self.student.get_submodule(str(node.target)), nn.Linear) else 1
                return values.index_select(axis, cut.kept[0].to(values.device)) if 0 in cut.kept else values
            if f"{node.target}.weight" in self.weights:
                return values
            node = node.all_input_nodes[0]
        return values


@torch.no_grad()
def _retrain(pair: TeacherStudent, block: int, batches: Batches, ridge: float) -> BlockDistillation:
    part = pair.parts[1][block]
    start = {name: tensor.clone() for name, tensor in part.state_dict().items()}
    before = _error(pair, block, batches)
    solved = tuple(_solve(pair, block, batches, ridge))
    after = _error(pair, block, batches)
    if not math.isfinite(after):
        raise DivergedError(f"the error of block {block} is {after} after distillation; check the images and weights.")
    if after > before:
        part.load_state_dict(start)
        solved, after = (), before
    return BlockDistillation(block, solved, before, after)


def _error(pair: TeacherStudent, block: int, batches: Batches) -> float:
    """Squared error divided by the squared sum of the target."""
    error = total = 0.0
    for images in batches():
        theirs, own = pair.inputs(images, block)
        target = pair.surviving(pair.parts[0][block](theirs), pair.blocks[1][block].nodes[-1])
        error += float((pair.parts[1][block](own) - target).square().sum(dtype=torch.float64))
        total += float(target.square().sum(dtype=torch.float64))
    if not total:
        raise UsageError("a pruned network learns from images; there are none, or a block makes nothing of them.")
    return error / total


def _solve(pair: TeacherStudent, block: int, batches: Batches, ridge: float) -> list[str]:
    """Set least-squares weights in a block's layers that lost inputs, in order; return the names of those solved."""
    solved = []
    for node in pair.blocks[1][block].nodes:
        layer = pair.student.get_submodule(str(node.target)) if str(node.target) in pair.reading else None
        if not isinstance(layer, (nn.Conv2d, nn.Linear)) or not Regression.serves(layer):
            continue
        makes, reads = pair.layer_ends(block, node)
        regression = Regression(layer)
        for images in batches():
            theirs, own = pair.inputs(images, block)
            regression.add(reads(own) if reads else own, pair.surviving(makes(theirs), node))
        norm = _norm_after(pair.student, node)
        weight, shift = regression.solve(ridge, layer.bias is not None or norm is not None)
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(shift)
        elif norm is not None and norm.running_mean is not None:
            norm.running_mean -= shift  # the input is lower by that, and the output must not change
        solved.append(str(node.target))
    return solved


def _norm_after(module: fx.GraphModule, node: fx.Node) -> _BatchNorm | None:
    """The BatchNorm that is the only reader of a layer's output, if it tracks statistics."""
    user = next(iter(node.users))
    layer = module.get_submodule(str(user.target)) if user.op == "call_module" and len(node.users) == 1 else None
    return layer if isinstance(layer, _BatchNorm) and layer.running_mean is not None else None
