"""Retraining of all pruned blocks at once, after ``distil`` has brought each of them close on its own.

What is left of one block can make up for another's errors, and what matters of a map is what the rest of the network
makes of it: so the pruned network learns, block by block and in the end, to make what the unpruned one makes. Frozen
layers keep signs alone for the backward pass (``snugfit.lean``), so that it needs the maps of the pruned blocks and
little else. Biases behind the pruned blocks train, too: they need no maps, and set right what all channels lost alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain.subgraph import part_of
from snugfit.errors import DivergedError, UsageError
from snugfit.surgery.distil import Pair, training
from snugfit.surgery.importance import evaluating
from snugfit.surgery.reshape import Cut

LEARNING_RATE = 5e-3
"""Adam's at its peak."""
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises; then it falls to zero by a cosine."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def later_biases(student: fx.GraphModule, own: Collection[str], until: Collection[str]) -> set[str]:
    """Give a pruned network biases of its own behind the first pruned block; their names.

    Args:
        student: from ``pruned_twin``, which shares what is not pruned with the unpruned network.
        own: names of the tensors of its pruned blocks, which are its own.
        until: layers of the classifier, which is trained anew.
    """
    layers = {name.rpartition(".")[0] for name in own}
    order = [str(node.target) for node in student.graph.nodes if node.op == "call_module"]
    first = next((at for at, name in enumerate(order) if name in layers), len(order))
    found = set()
    for name in order[first:]:
        layer = student.get_submodule(name)
        bias = getattr(layer, "bias", None)
        if name not in layers and name not in until and isinstance(bias, nn.Parameter):
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
            found.add(f"{name}.bias")
    return found


class JointDistillation:
    """Steps on the errors of all blocks that were pruned, and of what the classifier reads, each by its target's size.

    BatchNorm stays in evaluation mode, and the scale of that of pruned blocks as it is.

    Args:
        teacher: the network before channels were removed; it is not changed.
        student: the network after that, and after ``distil``.
        cuts: what ``remove_channels`` returned.
        input_shape: channels, height, width of one image.
        trained: names of the student's tensors that may train: its own.
        until: layers of the classifier, which take no part.
        steps: steps in all.
        learning_rate: at its peak.
        micro_batch: images that are run at once; a step's gradients are summed over them.

    Raises:
        UsageError: no step is to be made.
        ModelError: the networks are not of one kind.
    """

    def __init__(
        self,
        teacher: fx.GraphModule,
        student: fx.GraphModule,
        cuts: Mapping[str, Cut],
        input_shape: tuple[int, ...],
        *,
        trained: Collection[str],
        until: Collection[str],
        steps: int,
        learning_rate: float = LEARNING_RATE,
        micro_batch: int = 8,
    ) -> None:
        if steps < 1:
            raise UsageError("joint distillation needs a step at least.")
        self.student, self.steps, self.learning_rate, self.micro_batch = student, steps, learning_rate, micro_batch
        self.pair = Pair(teacher, student, cuts, input_shape)
        self.stretches = _stretches(self.pair, until)
        scales = {f"{name}.weight" for name, layer in student.named_modules() if isinstance(layer, _BatchNorm)}
        self.weights = {
            name: weight for name, weight in student.named_parameters() if name in trained and name not in scales
        }
        self.optimizer = torch.optim.Adam(self.weights.values(), learning_rate)
        self.done = 0

    def step(self, images: Tensor) -> float:
        """Make a step on images without labels, (B, C, H, W); returns the errors' mean.

        Raises:
            DivergedError: it is infinite or not a number.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate(self.done, self.steps)
        total = 0.0
        with evaluating(self.pair.modules[0]), evaluating(self.student), training(self.student, self.weights.values()):
            for micro in torch.split(images, self.micro_batch):
                error = self._error(micro) * (len(micro) / len(images))
                error.backward()
                total += float(error.detach())
            self.optimizer.step()
        if not math.isfinite(total):
            raise DivergedError(f"the error of joint distillation is {total}; prune less.")
        self.done += 1
        return total

    def _error(self, images: Tensor) -> Tensor:
        theirs, own = self.pair.inputs(images, self.pair.first)
        errors = []
        for teach, learn, end in self.stretches:
            with torch.no_grad():
                theirs = teach(theirs)
            own = learn(own)
            if end is not None:
                target = self.pair.left(theirs, end)
                errors.append((own - target).square().sum() / target.square().sum().clamp_min(1e-30))
        return torch.stack(errors).mean()

    def state(self) -> dict[str, Tensor]:
        """The optimizer's moments; the weights are the student's."""
        return {
            f"{name}.{moment}": self.optimizer.state[weight][moment]
            for name, weight in self.weights.items()
            for moment in _MOMENTS
            if weight in self.optimizer.state
        }

    def load_state(self, tensors: Mapping[str, Tensor], done: int) -> None:
        """Take up moments after so many steps."""
        self.done = done
        for name, weight in self.weights.items():
            if f"{name}.{_MOMENTS[0]}" in tensors:
                moments = {moment: tensors[f"{name}.{moment}"].to(weight) for moment in _MOMENTS}
                self.optimizer.state[weight] = {"step": torch.tensor(float(done)), **moments}


def rate(done: int, steps: int) -> float:
    """Learning rate by its peak after so many of the steps."""
    warm = max(int(steps * WARM_UP), 1)
    if done < warm:
        return (done + 1) / warm
    return (1 + math.cos(math.pi * (done - warm + 1) / max(steps - warm + 1, 1))) / 2


def _stretches(
    pair: Pair, until: Collection[str]
) -> list[tuple[fx.GraphModule, fx.GraphModule, fx.Node | None]]:  # fmt: skip
    """The blocks from the first pruned one to the classifier, of both networks, with their ends where they are matched.

    Matched is what pruned blocks make, and the last one: what the classifier reads.
    """
    found: list[tuple[fx.GraphModule, fx.GraphModule, fx.Node | None]] = []
    for index in range(pair.first, len(pair.blocks[1])):
        nodes = pair.blocks[1][index].nodes
        ends = [at for at, node in enumerate(nodes) if str(node.target) in until]
        if not ends:
            end = nodes[-1] if index in pair.readers else None
            found.append((pair.parts[0][index], pair.parts[1][index], end))
            continue
        if ends[0]:
            halves = [
                part_of(module, blocks[index].nodes[: ends[0]], blocks[index].entry)
                for module, blocks in zip(pair.modules, pair.blocks, strict=True)
            ]
            found.append((halves[0], halves[1], nodes[ends[0] - 1]))
        break
    teach, learn, matched = found[-1]
    if matched is None:
        last = next(node for node in reversed(list(learn.graph.nodes)) if node.op not in ("output", "get_attr"))
        found[-1] = (teach, learn, last)
    return found
