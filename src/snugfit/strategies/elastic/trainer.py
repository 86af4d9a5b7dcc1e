"""Training of a network in which only selected tensors train; the selection may change during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred
from snugfit._training.network import Forward, mismatch_errors
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.task import StepResult, loss_of, task_of
from snugfit.lean import use_lean
from snugfit.memory.device import synchronize
from snugfit.surgery import adopt_widths


def set_modes(module: nn.Module) -> None:
    """Set training mode; norms keep using their pre-trained statistics."""
    module.train()
    for layer in module.modules():
        if isinstance(layer, _NormBase):
            layer.eval()


class TensorTrainer:
    """Trains a network by cross entropy; only the selected tensors have gradients and updates.

    With lean operators frozen tensors keep no activations. ``forward`` maps images (B, C, H, W) to logits (B, classes).
    Without accumulation, a hook applies and frees every gradient.
    """

    def __init__(
        self, module: nn.Module, forward: Forward, workload: Workload, micro_batches: int = 1, *, lean: bool = True
    ) -> None:
        self.module, self.forward, self.micro_batches, self.lean = module, forward, micro_batches, lean
        self.modules, self.settings, self.task = [module], workload.optimizer, task_of(workload)
        if lean:
            use_lean(module)
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizers = ParameterOptimizers((), workload.optimizer)
        self.before_update: Callable[[str, nn.Parameter], None] | None = None
        self.step_seconds: list[float] = []
        self._precision = workload.precision
        self._factor, self._spent = 1.0, 0.0
        self._handles: list[RemovableHandle] = []

    @property
    def selected(self) -> tuple[str, ...]:
        """Names of the selected tensors."""
        return tuple(self.optimizers.parameters)

    def select(self, names: Iterable[str]) -> None:
        """Select these tensors; those that stay selected keep their optimizer state, others lose it."""
        wanted, state = set(names), self.optimizers.state()
        self.restore_state(wanted, {key: t for key, t in state.items() if key.rpartition("/")[0] in wanted})
        self.step_seconds.clear()

    def release(self) -> None:
        """End training: drop the optimizers, and let every tensor require gradients again."""
        self.optimizers.release()
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def restore_state(self, names: Iterable[str], state: Mapping[str, Tensor]) -> None:
        """Select these tensors with an optimizer state from :meth:`ParameterOptimizers.state`, of any shapes."""
        wanted = set(names)
        self.optimizers.release()
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in wanted)
        self.optimizers = ParameterOptimizers(self.parameters.items(), self.settings)
        self.optimizers.load_state(state)
        self.optimizers.set_lr_factor(self._factor)
        self._hook()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self) -> None:
        """Register hooks that change and apply each gradient in the backward pass, unless gradients accumulate."""
        self._unhook()
        if self.micro_batches > 1:
            return
        if self.before_update is not None:
            for name, parameter in self.optimizers.parameters.items():
                hook = partial(self.before_update, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self.optimizers.apply_in_backward()

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """One forward and backward pass on inputs (B, C, H, W) and labels (B,); see ``_training.loop.Trainable``."""
        started = time.perf_counter()
        set_modes(self.module)
        loss, logits = loss_of(self.forward, inputs, labels, self.task.loss, self._precision)
        del inputs
        (loss * share).backward()
        if update and self.micro_batches > 1:
            self._update()
        result = StepResult.of(loss, logits, labels)
        synchronize(logits.device)
        self._spent += time.perf_counter() - started
        if update:
            self.step_seconds.append(self._spent)
            self._spent = 0.0
        return result

    def _update(self) -> None:
        """Apply the accumulated gradients."""
        if self.before_update is not None:
            for name, parameter in self.optimizers.parameters.items():
                self.before_update(name, parameter)
        self.optimizers.step()

    def dry_step(self, inputs: Tensor, labels: Tensor, only: Container[str] | None = None) -> None:
        """Run forward and backward on a micro-batch (B, C, H, W) and labels (B,); free gradients without updates.

        If gradients accumulate, a second pass runs with those of the first in memory. Of the selected tensors, those in
        ``only`` get gradients; all by default.
        """
        trained = {name: p for name, p in self.optimizers.parameters.items() if only is None or name in only}
        idle = [p for name, p in self.optimizers.parameters.items() if name not in trained]
        self.optimizers.detach_hooks()
        self._unhook()
        if self.micro_batches == 1:
            self._handles = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in trained.values()]
        try:
            for parameter in idle:
                parameter.requires_grad_(False)
            set_modes(self.module)
            for _ in range(min(self.micro_batches, 2)):
                loss = loss_of(self.forward, inputs, labels, self.task.loss, self._precision)[0]
                loss.backward()
                del loss
        finally:
            for parameter in idle:
                parameter.requires_grad_(True)
            self.optimizers.zero_grad()
            self._hook()

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate."""
        self._factor = factor
        self.optimizers.set_lr_factor(factor)

    def state(self) -> dict[str, dict[str, Tensor | Deferred]]:
        """All weights, and the optimizer state of selected tensors, of any shapes; no gradients."""
        return {"model": {**self.module.state_dict()}, "optimizer": {**self.optimizers.state()}}

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Load a state of the same selection, of any shapes, one group in memory at a time."""
        weights = load("model")
        with mismatch_errors():
            if self.before_update is not None:
                adopt_widths(self.module, weights)  # channels may have been removed
            self.module.load_state_dict(weights)
        del weights
        self.optimizers.load_state(load("optimizer"))

    def settle(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Do nothing with batches (B, ...): no supported optimizer averages weights."""


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
