"""An exponential moving average of a parameter, beside the trained weights; evaluation and the final model use it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from snugfit._core.workload import OptimizerSettings
from snugfit.lean.update_rules import UpdateRule, WrappingRule

_TRAINED = "trained"
"""Name of the trained weights in a state; the weights of the same checkpoint are the averaged ones."""
_MOST_OF_FIRST = 0.1
"""Share of the first step's weights in the final average above which a run says so."""


class AveragedRule(WrappingRule):
    """An update rule that also averages the weights after every step: ``a = decay a + (1 - decay) w``.

    The average begins as the weights after the first step, as in ``torch.optim.swa_utils``. Averaged and trained
    weights change places without a copy.
    """

    def __init__(self, rule: UpdateRule, parameter: nn.Parameter, decay: float) -> None:
        super().__init__(rule)
        self._parameter, self._decay = parameter, decay
        self._other: Tensor | None = None
        self.averaged = False

    @torch.no_grad()
    def step(self, parameter: Tensor) -> None:
        """Apply the gradient of a parameter of any shape, and average."""
        self._rule.step(parameter)
        if self._other is None:
            self._other = parameter.detach().clone()
        else:
            self._other.lerp_(parameter, 1 - self._decay)

    def switch(self, *, to_average: bool) -> None:
        """Put the averaged or the trained weights in place."""
        if self._other is not None and to_average != self.averaged:
            self._parameter.data, self._other = self._other, self._parameter.data
            self.averaged = to_average

    def average(self) -> Tensor:
        """The averaged weights, of the parameter's shape (...), while the trained ones are in place."""
        return self._parameter.detach() if self._other is None else self._other

    @property
    def state(self) -> dict[str, Tensor]:
        """The live tensors of the rule, and the trained weights (of the parameter's shape) if there is an average."""
        if self._other is None:
            return self._rule.state
        trained = self._other if self.averaged else self._parameter.detach()
        return {**self._rule.state, _TRAINED: trained}

    @state.setter
    def state(self, values: Mapping[str, Tensor]) -> None:
        own = dict(values)
        self._other = own.pop(_TRAINED, None)
        self.averaged = self._other is not None
        self._rule.state = own


def first_step_notice(settings: OptimizerSettings, steps: int) -> str | None:
    """What to say if a run of so many steps is too short for its average; None otherwise."""
    if settings.ema is None:
        return None
    share = settings.ema ** (steps - 1)
    if share <= _MOST_OF_FIRST:
        return None
    advice = f"; {1 - float(f'{5 / steps:.1g}'):.12g} suits its length" if steps > 10 else ""
    return (
        f"--ema {settings.ema:g} averages over about {1 / (1 - settings.ema):,.0f} steps, and this run has {steps:,}: "
        f"the weights of its first step are {share:.0%} of the average{advice}"
    )
