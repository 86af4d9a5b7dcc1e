"""The scheme PruneTrain: full training with group lasso on channels, and channel removal at every interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from snugfit import surgery
from snugfit._chain import Chain
from snugfit._chain.propagation import BATCH, run_on_meta
from snugfit._meta_device import flop_counter
from snugfit._training.events import Notice
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit.lean import use_lean, use_stock
from snugfit.strategies.elastic.trainer import TensorTrainer

_SCALE = "lasso_scale"


class Pruner:
    """Adds group lasso to every step of a trainer, and removes channels that it has driven to zero.

    ``ratio`` is the share of the penalty in the loss at the start (PruneTrain section 4).
    """

    def __init__(self, trainer: TensorTrainer, input_shape: tuple[int, ...], ratio: float) -> None:
        self.trainer, self.input_shape, self.ratio, self.scale = trainer, input_shape, ratio, 0.0
        use_stock(trainer.module)  # find_groups distinguishes layers by class
        self.groups = surgery.find_groups(cast(fx.GraphModule, trainer.module), input_shape)
        if trainer.lean:
            use_lean(trainer.module)
        self.slots = surgery.penalised_weights(trainer.module, self.groups)
        trainer.before_update = self._penalise

    def _penalise(self, name: str, parameter: nn.Parameter) -> None:
        if name in self.slots:
            surgery.add_penalty_gradient(parameter, self.slots[name], self.scale)

    def start(self, data: TrainingData, run: Run, batch: int) -> None:
        """Scale the penalty by the loss of the first batch; after an interruption, restore the scale."""
        notes = run.position.notes
        if _SCALE not in notes:
            module = self.trainer.module.eval()
            images, labels = next(data.train.epoch(0, batch))
            with torch.no_grad(), run.limit.allow_kernels():
                loss = float(F.cross_entropy(module(images.to(run.device)).float(), labels.to(run.device)))
            whole = surgery.penalty(module, self.groups)
            if not whole:
                run.emit(Notice("prunetrain finds no removable channels in this network; it trains all weights"))
            notes[_SCALE] = surgery.penalty_scale(loss, whole, self.ratio) if whole else 0.0
        self.scale = float(notes[_SCALE])

    def prune(self) -> int:
        """Remove dead channels and their optimizer state; return the number of removed parameters."""
        trainer = self.trainer
        before = sum(parameter.numel() for parameter in trainer.parameters.values())
        cuts = surgery.prune(trainer.module, self.groups)

        def follow(name: str, value: Tensor) -> Tensor:
            cut = cuts.get(name)
            return surgery.apply_cut(value, cut) if cut is not None and value.shape == cut.before else value

        trainer.optimizers.change_state(follow)
        return before - sum(parameter.numel() for parameter in trainer.parameters.values())

    def macs(self) -> int:
        """Multiply-accumulates per image of a forward pass of the current network."""
        module = self.trainer.module

        def operations(images: Tensor) -> int:
            with flop_counter() as counter:  # inside, because what is cached outside is not counted
                module(images)
            return int(counter.get_total_flops())

        return int(run_on_meta(module, self.input_shape, False, operations)[0]) // (2 * BATCH)


def with_saved_widths(chain: Chain, structure: dict[str, Any], classes: int, state: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild the network of a run; if it was pruned, with layers as wide as the saved tensors, of any shapes."""
    module = chain.to_module()
    if structure.get("pruned"):
        surgery.adopt_widths(module, state, chain.input_shape)
    return module
