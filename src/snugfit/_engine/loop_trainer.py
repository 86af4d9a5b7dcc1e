"""Steps of a caller's own training loop: whole batches, in micro-batches, with recomputation."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings
from snugfit._training.losses import Loss
from snugfit._training.optimizers import ParameterOptimizers
from snugfit.strategies.recomputation.paging import recomputing_forward
from snugfit.strategies.recomputation.schedule import AnySchedule

Part = tuple[Tensor, Tensor]
"""Images (B, ...) and targets (B, ...) of a micro-batch."""


def parts_of(images: Tensor, targets: Tensor, sizes: Sequence[int]) -> list[Part]:
    """Views of images and targets (B, ...) in parts of these sizes."""
    return list(zip(images.split(list(sizes)), targets.split(list(sizes)), strict=True))


@dataclass(frozen=True)
class LoopNetwork:
    """What a loop trains, and how.

    Attributes:
        model: the caller's module, whose parameters are updated in place.
        chain: the same as units, which share its layers and weights.
        loss: from outputs and targets (B, ...) to the mean loss of the batch, a scalar.
        optimizer: optimizer and learning rate.
    """

    model: nn.Module
    chain: Chain
    loss: Loss
    optimizer: OptimizerSettings

    def trainer(self, schedule: AnySchedule, holds: bool) -> LoopTrainer:
        """A trainer of the module itself."""
        return LoopTrainer(self, self.chain, schedule, holds=holds)


class LoopTrainer:
    """Trains a network by steps on whole batches.

    Args:
        network: with the parameters, the loss and the optimizer.
        chain: the layers to run: those of the network, or copies that share its parameters.
        schedule: units or modules that are computed again in the backward pass.
        holds: whether gradients are held over micro-batches; if not, a step is one backward pass, which applies and
            frees each gradient.
    """

    def __init__(self, network: LoopNetwork, chain: Chain, schedule: AnySchedule, *, holds: bool) -> None:
        self.modules, self.holds = [unit.module for unit in chain.all_units], holds
        self._loss = network.loss
        self._forward = recomputing_forward(self.modules, schedule)
        self._others = list(_in_place_of(self.modules, network.model))
        self.optimizers = ParameterOptimizers(network.model.named_parameters(), network.optimizer)
        self._names = {id(parameter): name for name, parameter in self.optimizers.parameters.items()}
        if not holds:
            self.optimizers.apply_in_backward()
            self.optimizers.pause()

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Update the weights by the mean loss of a batch in parts, one after the other; returns it, a scalar.

        Gradients of the caller's own backward passes are freed before. If it is refused memory, all are.
        """
        for layer, original in self._others:
            layer.training = original.training
        self.optimizers.zero_grad()
        count, total = sum(len(images) for images, _ in parts), torch.zeros((), device=parts[0][0].device)
        try:
            for images, targets in parts:
                outputs = self._forward(images)
                loss = self._loss(outputs, targets) * (len(images) / count)
                if not self.holds:
                    self.optimizers.resume(without=self._read_by(loss, outputs))
                del outputs
                loss.backward()
                total = total + loss.detach()
            self.optimizers.pause()
            self.optimizers.step()  # what is held, and what the loss reads itself
        except BaseException:
            self.optimizers.pause()
            self.optimizers.zero_grad()
            raise
        return total

    def _read_by(self, loss: Tensor, outputs: Tensor) -> set[str]:
        """Parameters that a loss, a scalar, reads besides the outputs (B, ...), as a penalty on weights does.

        Where units run again, such a one gets gradients in several backward passes.
        """
        met, waiting, found = {outputs.grad_fn}, [loss.grad_fn], set[str]()
        while waiting:
            node = waiting.pop()
            if node is None or node in met:
                continue
            met.add(node)
            found.add(self._names.get(id(getattr(node, "variable", None)), ""))
            waiting.extend(following for following, _ in node.next_functions)
        return found


def _in_place_of(units: Iterable[nn.Module], model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Layers of units that are not the model's own, with the module of the model whose mode they take.

    That is the layer of this name, of which it is a copy; or the owner of a functional dropout, which tracing has made
    a layer of.
    """
    known, originals = set(model.modules()), dict(model.named_modules())
    for unit in units:
        for name, layer in unit.named_modules():
            if layer not in known:
                yield layer, originals.get(name) or originals.get(name.rpartition(".")[0], model)


class TrialSteps:
    """Steps that are measured on the caller's weights, without copies of them, and change nothing.

    Gradients are set to zero before they are applied at a learning rate of zero, so that a step takes the memory and
    the time of a real one. Buffers, and what is no tensor in a layer, are copied.
    """

    def __init__(self, network: LoopNetwork) -> None:
        self.network = network
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def trainer(self, schedule: AnySchedule, holds: bool) -> LoopTrainer:
        """A trainer by a schedule; the one made before can no longer be used."""
        self.clear()
        parameters = list(self.network.model.parameters())
        chain = copy.deepcopy(self.network.chain, {id(each): each for each in parameters})
        self._handles = [
            each.register_post_accumulate_grad_hook(set_to_zero) for each in parameters if each.requires_grad
        ]
        made = LoopTrainer(self.network, chain, schedule, holds=holds)
        made.optimizers.set_lr_factor(0.0)
        if not holds:
            self._handles += made.optimizers.apply_in_backward()
        return made

    def clear(self) -> None:
        """Remove all hooks and gradients from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for parameter in self.network.model.parameters():
            parameter.grad = None


def set_to_zero(parameter: Tensor) -> None:
    """Replace the gradient of a parameter of any shape: times a rate of zero, an infinite one would be NaN."""
    if parameter.grad is not None:
        parameter.grad.zero_()
