"""The unit: the smallest part of a network between two points that a single tensor crosses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from snugfit._chain.propagation import run_on_meta
from snugfit._chain.subgraph import split_tail
from snugfit._chain.tracing import is_torch_class
from snugfit._core.inputs import Input, described
from snugfit.errors import ModelError, first_line, is_out_of_memory


@dataclass(frozen=True)
class ConvFact:
    """One 2-d convolution of a unit: its name in the model, and sizes as pairs of height and width."""

    name: str
    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    groups: int
    input_size: tuple[int, int]
    output_size: tuple[int, int]


@dataclass
class Unit:
    """A part of the network with at least one conv or linear layer (NeuroFlux decision 1).

    Attributes:
        name: readable name, such as ``features.0`` or ``layer1.0``.
        module: maps (batch, *input_shape) to (batch, *output_shape) and never modifies its input; its state-dict names
            are the model's own, its parameters are shared with the model.
        input_shape, output_shape: without the batch axis.
        convs: its 2-d convolutions in order of execution.
        map_shape: like ``output_shape``, before the final pools and dropouts.
        owners: modules of the model whose own tensors the unit reads without calling them (a class token), by name;
            emptied; they initialise those tensors.
        whole: whether it is a network that cannot be divided. Its module is then the model itself, without a graph.
    """

    name: str
    module: fx.GraphModule
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    convs: tuple[ConvFact, ...] = ()
    map_shape: tuple[int, ...] = ()
    owners: dict[str, nn.Module] = field(default_factory=dict)
    whole: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """A copy whose state dict lists the same names; a copied graph would list all buffers."""
        made = Unit(**{each.name: copy.deepcopy(getattr(self, each.name), memo) for each in fields(self)})
        for name in self.other_buffers:
            owner, _, last = name.rpartition(".")
            made.module.get_submodule(owner)._non_persistent_buffers_set.add(last)
        return made

    @property
    def other_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers, of any shapes, that the state dict leaves out (``persistent=False``), by name."""
        stored = self.module.state_dict().keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in stored}

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        tensors = chain(self.module.parameters(), self.module.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_unit(name: str, module: fx.GraphModule, input_shape: tuple[int, ...]) -> Unit:
    """Find a unit's output shape and convolutions, and prevent it from modifying its input.

    Raises:
        ModelError: the unit does not run on an input of this shape, or does not return one tensor.
    """
    convs: list[ConvFact] = []
    handles = [
        part.register_forward_hook(_record_conv(part_name, convs))
        for part_name, part in module.named_modules()
        if isinstance(part, nn.Conv2d)
    ]
    try:
        output, modified = run_on_meta(module, input_shape, training=False)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise run_failure(f"unit {name}", input_shape, error) from error
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(output, torch.Tensor):
        raise ModelError(f"unit {name} returns {type(output).__name__}; a unit must return one tensor.")
    if modified or _modifies_input_in_training(module, input_shape):
        _clone_input(module)
    body, tail = split_tail(module)
    before = output if isinstance(tail, nn.Identity) else run_on_meta(body, input_shape, training=False)[0]
    return Unit(name, module, tuple(input_shape), tuple(output.shape[1:]), tuple(convs), tuple(before.shape[1:]))


def run_failure(what: str, input_shape: tuple[int, ...], error: Exception, inputs: Sequence[Input] = ()) -> ModelError:
    """The error for a module that fails on an input, or on several."""
    reason = re.sub(r" ?\(Proxy\(\w+\)\)", "", first_line(error).rstrip("."))  # of an assertion that was traced
    if inputs:
        return ModelError(
            f"{what} does not run on inputs {described(inputs)}: {reason}. Check its forward pass and the inputs."
        )
    shape = "x".join(map(str, input_shape))
    return ModelError(f"{what} does not run on an input of shape {shape}: {reason}. Check image size and channels.")


def _record_conv(
    name: str, convs: list[ConvFact]
) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
    """A hook that appends a convolution of inputs (B, C, H, W) to ``convs``."""

    def hook(conv: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        assert isinstance(conv, nn.Conv2d)
        sizes = (conv.kernel_size, conv.stride, inputs[0].shape[-2:], output.shape[-2:])
        kernel, stride, read, made = ((height, width) for height, width in sizes)
        convs.append(ConvFact(name, conv.in_channels, conv.out_channels, kernel, stride, conv.groups, read, made))

    return hook


def _modifies_input_in_training(module: fx.GraphModule, input_shape: tuple[int, ...]) -> bool:
    """Whether a part works in place in training mode only: in-place dropout, or a custom module."""
    parts = (part for part in module.modules() if part is not module)
    if all(is_torch_class(p) and not (isinstance(p, nn.modules.dropout._DropoutNd) and p.inplace) for p in parts):
        return False
    try:
        return run_on_meta(module, input_shape, training=True)[1]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return True


def _clone_input(module: fx.GraphModule) -> None:
    """Let the unit work on a copy of its input, so that in-place operations do not change the original."""
    placeholder = next(iter(module.graph.nodes))
    with module.graph.inserting_after(placeholder):
        copy = module.graph.call_method("clone", (placeholder,))
    placeholder.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    module.recompile()
