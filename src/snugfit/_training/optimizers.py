"""One optimizer per parameter, so that each gradient is applied and freed as soon as it is complete.

SGD and AdamW use torch's fused kernels: the stock loops allocate one (SGD) or two (AdamW) temporaries of the
parameter's size in every step, the fused kernels none. Schedule-free AdamW has no fused kernel and allocates one. Its
scalar state is the same for all parameters that step together, so one optimizer per parameter is equivalent to one per
unit.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from snugfit._core.workload import OptimizerName, OptimizerSettings
from snugfit._storage.tensor_file import Deferred
from snugfit.errors import CheckpointError


def lr_factor(settings: OptimizerSettings, step: int, steps: int, epochs: int) -> float:
    """Fraction of the peak learning rate in a step, from 0, of ``epochs`` with ``steps`` steps each.

    It rises linearly per step in the warm-up, which has whole steps, and leaves one. Then it is 1, or half a cosine
    from 1 to 0.
    """
    warm_up = min(round(settings.warmup_epochs * steps), epochs * steps - 1)
    if step < warm_up:
        return (step + 1) / warm_up
    if settings.schedule == "constant":
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * min((step - warm_up) / max(epochs * steps - warm_up, 1), 1.0)))


def _optimizer(parameter: nn.Parameter, settings: OptimizerSettings) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"params": [parameter], "lr": settings.lr, "weight_decay": settings.weight_decay}
    fused = parameter.device.type in _FUSED_DEVICES
    if settings.name == "sgd":
        return torch.optim.SGD(momentum=settings.momentum, fused=fused, **common)
    if settings.name == "adamw":
        return torch.optim.AdamW(fused=fused, **common)
    optimizer: torch.optim.Optimizer = AdamWScheduleFree(foreach=False, **common)
    return optimizer


_FUSED_DEVICES = ("cpu", "cuda")
_FUSED_STATE: dict[OptimizerName, tuple[str, ...]] = {"sgd": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
_AVERAGING_NUMBERS = ("k", "weight_sum", "lr_max")
"""Scalar state of schedule-free AdamW in its parameter group."""
_LIVE = "y"
"""Name of the trained weights of schedule-free AdamW, in a state whose weights are the averaged ones."""


class ParameterOptimizers:
    """SGD, AdamW or schedule-free AdamW over named parameters, stepped one parameter at a time.

    Either call :meth:`apply_in_backward` once, after which every backward pass updates the parameters and leaves no
    gradients behind (one backward per step), or let gradients accumulate and call :meth:`step`. Weight decay applies
    to all parameters, as in torch. Parameters that do not require gradients are left out.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings) -> None:
        self.settings = settings
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._optimizers = {name: _optimizer(p, settings) for name, p in self.parameters.items()}
        self._handles: list[RemovableHandle] = []
        self._averaged = True
        self._lr_scales: Mapping[str, float] = {}

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizers, one per parameter."""
        return iter(self._optimizers.values())

    def apply_in_backward(self) -> list[RemovableHandle]:
        """Step and free each gradient as soon as backward has accumulated it; returns the hooks' handles.

        The hooks refer to this object weakly: autograd keeps them out of the garbage collector's sight, so that a
        strong reference would keep the parameters in memory for good.
        """
        if not self._handles:
            own = weakref.ref(self)
            for name, parameter in self.parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: _apply_through(own, name))
                self._handles.append(hook)
        return self._handles

    def detach_hooks(self) -> None:
        """Undo :meth:`apply_in_backward`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def step(self) -> None:
        """Apply and free every gradient, one parameter after the other."""
        for name in self.parameters:
            self._apply(name)

    def zero_grad(self) -> None:
        """Free all gradients without applying them."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def set_lr_factor(self, factor: float) -> None:
        """Set the learning rate to ``settings.lr * factor``, times a parameter's own scale if it has one."""
        for name, optimizer in self._optimizers.items():
            optimizer.param_groups[0]["lr"] = self.settings.lr * self._lr_scales.get(name, 1.0) * factor

    def scale_lr(self, scales: Mapping[str, float]) -> None:
        """Set learning rates of single parameters: multiples of ``settings.lr``, by name."""
        self._lr_scales = dict(scales)
        self.set_lr_factor(1.0)

    def train(self) -> None:
        """Put the trained weights in place; required before a step after :meth:`average`."""
        self._switch(to_average=False)

    def average(self) -> None:
        """Put the averaged weights in place if the optimizer averages; otherwise do nothing."""
        self._switch(to_average=True)

    def _switch(self, *, to_average: bool) -> None:
        if self.settings.averages and self._averaged != to_average:
            for optimizer in self._optimizers.values():
                methodcaller("eval" if to_average else "train")(optimizer)  # torch's base class has neither
        self._averaged = to_average

    def averaged(self) -> dict[str, Deferred]:
        """The averaged weights by parameter name, computed when saved; empty if those in place are saved."""
        if not self.settings.averages or self._averaged:
            return {}
        return {name: Deferred(p.detach(), partial(self._average_of, name)) for name, p in self.parameters.items()}

    @torch.no_grad()
    def _average_of(self, name: str) -> Tensor:
        parameter, optimizer = self.parameters[name], self._optimizers[name]
        z = optimizer.state.get(parameter, {}).get("z", parameter)
        return torch.lerp(parameter, z, 1 - 1 / optimizer.param_groups[0]["betas"][0])

    def state(self) -> dict[str, Tensor]:
        """The live tensors of optimizer state, of any shape, by flat names (``features.0.weight/momentum_buffer``)."""
        found: dict[str, Tensor] = {}
        for name, optimizer in self._optimizers.items():
            parameter = self.parameters[name]
            values = dict(optimizer.state.get(parameter, {}))
            if self.settings.averages:
                group = optimizer.param_groups[0]
                values |= {key: torch.tensor(group[key], dtype=torch.float64) for key in _AVERAGING_NUMBERS}
                values |= {} if self._averaged else {_LIVE: parameter.detach()}
            found |= {f"{name}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state from :meth:`state`: the tensors themselves if their shape and layout fit, else copies.

        Raises:
            CheckpointError: a name or a shape does not belong to these parameters.
        """
        restored: dict[str, dict[str, Any]] = {name: {} for name in self.parameters}
        for flat_name, value in state.items():
            name, _, key = flat_name.rpartition("/")
            if name not in restored:
                raise CheckpointError(f"optimizer state '{flat_name}' belongs to no parameter. Resume the same model.")
            parameter = self.parameters[name]
            if value.dim() and value.shape != parameter.shape:
                raise CheckpointError(
                    f"optimizer state '{flat_name}' has shape {tuple(value.shape)}, its parameter "
                    f"{tuple(parameter.shape)}. Resume the same model."
                )
            restored[name][key] = _fit(value, parameter) if value.dim() else value.to(parameter.device)
        for name, optimizer in self._optimizers.items():
            if self.settings.averages:
                self._restore_average(name, restored[name])
            optimizer.state.clear()
            if restored[name]:
                optimizer.state[self.parameters[name]] = restored[name]

    @torch.no_grad()
    def _restore_average(self, name: str, restored: dict[str, Any]) -> None:
        """Move entries that are not per-parameter optimizer state to their place; shapes are unchanged."""
        parameter, group = self.parameters[name], self._optimizers[name].param_groups[0]
        for key in _AVERAGING_NUMBERS:
            if key in restored:
                group[key] = type(group[key])(restored.pop(key).item())
        live = restored.pop(_LIVE, None)
        if live is not None:
            parameter.copy_(live)
        self._averaged = live is None
        group["train_mode"] = not self._averaged

    def release(self) -> None:
        """Drop hooks, gradients and all optimizer state; the object cannot be used afterwards.

        torch's optimizers are parts of reference cycles, so their tensors would stay until the garbage collector runs.
        """
        self.detach_hooks()
        self.zero_grad()
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        self._optimizers.clear()
        self.parameters.clear()

    def _apply(self, name: str) -> None:
        parameter = self.parameters[name]
        if parameter.grad is None:
            return
        parameter.grad = _fit(parameter.grad, parameter)
        if parameter.is_meta and self.settings.name in _FUSED_STATE:
            self._take_state(self._optimizers[name].state[parameter], parameter)
        else:
            self._optimizers[name].step()
        parameter.grad = None

    def _take_state(self, state: dict[str, Tensor], parameter: nn.Parameter) -> None:
        """State of a fused kernel, in the parameter's shape: torch's loops on the meta device would use temporaries."""
        for key in _FUSED_STATE[self.settings.name] if self.settings.state_per_parameter else ():
            if key not in state:
                state[key] = torch.empty_like(parameter, requires_grad=False)


def _apply_through(reference: weakref.ref[ParameterOptimizers], name: str) -> None:
    optimizers = reference()
    if optimizers is not None:
        optimizers._apply(name)


def _fit(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return ``tensor`` on the device and in the shape and layout of ``parameter``: fused kernels read raw memory.

    On the meta device, gradients of convolutions have other layouts than on real devices.
    """
    if tensor.is_meta and parameter.is_meta:
        return tensor
    layouts = zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    if tensor.device == parameter.device and all(mine == theirs for n, mine, theirs in layouts if n > 1):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
