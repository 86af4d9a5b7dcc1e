"""Loss scaling for gradients in float16 by torch's GradScaler (Micikevicius et al., ICLR 2018, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from snugfit._training.optimizers import ParameterOptimizers
from snugfit.errors import CheckpointError, DivergedError

LEAST_SCALE = 2.0**-14
"""A scale below this means that the gradients are NaN or infinite for another reason: the first scale is 2^16."""


class LossScale:
    """Scales losses, and skips steps with NaN or infinite gradients, which must all be held until then.

    A skipped step halves the scale, and 2,000 steps in a row without one double it. Nothing else of a skipped step
    changes parameters or optimizer state.

    Args:
        optimizers: of the trained parameters.
        device: type of the device.

    Attributes:
        skips: whether steps may be skipped. If not, the first step makes the optimizer state, whatever its gradients.
        skipped: number of skipped steps.
    """

    def __init__(self, optimizers: ParameterOptimizers, device: str) -> None:
        self._optimizers, self._scaler = optimizers, torch.amp.GradScaler(device)
        groups = [{"params": list(optimizers.parameters.values())}]
        self._stepped = cast(Any, SimpleNamespace(param_groups=groups, step=optimizers.step))  # all that it reads
        self.skips, self.skipped = True, 0

    @property
    def value(self) -> float:
        """The scale of the next step."""
        return float(self._scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss (scalar) times the scale."""
        return self._scaler.scale(loss)

    def unscale(self) -> None:
        """Divide all gradients by the scale, in place."""
        self._scaler.unscale_(self._stepped)

    def step(self) -> None:
        """Apply and free the gradients, after :meth:`unscale`, or skip the step; then change the scale.

        Raises:
            DivergedError: gradients are NaN or infinite at the least scale, too.
        """
        before = self.value
        if self.skips:
            self._scaler.step(self._stepped)
        else:
            self._optimizers.step()
        self._optimizers.zero_grad()
        self._scaler.update()
        if self.value < before:
            self.skipped += 1
        if self.skips and self.value < LEAST_SCALE:
            raise DivergedError(
                f"gradients are NaN or infinite although the loss is finite, at every loss scale down to {before:.2g}. "
                "Lower --lr, or use --precision bfloat16, in a new run; what was saved is untouched."
            )

    def state(self) -> dict[str, Tensor]:
        """Scale, steps since it last changed, and skipped steps: scalars."""
        growing = self._scaler.state_dict()["_growth_tracker"]
        return {
            "scale": torch.tensor(self.value),
            "growth_tracker": torch.tensor(growing, dtype=torch.int32),
            "skipped": torch.tensor(self.skipped),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state from :meth:`state` (scalars); an empty one, of weights after training, changes nothing.

        Raises:
            CheckpointError: a number is absent or impossible.
        """
        if not state:
            return
        found = {name: tensor.item() for name, tensor in state.items() if not tensor.dim()}
        scale, growing, skipped = (found.get(name, -1) for name in self.state())
        if not (0 < scale < math.inf and growing >= 0 and skipped >= 0):
            raise CheckpointError(f"the loss scale of the checkpoint is damaged: {found}. Start the run again.")
        self._scaler.load_state_dict({**self._scaler.state_dict(), "scale": scale, "_growth_tracker": growing})
        self.skipped = int(skipped)
