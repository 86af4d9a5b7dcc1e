"""What ``elastic`` must know before it can plan: every operator, two whole steps, and a pass for importance."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from snugfit._chain import Chain, Unit, classifier_names
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.step import precision_context
from snugfit.lean import use_lean, use_stock
from snugfit.memory.scratch import ScratchFile, StoredTensor
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling import Probe, TensorProbe, WholeStep
from snugfit.selection.importance import Update, importance, scratch_bytes
from snugfit.strategies.elastic.trainer import TensorTrainer, set_modes
from snugfit.strategies.memory_estimates import (
    fill_synthetic_weights,
    place_synthetic_weights,
    random_batch,
    step_floor,
)

HEAD, FULL, IMPORTANCE, TENSORS = "elastic:head", "elastic:full", "elastic:importance", "elastic:tensors"
"""Names of the probes."""
Which = Literal["head", "full"]
NO_STATE: Mapping[str, StoredTensor] = {}


@dataclass(frozen=True)
class ElasticProbes:
    """Makes the probes of one network.

    Attributes:
        chain: the network, on the meta device.
        workload: what is trained.
        device: where.
        lean: whether the lean operators are used.
    """

    chain: Chain
    workload: Workload
    device: str
    lean: bool

    def all(self, importance_batch: int | None) -> list[Probe | TensorProbe]:
        """Every probe; that of the importance pass, over that many images, only where importance is told."""
        probes: list[Probe | TensorProbe] = [self._step(HEAD, "head"), self._step(FULL, "full")]
        if importance_batch is not None:
            probes.append(self._importance(importance_batch))
        return [*probes, self.tensors(self.limit)]

    @property
    def limit(self) -> int:
        """Largest batch of interest."""
        return self.workload.effective_batch

    def trainer(self, where: str, which: Which) -> TensorTrainer:
        """The network with made-up weights, and what trains it."""
        clone = copy.deepcopy(self.chain)
        module = clone.to_module()
        place_synthetic_weights(module, where)
        trainer = TensorTrainer(module, clone.forward, self.workload, lean=self.lean)
        trainer.select(self._names(trainer, which))
        return trainer

    def _names(self, trainer: TensorTrainer, which: Which) -> Sequence[str]:
        return tuple(trainer.parameters) if which == "full" else classifier_names(self.chain)

    def _step(self, name: str, which: Which) -> Probe:
        def build() -> Callable[[int], object]:
            trainer = self.trainer(self.device, which)
            return lambda batch: trainer.step(*self._batch(batch, self.device))

        def floor(batch: int) -> int:
            return step_floor(self.trainer("meta", which), lambda: self._batch(batch, "meta"))

        return Probe(name, build, floor, self.limit, layers=_layers(self.chain))

    def _importance(self, batch: int) -> Probe:
        """A pass over ``batch`` images; the size that is measured is how many are in memory at once."""

        def build() -> Callable[[int], object]:
            clone = copy.deepcopy(self.chain)
            _filled(clone.to_module().to_empty(device=self.device), lean=self.lean)
            units = [unit.module.eval() for unit in clone.all_units]
            shapes = [unit.input_shape for unit in clone.all_units]
            update = trial_updates(self.workload.optimizer)

            def step(chunk: int) -> None:
                images, labels = self._batch(batch, self.device)
                with ExitStack() as stack:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    size = scratch_bytes(units, shapes, batch)
                    scratch = stack.enter_context(ScratchFile(folder / "importance", size))
                    stack.enter_context(precision_context(images, bfloat16=self.workload.precision == "bfloat16"))
                    importance("contribution", units, images, labels, chunk=chunk, scratch=scratch, update=update)

            return step

        def floor(chunk: int) -> int:
            weights = sum(unit.weight_bytes for unit in self.chain.all_units)
            return weights + max(self._unit_floor(unit, chunk) for unit in self.chain.all_units)

        return Probe(IMPORTANCE, build, floor, min(batch, self.workload.train_count), layers=_layers(self.chain))

    def _unit_floor(self, unit: Unit, chunk: int) -> int:
        """Tensor bytes of a unit's part of the pass beside the weights: maps and gradients, then an update."""
        module = copy.deepcopy(unit.module).requires_grad_(True).eval()
        if self.lean:
            use_lean(module)
        inputs = torch.empty((chunk, *unit.input_shape), device="meta", requires_grad=True)
        backward = tensor_peak_bytes(lambda: module(inputs).sum().backward(), [module, inputs]) - unit.weight_bytes
        sizes = [p.numel() * p.element_size() for p in module.parameters()]
        step = (self.workload.optimizer.state_per_parameter + 1) * max(sizes, default=0)
        return max(backward, sum(sizes) + step)

    def tensors(self, batch_limit: int, *, live: bool = False) -> TensorProbe:
        """The probe of every operator; of the chain's own modules, which stay as they are, if it is ``live``."""

        def prepare(module: nn.Module) -> None:
            set_modes(module if live else _filled(module, lean=self.lean))

        def make_update(parameter: nn.Parameter) -> Callable[[], object]:
            return ParameterOptimizers([("tensor", parameter)], self.workload.optimizer).step

        return TensorProbe(
            TENSORS,
            self.chain,
            self.device,
            prepare,
            make_update,
            lambda value: precision_context(value, bfloat16=self.workload.precision == "bfloat16"),
            self._whole_steps,
            batch_limit,
            live,
        )

    def _whole_steps(self, batch: int) -> Sequence[WholeStep]:
        """Steps of one network in three ways; what turns it from one way to another is not timed."""
        inputs, labels = self._batch(batch, self.device)
        trainer = self.trainer(self.device, "full")
        head = set(classifier_names(self.chain))

        def turn(*, lean: bool, everything: bool) -> None:
            use_lean(trainer.module) if lean else use_stock(trainer.module)
            for name, parameter in trainer.parameters.items():
                parameter.requires_grad_(everything or name in head)

        def step() -> object:
            return trainer.step(inputs, labels)

        ways = ((False, True), (self.lean, True), (self.lean, False))
        return [(partial(turn, lean=lean, everything=everything), step) for lean, everything in ways]

    def _batch(self, batch: int, device: str) -> tuple[Tensor, Tensor]:
        return random_batch(self.chain.input_shape, self.workload.classes, batch, device)


def trial_updates(
    settings: OptimizerSettings,
    factor: float = 1.0,
    state: Mapping[str, StoredTensor] = NO_STATE,
    names: Set[str] | None = None,
) -> Update:
    """The optimizer's steps from a state that they leave as it is, one parameter at a time.

    Args:
        settings: the optimizer.
        factor: of the peak learning rate.
        state: as :meth:`ParameterOptimizers.state` gives it, in a scratch file.
        names: the parameters that may train; the others stay as they are. All by default.
    """

    def update(name: str, parameter: nn.Parameter) -> None:
        if names is not None and name not in names:
            return
        optimizers = ParameterOptimizers([(name, parameter)], settings)
        own = {key: stored.read() for key, stored in state.items() if key.rpartition("/")[0] == name}
        optimizers.load_state(own)
        optimizers.set_lr_factor(factor)
        optimizers.step()
        optimizers.release()

    return update


def _filled(module: nn.Module, *, lean: bool) -> nn.Module:
    """Give a module made-up weights, and the lean operators if they are used."""
    fill_synthetic_weights(module)
    if lean:
        use_lean(module)
    return module


def _layers(chain: Chain) -> int:
    return sum(isinstance(layer, (nn.Conv2d, nn.Linear)) for u in chain.all_units for layer in u.module.modules())
