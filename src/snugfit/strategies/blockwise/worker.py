"""The Worker of NeuroFlux: a block of units in memory, trained by their local losses (section 5.2, Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from snugfit._chain import layers_called_once, tracking_norms
from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred
from snugfit._training.network import mismatch_errors
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.statistics import recompute_statistics
from snugfit._training.strategy import LoadTensors
from snugfit._training.task import StepResult, precision_context
from snugfit.lean import use_lean_convolutions
from snugfit.local import LocalLoss
from snugfit.local.assignment import DetachedHeadLoss, HeadLoss, parts
from snugfit.local.unit_pass import training_pass
from snugfit.strategies.recomputation.paging import recomputing_forward
from snugfit.strategies.recomputation.schedule import Schedule


def loss_without_head(loss: LocalLoss) -> LocalLoss | None:
    """A unit's local loss without the network's head; None if the head is all of it."""
    if isinstance(loss, DetachedHeadLoss):
        return loss.local
    return None if isinstance(loss, HeadLoss) else loss


def initialise_loss(loss: nn.Module, seed: int) -> None:
    """Initialise a local loss from the meta device; the weights depend only on the seed."""
    loss.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in loss.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()


class Recomputation(NamedTuple):
    """The modules of consecutive units, and which of them run again in the backward pass."""

    modules: Sequence[nn.Module]
    schedule: Schedule


class RecomputingBody(nn.Module):
    """Consecutive units up to the features that a local loss reads; some run again in the backward pass."""

    def __init__(self, modules: Sequence[nn.Module], schedule: Schedule, loss: LocalLoss) -> None:
        super().__init__()
        self.parts = nn.ModuleList([*modules[:-1], parts(modules[-1], loss)[0]])
        self._run = recomputing_forward(list(self.parts), schedule)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (B, ...) to features (B, ...)."""
        self.parts.train()
        return self._run(inputs)


class LocalUnit:
    """A unit, from (B, ...) to features (B, ...), its local loss, and their optimizers.

    Several units may form one module. With a ``recomputation`` some of them run again in the backward pass. That pass
    applies and frees every gradient.
    """

    def __init__(
        self, unit: nn.Module, loss: LocalLoss, workload: Workload, recomputation: Recomputation | None = None
    ) -> None:
        self.unit, self.loss = unit, loss
        for module in (unit, loss):
            use_lean_convolutions(module)
        self.body, self.tail = parts(unit, loss)
        trained = self.body if recomputation is None else RecomputingBody(*recomputation, loss)
        self._training_pass = training_pass(trained, self.tail, loss)
        named = [(f"unit/{name}", parameter) for name, parameter in unit.named_parameters()]
        named += [(f"loss/{name}", parameter) for name, parameter in loss.named_parameters()]
        self.optimizers = ParameterOptimizers(named, workload.optimizer)
        self.optimizers.apply_in_backward()
        self.optimizers.apply_in_parts([*layers_called_once(unit), *_own_layers(loss)])
        self.precision = workload.precision

    def step(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, StepResult]:
        """Train on inputs (B, ...) and labels (B,) (Algorithm 2, lines 3-7).

        Returns the features (B, ...) from before the update, detached, and the result.
        """
        for module in (self.unit, self.loss):
            if not module.training:  # going through all its layers takes long
                module.train()
        self.optimizers.train()
        with precision_context(inputs, self.precision):
            features, outputs = self._training_pass(inputs)
            output = self.loss.objective(features, labels, inputs)
        del features  # from here on, only the backward pass keeps the feature map
        if output.loss.requires_grad:  # False for a frozen unit whose loss has no parameters
            output.loss.backward()
        return outputs.float(), StepResult.of(output.loss, output.logits, labels)

    def state(self) -> dict[str, Tensor | Deferred]:
        """Weights, buffers and optimizer state, of any shapes."""
        return {
            **{f"unit/{name}": tensor for name, tensor in self.unit.state_dict().items()},
            **{f"loss/{name}": tensor for name, tensor in self.loss.state_dict().items()},
            **self.optimizers.averaged(),
            **{f"optimizer/{name}": tensor for name, tensor in self.optimizers.state().items()},
        }

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Load the tensors of :meth:`state`, with their shapes, from what ``load`` gives of a prefix of names.

        Read all at once beside the unit's own weights, they would take more memory than training does.
        """
        with mismatch_errors():
            self.unit.load_state_dict(_without_prefix("unit/", load("unit/")))
            self.loss.load_state_dict(_without_prefix("loss/", load("loss/")))
        self.optimizers.load_state(_without_prefix("optimizer/", load("optimizer/")))


def _own_layers(loss: LocalLoss) -> list[nn.Module]:
    """The layers of a local loss that run once in a step: those of its networks, and of a head that is the user's."""
    heads = [each for each in loss.modules() if isinstance(each, fx.GraphModule)]
    inside = {id(layer) for head in heads for layer in head.modules()}
    own = [layer for layer in loss.modules() if id(layer) not in inside]
    return [*own, *(layer for head in heads for layer in layers_called_once(head))]


def _without_prefix(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


class _BlockPass(nn.Module):
    """The forward pass of a block and its local losses."""

    def __init__(self, units: Sequence[LocalUnit]) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(unit.body for unit in units)
        self.tails = nn.ModuleList(unit.tail for unit in units)
        self.losses = nn.ModuleList(unit.loss for unit in units)

    def forward(self, inputs: Tensor) -> Tensor:
        for body, tail, loss in zip(self.bodies, self.tails, self.losses, strict=True):
            features = body(inputs)
            cast(LocalLoss, loss).predict(features)
            inputs = tail(features)
        return inputs


class BlockTrainer:
    """Trains the units of a block one after another on each batch."""

    micro_batches = 1

    def __init__(self, units: Sequence[LocalUnit]) -> None:
        self.units = list(units)
        self.modules: list[nn.Module] = [module for unit in self.units for module in (unit.unit, unit.loss)]

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """Run a step of every unit on inputs (B, ...) and labels (B,); return the last, or first diverged, result."""
        results = []
        for unit in self.units:
            inputs, result = unit.step(inputs, labels)
            results.append(result)
        return next((each for each in results if not math.isfinite(each.loss)), results[-1])

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate of all units."""
        for unit in self.units:
            unit.optimizers.set_lr_factor(factor)

    def state(self) -> dict[str, dict[str, Tensor | Deferred]]:
        """One group of tensors, of any shapes, per unit."""
        return {f"unit{index}": unit.state() for index, unit in enumerate(self.units)}

    def load_state(self, load: LoadTensors) -> None:
        """Load tensors of the shapes of :meth:`state`; ``load`` gives those of a unit and a prefix of names."""
        for index, unit in enumerate(self.units):
            unit.load_state(partial(load, f"unit{index}"))

    def settle(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Install averaged weights, if any; recompute the norms' statistics from inputs (B, ...) and labels (B,)."""
        for unit in self.units:
            unit.optimizers.average()
        block, weight = _BlockPass(self.units), next(self.units[0].unit.parameters())
        norms = tracking_norms(block.train())
        with precision_context(weight, self.units[0].precision):
            recompute_statistics(norms, block.eval(), batches, weight.device)

    def release_optimizers(self) -> None:
        """Drop the optimizer state after training."""
        for unit in self.units:
            unit.optimizers.release()

    def evaluate(self) -> None:
        """Set all units to evaluation mode."""
        for module in self.modules:
            module.eval()
