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
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from snugfit.lean.saved_tensors import memory_order

PART_MULTIPLE = 256
"""Parts of a gradient begin at multiples of so many values, as blocks of rounded optimizer state do."""
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


@runtime_checkable
class PartialRule(UpdateRule, Protocol):
    """A rule that also takes a gradient in parts, so that the whole gradient is never in memory."""

    def begin(self, parameter: Tensor) -> None:
        """Begin a step of a parameter of any shape, without its gradient."""

    def step_part(self, parameter: Tensor, gradient: Tensor, first: int) -> None:
        """Apply the gradient (N,) of N values of a parameter of any shape, in memory order from ``first`` on.

        It is called in ``no_grad``. A step has all parts once, in order; each begins at a multiple of
        :data:`PART_MULTIPLE`.
        """


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


class FusedRule:
    """What rules that run torch's fused kernels share: steps of whole gradients and of parts of them.

    Attributes:
        lr, state: as of :class:`UpdateRule`.
        names: tensors of the state that have the parameter's shape.
    """

    def __init__(self, lr: float, weight_decay: float, names: tuple[str, ...]) -> None:
        self.lr, self.weight_decay, self.names = lr, weight_decay, names
        self.state: dict[str, Tensor] = {}

    @_without_graph
    def step(self, parameter: Tensor) -> None:
        """Apply the gradient of a parameter of any shape; on the meta device only the state is made."""
        gradient = fit_gradient(parameter)
        self.begin(parameter)
        self._update(*map(_contiguous, (parameter, gradient, *self._of_parameter_shape())))

    def begin(self, parameter: Tensor) -> None:
        """Begin a step of a parameter of any shape, and make its state if there is none yet."""
        raise NotImplementedError

    def step_part(self, parameter: Tensor, gradient: Tensor, first: int) -> None:
        """See :meth:`PartialRule.step_part`: a parameter of any shape, and the gradient (N,)."""
        self._update(*_part(gradient, first, parameter, *self._of_parameter_shape()))

    def _of_parameter_shape(self) -> list[Tensor]:
        return [self.state[name] for name in self.names]

    def _update(self, parameter: Tensor, gradient: Tensor, *state: Tensor) -> None:
        """Update contiguous tensors of one shape."""
        raise NotImplementedError


class FusedSGD(FusedRule):
    """SGD with momentum, without dampening or Nesterov: equal to ``torch.optim.SGD(fused=True)`` bit for bit."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(lr, weight_decay, ("momentum_buffer",) if momentum else ())
        self.momentum = momentum

    def begin(self, parameter: Tensor) -> None:
        """See :meth:`FusedRule.begin`, for a parameter of any shape."""
        self._is_first = bool(self.names) and "momentum_buffer" not in self.state
        if self._is_first:
            self.state["momentum_buffer"] = torch.empty_like(parameter, requires_grad=False)

    def _update(self, parameter: Tensor, gradient: Tensor, *state: Tensor) -> None:
        if not parameter.is_meta:
            torch._fused_sgd_(
                [parameter],
                [gradient],
                [*state],
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=self._is_first,
            )


class FusedAdamW(FusedRule):
    """AdamW: equal to ``torch.optim.AdamW(fused=True)`` bit for bit; without weight decay to ``torch.optim.Adam``."""

    def __init__(self, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(lr, weight_decay, ("exp_avg", "exp_avg_sq"))

    def begin(self, parameter: Tensor) -> None:
        """See :meth:`FusedRule.begin`, for a parameter of any shape; it counts the step."""
        if "step" not in self.state:
            self.state["step"] = torch.zeros((), device=parameter.device)
            for name in self.names:
                self.state[name] = torch.zeros_like(parameter, requires_grad=False)
        self.state["step"] += 1

    def _update(self, parameter: Tensor, gradient: Tensor, *state: Tensor) -> None:
        if not parameter.is_meta:
            torch._fused_adamw_(
                [parameter],
                [gradient],
                [state[0]],
                [state[1]],
                [],
                [self.state["step"]],
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


def _part(gradient: Tensor, first: int, parameter: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    """A part of a parameter and of its state, of any shape, with the gradient (N,), all (N,)."""
    piece = slice(first, first + len(gradient))
    weights, *kept = (values_in_memory(each)[piece] for each in (parameter, *state))
    return weights, gradient, *kept


def values_in_memory(tensor: Tensor) -> Tensor:
    """A dense tensor of any shape as a vector (N,) in the order of its memory, not a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


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
