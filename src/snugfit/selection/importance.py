"""The Tensor Importance Evaluator: how far each tensor's update lowers the loss (ElasticTrainer section 4).

The pass never holds the gradients of more than one unit, nor the feature maps of more than one unit for more than a few
images: each unit's forward pass is recomputed when its turn comes in the backward pass. The feature maps between units
and the weights before the update lie in a scratch file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snugfit._core.options import ImportanceMetric
from snugfit.memory.scratch import ScratchFile, StoredTensor, is_channels_last, stored_bytes

Update = Callable[[str, nn.Parameter], None]
PART_VALUES = 1 << 18
"""Values of a weight that are compared at once: a sum in float64 first copies them."""


def scratch_bytes(units: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]], batch: int) -> int:
    """Bytes of scratch file for ``batch`` images: the units' inputs and their gradients, and all weights."""
    maps = sum(2 * stored_bytes((batch, *shape)) for shape in shapes)
    return maps + sum(stored_bytes(p.shape, p.dtype) for unit in units for p in unit.parameters())


def importance(
    metric: ImportanceMetric,
    units: Sequence[nn.Module],
    images: Tensor,
    labels: Tensor,
    *,
    chunk: int,
    scratch: ScratchFile,
    update: Update,
) -> dict[str, float]:
    """Importance of every parameter, by name; weights are restored before it returns.

    Args:
        metric: ``contribution``: -sum(gradient x update) at the updated weights, where the update is the optimizer's
            own on these images (equations 2 and 5, sign such that a positive value lowers the loss); ``gradient`` and
            ``weight``: sums of magnitudes.
        units: modules whose composition is the network, in the mode to be evaluated in; importance covers every
            parameter, whether or not it requires a gradient, and the flags are restored.
        images: (B, ...), uniformly drawn.
        labels: (B,).
        chunk: images in memory at once within a unit.
        scratch: storage for :func:`scratch_bytes`.
        update: steps the optimizer on one parameter with a gradient, and leaves its state unchanged.
    """
    if metric == "weight":
        return {name: float(p.detach().abs().sum()) for unit in units for name, p in unit.named_parameters()}
    flags = [(p, p.requires_grad) for unit in units for p in unit.parameters()]
    walk = _UnitBackward(units, images, labels, chunk, scratch)
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(True)
        if metric == "gradient":
            return _gradients(walk)
        return _contributions(walk, scratch, update)
    finally:
        for parameter, flag in flags:
            parameter.grad = None
            parameter.requires_grad_(flag)


def _gradients(walk: _UnitBackward) -> dict[str, float]:
    found: dict[str, float] = {}

    def note(unit: nn.Module) -> None:
        for name, parameter, gradient in _with_gradient(unit):
            found[name] = float(gradient.abs().sum())
            parameter.grad = None

    walk.run(note)
    return found


def _contributions(walk: _UnitBackward, scratch: ScratchFile, update: Update) -> dict[str, float]:
    """One pass that updates every tensor by its own gradient, and one that measures and undoes the effect."""
    originals: dict[str, StoredTensor] = {}
    found: dict[str, float] = {}

    def step(unit: nn.Module) -> None:
        for name, parameter, _ in _with_gradient(unit):
            originals[name] = scratch.store(parameter)
            update(name, parameter)
            parameter.grad = None

    def undo(unit: nn.Module) -> None:
        for name, parameter, gradient in _with_gradient(unit):
            found[name] = -_taken_back(parameter, gradient, originals[name])
            parameter.grad = None
            del originals[name]

    try:
        walk.run(step)
        walk.run(undo)
    finally:
        with torch.no_grad():
            for unit in walk.units:
                for name, parameter in unit.named_parameters():
                    if name in originals:
                        parameter.copy_(originals.pop(name).read())
    return found


@torch.no_grad()
def _taken_back(parameter: Tensor, gradient: Tensor, before: StoredTensor) -> float:
    """Take the update of a parameter, of any shape, back part by part; returns the sum of gradient times update."""
    updated, gradient = torch.atleast_1d(parameter), torch.atleast_1d(gradient)
    rows = max(PART_VALUES * len(updated) // max(updated.numel(), 1), 1)
    total = 0.0
    for start in range(0, len(updated), rows):
        part = slice(start, start + rows)
        old, new = before.read(part).to(parameter.device), updated[part]
        total += float((new - old).mul_(gradient[part]).sum(dtype=torch.float64))
        new.copy_(old)
    return total


def _with_gradient(unit: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    return ((name, p, p.grad) for name, p in unit.named_parameters() if p.grad is not None)


class _UnitBackward:
    """Backpropagation through units, each recomputed from its input, with the gradients of one at a time."""

    def __init__(
        self, units: Sequence[nn.Module], images: Tensor, labels: Tensor, chunk: int, scratch: ScratchFile
    ) -> None:
        self.units, self.images, self.labels, self.chunk, self.scratch = units, images, labels, chunk, scratch
        self.outputs: list[StoredTensor] = []
        self.gradients: list[StoredTensor] = []

    def run(self, consume: Callable[[nn.Module], None]) -> None:
        """Compute each unit's gradients, of the mean cross entropy, and call ``consume`` for each, last unit first.

        Images are (B, ...), labels (B,). ``consume`` may change that unit's weights, which are not used afterwards.
        """
        self._forward()
        for index in range(len(self.units) - 1, -1, -1):
            for start in range(0, len(self.labels), self.chunk):
                self._backward(index, slice(start, start + self.chunk))
            consume(self.units[index])

    @torch.no_grad()
    def _forward(self) -> None:
        """Store the feature maps between the units."""
        for index, unit in enumerate(self.units[:-1]):
            for start in range(0, len(self.labels), self.chunk):
                output = unit(self._part(index, slice(start, start + self.chunk)))
                if index == len(self.outputs):
                    shape = (len(self.labels), *output.shape[1:])
                    last = is_channels_last(output)
                    self.outputs.append(self.scratch.reserve(shape, output.dtype, last=last))
                    self.gradients.append(self.scratch.reserve(shape, output.dtype, last=last))
                self.outputs[index].write(output, start)

    def _part(self, index: int, rows: slice) -> Tensor:
        part = self.outputs[index - 1].read(rows).to(self.images.device) if index else self.images[rows]
        return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part

    def _backward(self, index: int, rows: slice) -> None:
        part = self._part(index, rows).detach().requires_grad_(index > 0)
        output = self.units[index](part)
        if index == len(self.units) - 1:
            logits = output.to(torch.promote_types(output.dtype, torch.float32))
            loss = F.cross_entropy(logits, self.labels[rows], reduction="sum") / len(self.labels)
            loss.backward()
        else:
            torch.autograd.backward(output, self.gradients[index].read(rows).to(output.device))
        if part.grad is not None:
            self.gradients[index - 1].write(part.grad, rows.start)
