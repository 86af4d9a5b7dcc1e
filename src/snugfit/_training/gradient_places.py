"""Memory for small gradients that are held over the micro-batches of a step.

A gradient arrives amid the activations of a backward pass and stays until the step. However small, it divides what the
activations leave, and the next micro-batch finds no room for its larger ones although enough memory is free.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

PLACED_VALUES = 1 << 14
"""Most values of a gradient that is moved. Larger ones are few, and take long to copy."""


class _Place:
    """Takes the gradient of a parameter, of any shape, when it arrives."""

    def __init__(self, parameter: nn.Parameter) -> None:
        dtype = parameter.grad_dtype or parameter.dtype  # that of use_float_gradients
        self._values = torch.empty_like(parameter, dtype=dtype, requires_grad=False)

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient is not self._values and gradient.layout is torch.strided:
            parameter.grad = self._values.copy_(gradient)


def place_small_gradients(parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Allocate memory for the gradients of small parameters on a processor, into which hooks move them on arrival.

    It must come before the first step, so that this memory does not lie between activations.

    Returns:
        The hooks' handles.
    """
    small = (each for each in parameters if each.numel() <= PLACED_VALUES and each.device.type == "cpu")
    return [parameter.register_post_accumulate_grad_hook(_Place(parameter)) for parameter in small]
