"""A graph of its own for every part of a network, so that the backward pass frees it once it has passed the part.

Autograd keeps all nodes of a graph, though not what they saved, until the whole backward pass is over. Nodes are small,
but malloc puts them into gaps between activations. Later parts' activations then leave many holes instead of one, in
which the larger gradients of earlier parts find no room although the memory is free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SeparateGraphs:
    """Cuts the graph of one forward pass in several, whose backward passes run one after another.

    The backward pass of the last graph starts all others, before it returns. They are on a processor; on other devices,
    which have allocators of their own, nothing is cut.
    """

    def __init__(self) -> None:
        self._entrance = torch.empty(0, requires_grad=True)  # what a graph begins with, so that autograd records it
        self._waiting = list[Tensor]()
        self._runs = False

    def cut(self, values: Tensor) -> Tensor:
        """The same values (B, ...) at the beginning of a new graph, which share memory and version with the old."""
        if values.device.type != "cpu" or not (torch.is_grad_enabled() and values.requires_grad):
            return values
        gradient = list[Tensor]()
        before = _Before(_End.apply(values, gradient), gradient, self)
        begun: Tensor = _Beginning.apply(self._entrance, values.detach(), before)
        return begun

    def continue_with(self, end: Tensor) -> None:
        """Run the backward pass of an earlier graph, given the scalar at its end, once that of this one is over."""
        self._waiting.append(end)
        if not self._runs:
            torch.autograd.Variable._execution_engine.queue_callback(self._run)

    def _run(self) -> None:
        self._runs = True
        try:
            while self._waiting:
                self._waiting.pop().backward()
        finally:
            self._runs = False
            self._waiting.clear()


class _Before(NamedTuple):
    """What a graph begins after.

    Attributes:
        end: the scalar at the end of the graph before.
        gradient: takes the gradient of that graph's last values (B, ...).
        graphs: runs the backward pass of that graph.
    """

    end: Tensor
    gradient: list[Tensor]
    graphs: SeparateGraphs


class _End(torch.autograd.Function):
    """Values (B, ...) to a scalar, whose backward pass begins with the gradient of the values and then frees it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return values.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


class _Beginning(torch.autograd.Function):
    """The values (B, ...) themselves, whose gradient goes to the end of the graph before."""

    @staticmethod
    def forward(ctx: Any, entrance: Tensor, values: Tensor, before: _Before) -> Tensor:
        ctx.before = before
        return values.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        before: _Before = ctx.before
        before.gradient.append(gradient)
        before.graphs.continue_with(before.end)
        ctx.before = None
        return None, None, None
