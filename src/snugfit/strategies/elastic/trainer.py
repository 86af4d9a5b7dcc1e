"""Train a network of which only some tensors train, chosen anew as training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred
from snugfit._training.network import Forward, foreign_state
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.step import StepResult, cross_entropy_of
from snugfit.lean import use_lean
from snugfit.surgery import adopt_widths


def set_modes(module: nn.Module) -> None:
    """Training mode, but BatchNorm keeps to its pre-trained statistics."""
    module.train()
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()


class TensorTrainer:
    """Cross entropy on a network's output; gradients and updates for the selected tensors alone.

    Args:
        module: the network.
        forward: images (B, C, H, W) to logits (B, classes).
        workload: optimizer and precision.
        micro_batches: batches accumulated to one step; with 1 every gradient is applied and freed by a hook.
        lean: whether frozen tensors keep no activations, through the lean operators.
    """

    def __init__(
        self, module: nn.Module, forward: Forward, workload: Workload, micro_batches: int = 1, *, lean: bool = True
    ) -> None:
        self.module, self.forward, self.micro_batches = module, forward, micro_batches
        self.modules = [module]
        self.settings = workload.optimizer
        self.lean = lean
        if lean:
            use_lean(module)
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizers = ParameterOptimizers((), workload.optimizer)
        self.before_update: Callable[[str, nn.Parameter], None] | None = None
        self.step_seconds: list[float] = []
        self._bfloat16 = workload.precision == "bfloat16"
        self._factor, self._spent = 1.0, 0.0
        self._handles: list[RemovableHandle] = []

    @property
    def selected(self) -> tuple[str, ...]:
        """Names of the tensors that train."""
        return tuple(self.optimizers.parameters)

    def select(self, names: Iterable[str]) -> None:
        """Train these tensors from now on; those that go lose their optimizer state, those that stay keep it."""
        wanted, state = set(names), self.optimizers.state()
        self.restore_state(wanted, {key: t for key, t in state.items() if key.rpartition("/")[0] in wanted})
        self.step_seconds.clear()

    def drop_state(self) -> None:
        """Let go of the optimizers and all that they hold, until :meth:`restore_state`."""
        self.optimizers.release()

    def release(self) -> None:
        """Drop the optimizers, and let every tensor require gradients again as it did at first; the end of training."""
        self.optimizers.release()
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def restore_state(self, names: Iterable[str], state: Mapping[str, Tensor]) -> None:
        """Train these tensors from this optimizer state, as :meth:`ParameterOptimizers.state` gives it."""
        wanted = set(names)
        self.optimizers.release()
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in wanted)
        self.optimizers = ParameterOptimizers(self.parameters.items(), self.settings)
        self.optimizers.load_state(state)
        self.optimizers.set_lr_factor(self._factor)
        self._hook()

    def _hook(self) -> None:
        """Let gradients be applied, and changed before, as they come; unless they are to be accumulated."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.micro_batches > 1:
            return
        if self.before_update is not None:
            for name, parameter in self.optimizers.parameters.items():
                hook = partial(self.before_update, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self.optimizers.apply_in_backward()

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """One forward and backward; see :class:`snugfit._training.loop.Trainable`."""
        started = time.perf_counter()
        set_modes(self.module)
        loss, logits = cross_entropy_of(self.forward, inputs, labels, bfloat16=self._bfloat16)
        del inputs
        (loss * share).backward()
        if update and self.micro_batches > 1:
            self._update()
        result = StepResult.of(loss, logits, labels)
        self._spent += time.perf_counter() - started
        if update:
            self.step_seconds.append(self._spent)
            self._spent = 0.0
        return result

    def _update(self) -> None:
        """Apply the gradients that were accumulated."""
        for name, parameter in self.optimizers.parameters.items() if self.before_update is not None else ():
            self.before_update(name, parameter)  # type: ignore[misc]
        self.optimizers.step()

    def dry_step(self, inputs: Tensor, labels: Tensor, only: Container[str] | None = None) -> None:
        """The step's forward and backward, whose gradients are freed instead of applied: it changes nothing.

        Where gradients accumulate, there is a second forward and backward with those of the first in memory.

        Args:
            inputs, labels: a micro-batch.
            only: of the selected tensors, those that have gradients; all of them by default.
        """
        trained = {name: p for name, p in self.optimizers.parameters.items() if only is None or name in only}
        idle = [p for name, p in self.optimizers.parameters.items() if name not in trained]
        self.optimizers.detach_hooks()
        for handle in self._handles:
            handle.remove()
        drop = _dropping if self.micro_batches == 1 else _keeping
        handles = [p.register_post_accumulate_grad_hook(drop) for p in trained.values()]
        try:
            for parameter in idle:
                parameter.requires_grad_(False)
            set_modes(self.module)
            for _ in range(min(self.micro_batches, 2)):
                loss = cross_entropy_of(self.forward, inputs, labels, bfloat16=self._bfloat16)[0]
                loss.backward()
                del loss
        finally:
            for handle in handles:
                handle.remove()
            for parameter in idle:
                parameter.requires_grad_(True)
            self.optimizers.zero_grad()
            self._hook()

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate."""
        self._factor = factor
        self.optimizers.set_lr_factor(factor)

    def state(self) -> dict[str, dict[str, Tensor | Deferred]]:
        """All weights, and the optimizer state of the selected ones; between two steps there are no gradients."""
        return {"model": {**self.module.state_dict()}, "optimizer": {**self.optimizers.state()}}

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Take up a state of the same selection, one group in memory at a time."""
        weights = load("model")
        with foreign_state():
            if self.before_update is not None:
                adopt_widths(self.module, weights)  # channels may have been removed
            self.module.load_state_dict(weights)
        del weights
        self.optimizers.load_state(load("optimizer"))

    def settle(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Nothing: weights that are averaged cannot come and go, so no such optimizer is taken."""


def _dropping(parameter: Tensor) -> None:
    parameter.grad = None


def _keeping(parameter: Tensor) -> None:
    pass
