"""Probes of ``elastic``: every operator, two whole steps, and the importance pass; and the table of the operators."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from snugfit._chain import Chain, Unit, classifier_names
from snugfit._core.profile import Profile, TensorProfile
from snugfit._core.serial import to_data
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._quantities import MB
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.task import precision_context
from snugfit.errors import InfeasibleBudgetError
from snugfit.lean import use_lean, use_stock
from snugfit.memory import MemoryLimit
from snugfit.memory.scratch import ScratchFile, StoredTensor
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling import Probe, TensorProbe, WholeStep
from snugfit.selection.importance import Update, importance, scratch_bytes
from snugfit.selection.network import Network
from snugfit.strategies.elastic.trainer import TensorTrainer, set_modes
from snugfit.strategies.memory_estimates import (
    fill_synthetic_weights,
    place_synthetic_weights,
    random_batch,
    smallest_budget,
    weight_layers,
)
from snugfit.strategies.step_floor import step_floor

HEAD, FULL, IMPORTANCE, TENSORS = "elastic:head", "elastic:full", "elastic:importance", "elastic:tensors"
"""Names of the probes."""
TrainedPart = Literal["head", "full"]
NO_STATE: Mapping[str, StoredTensor] = {}


@dataclass(frozen=True)
class ElasticProbes:
    """Makes the probes of a network on the meta device, which measure it on ``device``."""

    chain: Chain
    workload: Workload
    device: str
    lean: bool

    def all(self, importance_batch: int | None) -> list[Probe | TensorProbe]:
        """All probes; that of the importance pass only if its number of images is given."""
        probes: list[Probe | TensorProbe] = [self._step(HEAD, "head"), self._step(FULL, "full")]
        if importance_batch is not None:
            probes.append(self._importance(importance_batch))
        return [*probes, self.tensors(self.limit)]

    @property
    def limit(self) -> int:
        """Largest batch to measure."""
        return self.workload.effective_batch

    def trainer(self, where: str, which: TrainedPart) -> TensorTrainer:
        """A trainer of the network with synthetic weights."""
        clone = copy.deepcopy(self.chain)
        module = clone.to_module()
        place_synthetic_weights(module, where)
        trainer = TensorTrainer(module, clone.forward, self.workload, lean=self.lean)
        trainer.select(trainer.parameters if which == "full" else classifier_names(self.chain))
        return trainer

    def _step(self, name: str, which: TrainedPart) -> Probe:
        def build() -> Callable[[int], object]:
            trainer = self.trainer(self.device, which)
            return lambda batch: trainer.step(*self._batch(batch, self.device))

        def floor(batch: int) -> int:
            trainer = self.trainer("meta", which)
            return step_floor(trainer, [trainer.optimizers], lambda: self._batch(batch, "meta"))

        return Probe(name, build, floor, self.limit, layers=weight_layers(self.chain))

    def _importance(self, batch: int) -> Probe:
        """A pass over ``batch`` images; the measured batch size is the number of images in memory at once."""

        def build() -> Callable[[int], object]:
            clone = copy.deepcopy(self.chain)
            _with_synthetic_weights(clone.to_module().to_empty(device=self.device), lean=self.lean)
            units = [unit.module.eval() for unit in clone.all_units]
            shapes = [unit.input_shape for unit in clone.all_units]
            update = trial_updates(self.workload.optimizer)

            def step(chunk: int) -> None:
                images, labels = self._batch(batch, self.device)
                with (
                    tempfile.TemporaryDirectory() as folder,
                    ScratchFile(Path(folder) / "importance", scratch_bytes(units, shapes, batch)) as scratch,
                    precision_context(images, self.workload.precision),
                ):
                    importance("contribution", units, images, labels, chunk=chunk, scratch=scratch, update=update)

            return step

        def floor(chunk: int) -> int:
            weights = sum(unit.weight_bytes for unit in self.chain.all_units)
            return weights + max(self._unit_floor(unit, chunk) for unit in self.chain.all_units)

        most, layers = min(batch, self.workload.train_count), weight_layers(self.chain)
        return Probe(IMPORTANCE, build, floor, most, layers=layers, heap="nothing")

    def _unit_floor(self, unit: Unit, chunk: int) -> int:
        """Tensor bytes of a unit's part of the pass without weights: feature maps and gradients, then new state."""
        module = copy.deepcopy(unit.module).requires_grad_(True).eval()
        place_synthetic_weights(module, "meta")
        if self.lean:
            use_lean(module)
        inputs = torch.empty((chunk, *unit.input_shape), device="meta", requires_grad=True)
        backward = tensor_peak_bytes(lambda: module(inputs).sum().backward(), [module, inputs]) - unit.weight_bytes
        sizes = [p.numel() * p.element_size() for p in module.parameters()]
        state = self.workload.optimizer.state_per_parameter
        updates = (sum(sizes[first:]) + int(state * sizes[first]) for first in range(len(sizes)))
        return max(backward, *updates)

    def tensors(self, batch_limit: int, *, live: bool = False) -> TensorProbe:
        """The probe of every operator; if ``live``, of the chain's own modules, without changing them."""

        def prepare(module: nn.Module) -> None:
            set_modes(module if live else _with_synthetic_weights(module, lean=self.lean))

        def make_update(parameter: nn.Parameter) -> Callable[[], object]:
            return ParameterOptimizers([("tensor", parameter)], self.workload.optimizer).step

        context = partial(precision_context, precision=self.workload.precision)
        steps = self._whole_steps
        return TensorProbe(TENSORS, self.chain, self.device, prepare, make_update, context, steps, batch_limit, live)

    def _whole_steps(self, batch: int) -> Sequence[WholeStep]:
        """Steps of three variants of one network; switching between variants is not timed."""
        inputs, labels = self._batch(batch, self.device)
        trainer, head = self.trainer(self.device, "full"), set(classifier_names(self.chain))

        def switch(*, lean: bool, everything: bool) -> None:
            use_lean(trainer.module) if lean else use_stock(trainer.module)
            for name, parameter in trainer.parameters.items():
                parameter.requires_grad_(everything or name in head)

        def step() -> object:
            return trainer.step(inputs, labels)

        variants = ((False, True), (self.lean, True), (self.lean, False))
        return [(partial(switch, lean=lean, everything=everything), step) for lean, everything in variants]

    def _batch(self, batch: int, device: str) -> tuple[Tensor, Tensor]:
        return random_batch(self.chain.input_shape, self.workload.classes, batch, device)


