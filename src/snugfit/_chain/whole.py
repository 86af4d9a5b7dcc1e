"""A network that cannot be divided: one unit whose module is the model itself, which is trained as a whole.

Its forward pass may do what a graph cannot hold: branch on data or on ``self.training``, call hooks, share weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn

from snugfit._chain.hooks import require_kept_weights
from snugfit._chain.inputs import taking_one_tensor
from snugfit._chain.propagation import needs_values, run_for_real, run_on_meta
from snugfit._chain.unit import Unit, run_failure
from snugfit._core.inputs import Input
from snugfit.errors import ModelError, is_out_of_memory

Result = TypeVar("Result")
NAME = "network"
"""Name of the only unit."""


def whole_unit(model: nn.Module, input_shape: tuple[int, ...], name: str, inputs: Sequence[Input] = ()) -> Unit:
    """The model as a single unit, after a forward pass in both modes; one of several ``inputs`` takes one tensor then.

    Raises:
        ModelError: nothing in it can be trained, it does not run on such an input, does not return one tensor, or has
            hooks or tensors that would be lost when weights are loaded.
    """
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{name} has no parameters: there is nothing to train.")
    _refuse_plain_tensors(model, name)
    require_kept_weights(model)
    model = taking_one_tensor(model, inputs)
    for training in (True, False):
        output = run_synthetic(model, input_shape, training, name, inputs)
        if not isinstance(output, torch.Tensor):
            mode = "training" if training else "evaluation"
            raise ModelError(
                f"{name} returns {type(output).__name__} in {mode} mode, and must return one tensor; wrap it in a "
                "module that returns its logits."
            )
    module = cast(fx.GraphModule, model)  # strategies that read graphs refuse it (``Chain.reasons_against_units``)
    shape = tuple(output.shape[1:])
    return Unit(NAME, module, tuple(input_shape), shape, map_shape=shape, whole=True)


def _refuse_plain_tensors(model: nn.Module, name: str) -> None:
    """Refuse tensors of any shape that are attributes only, which no copy without weights can be given again."""
    for path, layer in model.named_modules():
        for key, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                place = ".".join(filter(None, (path, key)))
                raise ModelError(
                    f"{name} has the tensor {place}, which is neither a parameter nor a buffer; make it one with "
                    f'self.register_buffer("{key}", ..., persistent=False).'
                )


def on_meta_or(run: Callable[[], Result], instead: Result, *, whole: bool) -> Result:
    """What a pass on the meta device gives; ``instead`` if the pass of a ``whole`` network cannot run there."""
    try:
        return run()
    except Exception as error:
        if not whole or not needs_values(error) or is_out_of_memory(error):
            raise
        return instead


def run_synthetic(
    model: nn.Module, input_shape: tuple[int, ...], training: bool, name: str, inputs: Sequence[Input]
) -> Any:
    """The output for a synthetic batch (B, *input_shape): on the meta device, or really if it cannot run there."""
    tensors = {id(each): each for each in chain(model.parameters(), model.buffers())}
    try:
        apart = copy.deepcopy(model, dict(tensors))  # a forward pass may change what is no tensor
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{name} cannot be copied ({error}), and a plan measures copies of it.") from error
    try:
        return run_on_meta(apart, input_shape, training)[0]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if not needs_values(error):
            raise run_failure(name, input_shape, error, inputs) from error
    try:
        return run_for_real(apart, input_shape, training)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise run_failure(name, input_shape, error, inputs) from error
