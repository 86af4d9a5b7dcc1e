"""Train a whole network with its own loss: the trainable of ``backprop`` and ``checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from snugfit._chain import distinct_state, load_state, tracking_norms
from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred
from snugfit._training.loss_scale import LossScale
from snugfit._training.losses import Loss
from snugfit._training.optimizers import MakeRule, ParameterOptimizers
from snugfit._training.statistics import recompute_statistics
from snugfit._training.task import StepResult, loss_of, precision_context, task_of
from snugfit.errors import CheckpointError
from snugfit.lean import CompressedActivations, use_lean, use_lean_convolutions
from snugfit.lean.bfloat16_weights import use_float_gradients
from snugfit.memory import is_out_of_memory

Forward = Callable[[Tensor], Tensor]

SCALE = "loss_scale"
"""Group of a checkpoint."""


@contextmanager
def mismatch_errors(
    source: str = "the checkpoint", advice: str = "Resume the run that it belongs to."
) -> Iterator[None]:
    """Context for loading tensors of ``source`` into modules.

    Raises:
        CheckpointError: names or shapes differ from the modules'.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
        raise CheckpointError(f"{source} belongs to another model ({first[:120]}). {advice}") from error


def _compressing(forward: Forward, workload: Workload) -> Forward:
    """A forward pass whose feature maps are kept in fewer bits."""
    context = CompressedActivations(8 if workload.activations == "int8" else 4)

    def run(images: Tensor) -> Tensor:
        with context:
            return forward(images)

    return run


class NetworkTrainer:
    """Trains a network on the task's loss, with accumulation or with gradients applied in the backward pass.

    Args:
        module: the network.
        forward: images (B, C, H, W) to outputs, such as logits (B, classes); the module's own forward, or one
            that recomputes.
        workload: task, optimizer and precision.
        micro_batches: batches accumulated to one step; with 1, and if nothing else needs all gradients, a hook applies
            and frees every gradient.
        loss: the loss, if it was passed from Python.
        optimizer: makes the update rule of each parameter, if an optimizer was passed from Python.

    Attributes:
        floor_in_one_pass: whether optimizer state, and gradients that parameters hold, are all that earlier steps and
            micro-batches leave in memory.
        loss_scale: that of gradients in float16, which are held until all are known to be finite; else None, as on the
            meta device.
    """

    floor_in_one_pass = True

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        workload: Workload,
        micro_batches: int = 1,
        loss: Loss | None = None,
        optimizer: MakeRule | None = None,
    ) -> None:
        self.module, self.micro_batches = module, micro_batches
        self.forward = _compressing(forward, workload) if workload.compresses else forward
        self.modules, self.task = [module], task_of(workload, loss)
        (use_lean if workload.compresses else use_lean_convolutions)(module)
        use_float_gradients(module)
        self.optimizers = ParameterOptimizers(module.named_parameters(), workload.optimizer, optimizer)
        self._precision = workload.precision
        self._weight: Tensor | None = None
        self._in_training = False
        self._clip_norm = workload.clip_norm
        self._holds = micro_batches > 1 or workload.holds_gradients
        device, scales = next(module.parameters()).device.type, self._precision == "float16"
        self.loss_scale = LossScale(self.optimizers, device) if scales and device != "meta" else None
        if micro_batches > 1:
            self.optimizers.hold()
        elif not self._holds:
            self.optimizers.apply_in_backward()

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """Run one forward and backward pass on a batch (B, ...), weighted by ``share``, and ``update`` the weights.

        Where classes have weights, the mean of accumulated batches is over weights and not over images. Their sum is
        known with the last batch, so gradients are divided by it then.
        """
        self.train_mode()
        self.optimizers.train()
        loss, outputs = loss_of(self.forward, inputs, labels, self.task.loss, self._precision)
        del inputs
        weight = self.task.weight(labels) if self.micro_batches > 1 else None
        part = loss * (share if weight is None else weight)
        (part if self.loss_scale is None else self.loss_scale.scaled(part)).backward()
        if weight is not None:
            self._weight = weight if self._weight is None else self._weight + weight
        if update and self._holds:
            self._apply_held()
        return StepResult.of(loss, outputs, labels, self.task.correct, weight)

    def _apply_held(self) -> None:
        """Apply all gradients: first divided by the loss's scale and the sum of weights, if any, then clipped."""
        if self.loss_scale is not None:
            self.loss_scale.unscale()
        if self._weight is not None:
            self.optimizers.divide_gradients(self._weight)
            self._weight = None
        if self._clip_norm is not None:
            self.optimizers.clip_gradients(self._clip_norm)
        (self.optimizers if self.loss_scale is None else self.loss_scale).step()

    def train_mode(self) -> None:
        """Put the network into training mode, by its own ``train`` if it has one.

        That is done once after each evaluation, since going through all layers takes a millisecond.
        """
        if not (self._in_training and self.module.training):
            self.module.train()
            self._in_training = True

    def evaluating(self) -> Forward:
        """The forward pass of the network in evaluation mode, images (B, C, H, W) to logits; in ``no_grad`` only."""
        return self.module.eval()

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate."""
        self.optimizers.set_lr_factor(factor)

    def state(self) -> dict[str, dict[str, Tensor | Deferred]]:
        """Weights, optimizer state and loss scale, in their shapes; between two steps there are no gradients."""
        groups: dict[str, dict[str, Tensor | Deferred]] = {
            "model": {**distinct_state(self.module), **self.optimizers.averaged()},
            "optimizer": {**self.optimizers.state()},
        }
        if self.loss_scale is not None:
            groups[SCALE] = {**self.loss_scale.state()}
        return groups

    def settle(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Put averaged weights in place, if any, and recompute trained norms' statistics from batches (B, ...)."""
        self.optimizers.average()
        self.train_mode()
        norms, weight = tracking_norms(self.module), next(self.module.parameters())
        with precision_context(weight, self._precision):
            recompute_statistics(norms, self.evaluating(), batches, weight.device, self.tiled_norms())

    def tiled_norms(self) -> dict[nn.Module, int]:
        """Pixels of the feature map that each norm reads whose module is not called; such norms are in tiles."""
        return {}

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Restore a state, in the shapes of the weights, one group in memory at a time."""
        with mismatch_errors():
            load_state(self.module, load("model"))
        self.optimizers.load_state(load("optimizer"))
        if self.loss_scale is not None:
            self.loss_scale.load_state(load(SCALE))