def trial_updates(
    settings: OptimizerSettings,
    factor: float = 1.0,
    state: Mapping[str, StoredTensor] = NO_STATE,
    names: Set[str] | None = None,
) -> Update:
    """Optimizer steps from a stored :meth:`ParameterOptimizers.state`, which does not change, parameter by parameter.

    ``factor`` is that of the peak learning rate; ``names`` are the parameters to update, all by default.
    """

    def update(name: str, parameter: nn.Parameter) -> None:
        if names is not None and name not in names:
            return
        optimizers = ParameterOptimizers([(name, parameter)], settings)
        optimizers.load_state({key: stored.read() for key, stored in state.items() if key.rpartition("/")[0] == name})
        optimizers.set_lr_factor(factor)
        optimizers.step()
        optimizers.release()

    return update


def _with_synthetic_weights(module: nn.Module, *, lean: bool) -> nn.Module:
    """Give a module synthetic weights, and lean operators if ``lean``."""
    fill_synthetic_weights(module)
    if lean:
        use_lean(module)
    return module


def tensor_table(
    chain: Chain, workload: Workload, profile: Profile, limit: MemoryLimit, *, lean: bool = True
) -> dict[str, Any]:
    """Time every operator under each output mask (ElasticTrainer sections 3.2 and 5), then whole steps.

    The limit is enforced meanwhile; see :func:`tensor_rows` for the result.

    Raises:
        InfeasibleBudgetError: not even one image's operators fit the memory budget.
        ModelError: an operator cannot be run alone, or two read the same tensor.
    """
    probes = ElasticProbes(chain, workload, str(limit.device), lean)
    with limit:
        found = probes.tensors(probes.limit).measure(limit)
    if found is None:
        raise _infeasible(probes, profile, limit.budget_bytes or 0)
    return tensor_rows(found, workload.optimizer.state_per_parameter)


def tensor_rows(found: TensorProfile, state_copies: float = 1) -> dict[str, Any]:
    """A tensor profile in the form of ``snugfit profile --json``; seconds are those of the timed batch.

    Returns:
        ``tensors``: of each ``name``, ``operator`` and ``kind``, ``t_dw`` (its gradient and update), ``t_dy`` (from it
        to the tensor before), ``update_seconds`` (the update alone), ``parameters``, ``macs`` of its gradient and
        ``saved_bytes`` (kept because it trains), both per image. ``tensor_timing``: ``batch``, ``forward_seconds``
        without gradients, and ``steps``, whole steps as ``core.tensors.StepSeconds``; None where memory refuses them.
    """
    network = Network(found, found.batch, state_copies)
    rows = [
        {
            "name": tensor.name,
            "operator": found.operators[int(place)].name,
            "kind": found.operators[int(place)].kind,
            "t_dw": float(t_dw),
            "t_dy": float(t_dy),
            "update_seconds": tensor.update_seconds,
            "parameters": tensor.parameters,
            "macs": tensor.macs,
            "saved_bytes": sum(saved.bytes for saved in tensor.saved),
        }
        for tensor, place, t_dw, t_dy in zip(network.tensors, network.place, network.t_dw, network.t_dy, strict=True)
    ]
    timing = {"batch": found.batch, "forward_seconds": network.forward_seconds(), "steps": to_data(found.steps)}
    return {"tensors": rows, "tensor_timing": timing}


def _infeasible(probes: ElasticProbes, profile: Profile, allowed: int) -> InfeasibleBudgetError:
    """What would do: a whole step of one image takes more than each of its operators alone."""
    floors = [probe.floor(1) for probe in probes.all(None) if isinstance(probe, Probe)]
    smallest = max(smallest_budget(profile, max(floors)), allowed + MB)
    return InfeasibleBudgetError(
        "The network's operators cannot be timed within the memory budget.",
        closest="one image at a time",
        lacking_bytes=smallest - allowed,
        smallest_bytes=smallest,
    )
