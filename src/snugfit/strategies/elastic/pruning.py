"""The scheme PruneTrain: full training with group lasso on channels, and channel removal at every interval."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from snugfit._chain.propagation import BATCH, run_on_meta
from snugfit._training.events import Notice
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit.lean import use_lean, use_stock
from snugfit.strategies.elastic.trainer import TensorTrainer
from snugfit.surgery import (
    add_penalty_gradient,
    find_groups,
    penalised_weights,
    penalty,
    penalty_scale,
    prune,
    prune_optimizer,
)

_SCALE = "lasso_scale"


class Pruner:
    """Adds group lasso to every step of a trainer, and removes channels that it has driven to zero.

    Args:
        trainer: the trainer of the network.
        input_shape: (channels, height, width) of an image.
        ratio: share of the penalty in the loss at the start (PruneTrain section 4).
    """

    def __init__(self, trainer: TensorTrainer, input_shape: tuple[int, ...], ratio: float) -> None:
        self.trainer, self.input_shape, self.ratio, self.scale = trainer, input_shape, ratio, 0.0
        use_stock(trainer.module)  # find_groups distinguishes layers by class
        self.groups = find_groups(cast(fx.GraphModule, trainer.module), input_shape)
        if trainer.lean:
            use_lean(trainer.module)
        self.slots = penalised_weights(trainer.module, self.groups)
        trainer.before_update = self._penalise

    def _penalise(self, name: str, parameter: nn.Parameter) -> None:
        if name in self.slots:
            add_penalty_gradient(parameter, self.slots[name], self.scale)

    def start(self, data: TrainingData, run: Run, batch: int) -> None:
        """Scale the penalty by the loss of the first batch; after an interruption, restore the scale."""
        notes = run.position.notes
        if _SCALE not in notes:
            module = self.trainer.module.eval()
            images, labels = next(data.train.epoch(0, batch))
            with torch.no_grad(), run.limit.allow_kernels():
                loss = float(F.cross_entropy(module(images.to(run.device)).float(), labels.to(run.device)))
            whole = penalty(module, self.groups)
            if not whole:
                run.emit(Notice("prunetrain finds no removable channels in this network; it trains all weights"))
            notes[_SCALE] = penalty_scale(loss, whole, self.ratio) if whole else 0.0
        self.scale = float(notes[_SCALE])

    def prune(self) -> int:
        """Remove dead channels and their optimizer state; return the number of removed parameters."""
        trainer = self.trainer
        before = sum(parameter.numel() for parameter in trainer.parameters.values())
        cuts = prune(trainer.module, self.groups)
        for optimizer in trainer.optimizers if cuts else ():
            prune_optimizer(optimizer, trainer.module, cuts)
        return before - sum(parameter.numel() for parameter in trainer.parameters.values())

    def macs(self) -> int:
        """Multiply-accumulates per image of a forward pass of the current network."""
        with FlopCounterMode(display=False) as counter:
            run_on_meta(self.trainer.module, self.input_shape, training=False)
        return int(counter.get_total_flops()) // (2 * BATCH)
