"""SGD and AdamW of one parameter by torch's fused kernels, called without an object of ``torch.optim``.

The first such object imports dynamo, inductor and sympy, 68 MiB that no step needs. The kernels allocate nothing for
contiguous tensors. They copy a gradient in channels_last, so they get views in memory order: for 512x512x3x3 values,
that saves 9.4 MB and three quarters of the time. Torch's own loops allocate one (SGD) or two (AdamW) temporaries of the
parameter's size in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from snugfit.lean.saved_tensors import memory_order

_BETAS, _EPS = (0.9, 0.999), 1e-8
"""AdamW's, torch's defaults."""
Rule = TypeVar("Rule")


class UpdateRule(Protocol):
    """The steps of one parameter.

    Attributes:
        lr: learning rate of the next step.
        state: live tensors of the optimizer state, by torch's names; empty before the first step.
    """

    lr: float
    state: dict[str, Tensor]

    def step(self, parameter: Tensor) -> None:
        """Apply the gradient of a parameter of any shape; the gradient stays, and its values may change."""


class WrappingRule:
    """What rules that run another one share: its learning rate."""

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._rule.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._rule.lr = value


def _without_graph(step: Callable[[Rule, Tensor], None]) -> Callable[[Rule, Tensor], None]:
    """A step of a parameter of any shape in ``no_grad``, in which backward hooks are already; entering takes 5 us."""

    @wraps(step)
    def run(rule: Rule, parameter: Tensor) -> None:
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            step(rule, parameter)

    return run


class FusedSGD:
    """SGD with momentum, without dampening or Nesterov: equal to ``torch.optim.SGD(fused=True)`` bit for bit."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.names: tuple[str, ...] = ("momentum_buffer",) if momentum else ()
        self.state: dict[str, Tensor] = {}

    @_without_graph
    def step(self, parameter: Tensor) -> None:
        """Apply the gradient of a parameter of any shape; on the meta device only the state is made."""
        gradient = fit_gradient(parameter)
        first = bool(self.names) and "momentum_buffer" not in self.state
        if first:
            self.state["momentum_buffer"] = torch.empty_like(parameter, requires_grad=False)
        if not parameter.is_meta:
            torch._fused_sgd_(
                [_contiguous(parameter)],
                [_contiguous(gradient)],
                [_contiguous(self.state[name]) for name in self.names],
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=first,
            )


class FusedAdamW:
    """AdamW: equal to ``torch.optim.AdamW(fused=True)`` bit for bit; without weight decay to ``torch.optim.Adam``."""

    def __init__(self, lr: float, weight_decay: float = 0.0) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        self.names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        self.state: dict[str, Tensor] = {}

    @_without_graph
    def step(self, parameter: Tensor) -> None:
        """Apply the gradient of a parameter of any shape; on the meta device only the state is made."""
        gradient, state = fit_gradient(parameter), self.state
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        state["step"] += 1
        if not parameter.is_meta:
            torch._fused_adamw_(
                [_contiguous(parameter)],
                [_contiguous(gradient)],
                [_contiguous(state["exp_avg"])],
                [_contiguous(state["exp_avg_sq"])],
                [],
                [state["step"]],
                lr=self.lr,
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                weight_decay=self.weight_decay,
                eps=_EPS,
                amsgrad=False,
                maximize=False,
            )


def _contiguous(tensor: Tensor) -> Tensor:
    """The tensor, of any shape, or a view (N,) of it in memory order, which elementwise steps may take in its place."""
    values = None if tensor.is_contiguous() else memory_order(tensor)
    return tensor if values is None else values


def fit_gradient(parameter: Tensor) -> Tensor:
    """Give the gradient of a parameter of any shape the parameter's layout, and return it."""
    gradient = parameter.grad
    assert gradient is not None
    fitting = fit(gradient, parameter)
    if fitting is not gradient:
        parameter.grad = fitting
    return fitting


def fit(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return ``tensor`` on the device and in the layout of ``parameter``, of the same shape.

    Fused kernels read raw memory. On the meta device, gradients of convolutions have other layouts than on real ones.
    """
    if tensor.is_meta and parameter.is_meta:
        return tensor
    mine, theirs = tensor.stride(), parameter.stride()
    same = mine == theirs or all(a == b for n, a, b in zip(parameter.shape, mine, theirs, strict=True) if n > 1)
    if same and tensor.device == parameter.device:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
