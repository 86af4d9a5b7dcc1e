"""Joint retraining of all pruned blocks, after ``distil`` has brought each of them close on its own.

The remaining channels of one block can compensate for another's errors. So the pruned network learns the outputs of the
unpruned one, block by block and at the end. Frozen layers keep only signs for the backward pass (``snugfit.lean``), so
it needs little more than the feature maps of the pruned blocks. Biases behind the pruned blocks train too: they need no
feature maps, and correct the shift that all channels share.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain.propagation import in_mode
from snugfit._chain.subgraph import subgraph_module
from snugfit.errors import DivergedError, UsageError
from snugfit.lean import use_lean
from snugfit.lean.update_rules import FusedAdamW, fit
from snugfit.surgery.distil import TeacherStudent

LEARNING_RATE = 5e-3
"""Adam's peak learning rate."""
WARM_UP = 0.1
"""Share of steps in which the learning rate rises; then it falls to zero by a cosine."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def later_biases(student: fx.GraphModule, own: Collection[str], until: Collection[str]) -> set[str]:
    """Give a pruned network its own biases behind the first pruned block; returns their names.

    The student is from ``copy_for_pruning``, ``own`` names the tensors of its pruned blocks, ``until`` the layers of
    the classifier, which is retrained later.
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
    """Training steps on the relative errors of all pruned blocks and of the classifier's input.

    BatchNorm stays in evaluation mode; in pruned blocks it keeps its scale.

    Args:
        pair: the teacher, which is not changed, and the student after ``distil``.
        trained: names of the student's own tensors, which may train.
        until: layers of the classifier, which do not take part.
        steps: number of steps.
        micro_batch: images run at once; a step's gradients are summed over them.

    Raises:
        UsageError: ``steps`` is below 1.
    """

    def __init__(
        self,
        pair: TeacherStudent,
        *,
        trained: Collection[str],
        until: Collection[str],
        steps: int,
        micro_batch: int = 8,
    ) -> None:
        if steps < 1:
            raise UsageError(f"joint distillation needs at least one step, not {steps}.")
        self.pair, self.student, self.steps = pair, pair.student, steps
        self.micro_batch = micro_batch
        self.matched_parts = _matched_parts(self.pair, until)
        scales = {f"{name}.weight" for name, layer in self.student.named_modules() if isinstance(layer, _BatchNorm)}
        self.weights = {
            name: weight for name, weight in self.student.named_parameters() if name in trained and name not in scales
        }
        self._rules = {name: FusedAdamW(LEARNING_RATE) for name in self.weights}
        self.done = 0

    def step(self, images: Tensor) -> float:
        """Train one step on images without labels, (B, C, H, W), and return the mean error.

        Raises:
            DivergedError: the error is infinite or not a number.
        """
        total = 0.0
        with in_mode(self.pair.modules[0]), in_mode(self.student), _training(self.student, self.weights.values()):
            for micro in torch.split(images, self.micro_batch):
                error = self._error(micro) * (len(micro) / len(images))
                error.backward()
                total += float(error.detach())
            for name, weight in self.weights.items():
                if weight.grad is not None:
                    self._rules[name].lr = LEARNING_RATE * learning_rate_factor(self.done, self.steps)
                    self._rules[name].step(weight)
        if not math.isfinite(total):
            raise DivergedError(f"the error of joint distillation is {total}; prune less.")
        self.done += 1
        return total

    def _error(self, images: Tensor) -> Tensor:
        theirs, own = self.pair.inputs(images, self.pair.first)
        errors = []
        for teach, learn, end in self.matched_parts:
            with torch.no_grad():
                theirs = teach(theirs)
            own = learn(own)
            if end is not None:
                target = self.pair.surviving(theirs, end)
                errors.append((own - target).square().sum() / target.square().sum().clamp_min(1e-30))
        return torch.stack(errors).mean()

    def state(self) -> dict[str, Tensor]:
        """The optimizer's moments, in the shapes of the student's weights."""
        return {
            f"{name}.{moment}": rule.state[moment]
            for name, rule in self._rules.items()
            for moment in _MOMENTS
            if moment in rule.state
        }

    def load_state(self, tensors: Mapping[str, Tensor], done: int) -> None:
        """Restore moments, in the shapes of the weights, after ``done`` steps."""
        self.done = done
        for name, weight in self.weights.items():
            if f"{name}.{_MOMENTS[0]}" in tensors:
                moments = {moment: fit(tensors[f"{name}.{moment}"].to(weight), weight) for moment in _MOMENTS}
                self._rules[name].state = {"step": torch.tensor(float(done), device=weight.device), **moments}


def learning_rate_factor(done: int, steps: int) -> float:
    """Ratio of the learning rate to its peak after ``done`` of ``steps`` steps."""
    warm = max(int(steps * WARM_UP), 1)
    if done < warm:
        return (done + 1) / warm
    return (1 + math.cos(math.pi * (done - warm + 1) / max(steps - warm + 1, 1))) / 2


def _matched_parts(
    pair: TeacherStudent, until: Collection[str]
) -> list[tuple[fx.GraphModule, fx.GraphModule, fx.Node | None]]:
    """The blocks of both networks from the first pruned one to the classifier, each with the node to match or None.

    The outputs of pruned blocks are matched, and the classifier's input.
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
                subgraph_module(module, blocks[index].nodes[: ends[0]], blocks[index].entry)
                for module, blocks in zip(pair.modules, pair.blocks, strict=True)
            ]
            found.append((halves[0], halves[1], nodes[ends[0] - 1]))
        break
    teach, learn, matched = found[-1]
    if matched is None:
        last = next(node for node in reversed(list(learn.graph.nodes)) if node.op not in ("output", "get_attr"))
        found[-1] = (teach, learn, last)
    return found


@contextlib.contextmanager
def _training(part: nn.Module, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Train only these weights, with lean layers; restore everything afterwards."""
    layers = {layer: layer.__class__ for layer in part.modules()}
    flags = {parameter: parameter.requires_grad for parameter in part.parameters()}
    try:
        use_lean(part)
        part.requires_grad_(False)
        for parameter in weights:
            parameter.requires_grad_(True)
        yield
    finally:
        for layer, kind in layers.items():
            layer.__class__ = kind
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = None
