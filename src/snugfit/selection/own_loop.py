"""Selection in your own training loop: which tensors train now, selected again every few steps."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit._core.profile import TensorProfile
from snugfit.errors import InfeasibleTimeError, UsageError
from snugfit.memory.scratch import ScratchFile
from snugfit.selection.choice import Headroom, choose
from snugfit.selection.importance import Update, importance, scratch_bytes
from snugfit.selection.network import Network
from snugfit.selection.timing import StepTimes


class TensorSelection:
    """Trains only the tensors that matter now, so that a step takes at most a share of a full one (ElasticTrainer).

    Call :meth:`step` at the start of each training step. Every ``every`` steps it measures on that step's images how
    far an update of each tensor would lower the loss, selects the best tensors that fit the time, and sets
    ``requires_grad`` of all others to False; the classifier always trains. Your forward pass, loss and optimizer stay
    yours: torch's optimizers skip tensors without a gradient. BatchNorm in training mode keeps updating its statistics;
    put it into evaluation mode to fine-tune as the paper does.

    >>> import torch
    >>> from torch import nn
    >>> from snugfit import Chain
    >>> from snugfit.profiling import time_tensors
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> chain = Chain.from_module(model, (1, 8, 8))
    >>> selection = TensorSelection(chain, time_tensors(chain, optimizer, batch=4), optimizer, ratio=1.0, every=10)
    >>> images, labels = torch.randn(4, 1, 8, 8), torch.randint(10, (4,))
    >>> selection.step(images, labels)  # and now forward, backward, optimizer.step() as ever
    True
    >>> {"3.weight", "3.bias"} <= set(selection.selected)
    True

    Attributes:
        selected: names of the tensors that train now, in order of execution; empty before the first step.
        importance: how far an update of each tensor lowers the loss, by name, at the last selection.

    Args:
        chain: the network; it shares its weights with the model (``Chain.from_module(model, input_shape)``).
        profile: seconds of its tensors, from :func:`snugfit.profiling.time_tensors`; tensors that are in both the
            profile and the optimizer are considered.
        optimizer: updates the tensors. State of tensors that no longer train is dropped.
        ratio: largest predicted time of a step, as a share rho of a full step's, in (0, 1].
        every: steps between two selections.
        chunk: images in memory at once within a unit while tensors are ranked.

    Raises:
        UsageError: a ratio outside (0, 1], or fewer than one step or image.
        InfeasibleTimeError: no tensor besides the classifier can train in that time.
    """

    def __init__(
        self,
        chain: Chain,
        profile: TensorProfile,
        optimizer: torch.optim.Optimizer,
        ratio: float,
        *,
        every: int = 50,
        chunk: int = 8,
    ) -> None:
        if not 0 < ratio <= 1 or every < 1 or chunk < 1:
            raise UsageError(f"ratio must lie in (0, 1], every and chunk be at least 1; not {ratio}, {every}, {chunk}.")
        batch = profile.steps.batch if profile.steps else profile.batch
        self.times = StepTimes(Network(profile, batch))
        if ratio < min(self.times.smallest_ratio, 1.0):  # all times are measured: a full step may seem the cheaper one
            raise InfeasibleTimeError(
                f"no tensor besides the classifier can train in {ratio:g} of a full step",
                smallest_ratio=self.times.smallest_ratio,
                advice="train the classifier alone",
            )
        self.chain, self.optimizer, self.ratio, self.every, self.chunk = chain, optimizer, ratio, every, chunk
        self.selected: tuple[str, ...] = ()
        self.importance: Mapping[str, float] = {}
        self._parameters = {name: p for unit in chain.all_units for name, p in unit.module.named_parameters()}
        self._steps = 0

    @property
    def predicted_ratio(self) -> float:
        """Predicted time of a step with the current selection, divided by that of full training."""
        network = self.times.network
        return self.times.ratio(network.mask(self.selected))

    def step(self, images: Tensor, labels: Tensor) -> bool:
        """Select again when it is due; call it before each step's forward pass, with no gradients held.

        Images are (B, C, H, W), of this step, and labels (B,), int64. Returns whether it selected.
        """
        due = self._steps % self.every == 0
        self._steps += 1
        if due:
            self.select(images, labels)
        return due

    def select(self, images: Tensor, labels: Tensor) -> tuple[str, ...]:
        """Rank all tensors on images (B, C, H, W) and labels (B,), and select; returns names of the trained tensors."""
        self.importance = self._rank(images, labels)
        network = self.times.network
        values = np.array([self.importance.get(name, 0.0) for name in network.names])
        self.selected = network.selected(choose(self.times, network, values, Headroom(self.ratio)))
        for name in network.names:
            parameter, trains = self._parameters[name], name in self.selected
            parameter.requires_grad_(trains)
            if not trains:
                parameter.grad = None
                self.optimizer.state.pop(parameter, None)
        return self.selected

    def _rank(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Importance by name, from images (B, C, H, W) and labels (B,); weights, state and modes do not change."""
        units = [unit.module for unit in self.chain.all_units]
        modes = {layer: layer.training for unit in units for layer in unit.modules()}
        size = scratch_bytes(units, [unit.input_shape for unit in self.chain.all_units], len(images))
        try:
            with tempfile.TemporaryDirectory() as folder, ScratchFile(Path(folder) / "importance", size) as scratch:
                found = importance(
                    "contribution",
                    [unit.eval() for unit in units],
                    images,
                    labels,
                    chunk=self.chunk,
                    scratch=scratch,
                    update=trial_update(self.optimizer),
                )
        finally:
            for layer, mode in modes.items():
                layer.training = mode
        owned = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return {name: value for name, value in found.items() if id(self._parameters[name]) in owned}

    def stop(self) -> None:
        """Train every tensor again."""
        for name in self.times.network.names:
            self._parameters[name].requires_grad_(True)
        self.selected = ()


def trial_update(optimizer: torch.optim.Optimizer) -> Update:
    """Build a function that steps one parameter as an optimizer would now, without changing its state.

    The optimizer is one of torch's, or any whose class takes groups of parameters with all their options.
    """
    kind: Any = type(optimizer)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}

    def update(name: str, parameter: nn.Parameter) -> None:
        if id(parameter) not in groups:
            return
        trial = kind([{**groups[id(parameter)], "params": [parameter]}])
        trial.state[parameter] = copy.deepcopy(optimizer.state.get(parameter, {}))
        trial.step()

    return update
