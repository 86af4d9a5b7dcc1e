"""An optimizer with numbers in its state, which torch's own have no longer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class DecayingMomentum(Optimizer):
    """Counts steps in its state, or in its ``group`` or an ``attribute``, which no checkpoint holds."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1, where: str = "state") -> None:
        super().__init__(parameters, {"lr": lr, "where": where, "k": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += group["where"] == "group"
            self.count += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["k"] = state.get("k", 0) + 1
                state["decay"] = state.get("decay", 1.0) / 3
                state["odd"] = not state.get("odd", False)
                buffer = state.setdefault("buffer", torch.zeros_like(parameter, dtype=torch.float64))
                buffer.mul_(0.9).add_(parameter.grad)
                k = {"state": state["k"], "group": group["k"], "attribute": self.count}[group["where"]]
                parameter.add_(buffer, alpha=-group["lr"] * state["decay"] / k * (2 if state["odd"] else 1))
