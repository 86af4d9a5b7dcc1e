"""Schedule-free AdamW of one parameter, by the schedulefree package; imported when a run uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn

from snugfit.lean.update_rules import fit_gradient

_NUMBERS = ("k", "weight_sum", "lr_max")
"""Scalar state, which the package keeps in its parameter group."""
_LIVE = "y"
"""Name of the trained weights in a state whose weights are the averaged ones."""


class _LightAdamW(AdamWScheduleFree):
    """The package's optimizer without the imports (68 MiB) of the method of ``torch.optim`` that adds parameters."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append({**self.defaults, **param_group})


class ScheduleFree:
    """The steps of one parameter, of any shape. See :class:`~snugfit.lean.update_rules.UpdateRule`.

    Its kernel is not fused: a step allocates one temporary of the parameter's size.
    """

    def __init__(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        self._parameter = parameter
        self._optimizer = _LightAdamW([parameter], lr=lr, weight_decay=weight_decay, foreach=False)
        self._group: dict[str, Any] = self._optimizer.param_groups[0]

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._group["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self._group["lr"] = value

    def step(self, parameter: Tensor) -> None:
        """Apply the gradient of a parameter of any shape; the gradient is overwritten."""
        fit_gradient(parameter)
        self._optimizer.step()

    @property
    def averaged(self) -> bool:
        """Whether the averaged weights are in place, rather than the trained ones."""
        return not self._group["train_mode"]

    def switch(self, *, to_average: bool) -> None:
        """Put the averaged or the trained weights in place."""
        if to_average:
            self._optimizer.eval()
        else:
            self._optimizer.train()

    @torch.no_grad()
    def average(self) -> Tensor:
        """The averaged weights, of the parameter's shape (...), computed from the trained ones that are in place."""
        z = self._optimizer.state.get(self._parameter, {}).get("z", self._parameter)
        return torch.lerp(self._parameter, z, 1 - 1 / self._group["betas"][0])

    @property
    def state(self) -> dict[str, Tensor]:
        """The live tensors, the scalars, and the trained weights if those in place are not the averaged ones."""
        values: dict[str, Tensor] = dict(self._optimizer.state.get(self._parameter, {}))
        values |= {key: torch.tensor(self._group[key], dtype=torch.float64) for key in _NUMBERS}
        return values | ({} if self.averaged else {_LIVE: self._parameter.detach()})

    @state.setter
    @torch.no_grad()
    def state(self, values: Mapping[str, Tensor]) -> None:
        tensors = {**values}
        for key in _NUMBERS:
            if key in tensors:
                self._group[key] = type(self._group[key])(tensors.pop(key).item())
        live = tensors.pop(_LIVE, None)
        if live is not None:
            self._parameter.copy_(live)
        self._group["train_mode"] = live is not None
        self._optimizer.state.clear()
        if tensors:
            self._optimizer.state[self._parameter] = tensors
