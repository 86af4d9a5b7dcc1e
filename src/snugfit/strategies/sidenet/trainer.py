"""Trainer of a few parameters of a frozen network, with lean operators."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain.blocks import SIDE_NETWORK
from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred
from snugfit._training.network import NetworkTrainer, mismatch_errors
from snugfit.errors import CheckpointError
from snugfit.lean import use_lean

SIDE_PREFIX = f"{SIDE_NETWORK}."
"""Prefix of the names of the side network's tensors."""


class FrozenTrainer(NetworkTrainer):
    """Train by cross entropy; BatchNorm outside the side network keeps its pre-trained statistics.

    Frozen parameters have no gradients and no optimizer state, and are not in checkpoints: they never change.

    Args:
        module: the network, side network included.
        workload: optimizer and precision.
        trained: names of the parameters that train.
        micro_batches: as in :class:`NetworkTrainer`.
        side_lr: peak learning rate of the side network; the others have that of the workload.
    """

    def __init__(
        self, module: nn.Module, workload: Workload, trained: Collection[str], micro_batches: int, side_lr: float
    ) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trained)
        use_lean(module)
        self._norms = [
            layer
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and not name.startswith(SIDE_PREFIX)
        ]
        super().__init__(module, module, workload, micro_batches)
        ratio = side_lr / workload.optimizer.lr
        self.optimizers.scale_lr({name: ratio for name in self.optimizers.parameters if name.startswith(SIDE_PREFIX)})

    def train_mode(self) -> None:
        """Training mode, but BatchNorm of the frozen network in evaluation mode."""
        self.module.train()
        for norm in self._norms:
            norm.eval()

    def state(self) -> dict[str, dict[str, Tensor | Deferred]]:
        """Trained parameters, the side network's statistics, and optimizer state, in the shapes of the parameters."""
        return {"model": {**self._trained_tensors()}, "optimizer": {**self.optimizers.state()}}

    def _trained_tensors(self) -> dict[str, Tensor]:
        trained = self.optimizers.parameters
        return {
            name: tensor
            for name, tensor in self.module.state_dict().items()
            if name in trained or name.startswith(SIDE_PREFIX)
        }

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Load a state, one group in memory at a time; shapes as in :meth:`state`.

        Raises:
            CheckpointError: the state is of another network.
        """
        weights = load("model")
        if weights.keys() != self._trained_tensors().keys():
            strange = next(iter(sorted(weights.keys() ^ self._trained_tensors().keys())))
            raise CheckpointError(f"the checkpoint is of another model ({strange}). Resume the run it belongs to.")
        with mismatch_errors():
            self.module.load_state_dict(weights, strict=False)
        del weights
        self.optimizers.load_state(load("optimizer"))
