"""Train a few parameters of a network whose others are frozen, through the lean operators."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred
from snugfit._training.network import NetworkTrainer, foreign_state
from snugfit.errors import CheckpointError
from snugfit.lean import use_lean

SIDE = "side."
"""Names of the side network's tensors begin with it."""


class FrozenTrainer(NetworkTrainer):
    """Cross entropy on a network's output; BatchNorm beyond the side network keeps to its pre-trained statistics.

    Frozen parameters have no gradients, no optimizer state and no part in a checkpoint: they are those that the run
    began with.

    Args:
        module: the network, side network included.
        workload: optimizer and precision.
        trained: names of the parameters that train.
        micro_batches: as in :class:`NetworkTrainer`.
        side_lr: peak learning rate of the side network; that of the workload for the others.
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
            if isinstance(layer, _BatchNorm) and not name.startswith(SIDE)
        ]
        super().__init__(module, module, workload, micro_batches)
        ratio = side_lr / workload.optimizer.lr
        self.optimizers.scale_lr({name: ratio for name in self.optimizers.parameters if name.startswith(SIDE)})

    def train_mode(self) -> None:
        """Training mode, but BatchNorm of the frozen network in evaluation mode."""
        self.module.train()
        for norm in self._norms:
            norm.eval()

    def state(self) -> dict[str, dict[str, Tensor | Deferred]]:
        """What training changes: the parameters that train, the side network's statistics, and optimizer state."""
        return {"model": {**self._changing()}, "optimizer": {**self.optimizers.state()}}

    def _changing(self) -> dict[str, Tensor]:
        trained = self.optimizers.parameters
        return {
            name: tensor
            for name, tensor in self.module.state_dict().items()
            if name in trained or name.startswith(SIDE)
        }

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Take up a state, one group in memory at a time.

        Raises:
            CheckpointError: it is of another network.
        """
        weights = load("model")
        if weights.keys() != self._changing().keys():
            strange = next(iter(sorted(weights.keys() ^ self._changing().keys())))
            raise CheckpointError(f"the checkpoint is of another model ({strange}). Resume the run it belongs to.")
        with foreign_state():
            self.module.load_state_dict(weights, strict=False)
        del weights
        self.optimizers.load_state(load("optimizer"))
