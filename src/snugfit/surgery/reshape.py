"""Removal of channels: parameters, buffers, layer sizes and the optimizer's state become smaller."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from snugfit._chain.propagation import run_on_meta
from snugfit.errors import CheckpointError, ModelError, UnknownNameError, UsageError, first_line, is_out_of_memory
from snugfit.surgery.channels import ChannelGroup, Slot, channel_norms, is_depthwise, width

DEFAULT_THRESHOLD = 1e-4
"""All weights of a dead channel are below it in absolute value (PruneTrain section 4)."""


@dataclass(frozen=True)
class Cut:
    """The remaining part of one tensor.

    Attributes:
        before: its shape before.
        kept: indices that were kept, by dimension; dimensions that lost nothing are left out.
    """

    before: torch.Size
    kept: dict[int, torch.Tensor]


def dead_channels(module: nn.Module, group: ChannelGroup, threshold: float = DEFAULT_THRESHOLD) -> torch.Tensor:
    """Channels of a group that hardly contribute to the network's output, shape (channels,), bool.

    A channel is dead if no weight that reads it, or no weight or bias that makes it (BatchNorm's and depthwise ones
    included), reaches the threshold: it adds almost nothing to later layers, and exactly nothing if those weights are
    zero. A bias or BatchNorm's beta counts, because it makes a constant of the channel.
    """
    tensors = dict(module.state_dict(keep_vars=True))
    return _below(tensors, group.readers, threshold) | _below(tensors, group.producers, threshold)


@torch.no_grad()
def prune(module: nn.Module, groups: Iterable[ChannelGroup], threshold: float = DEFAULT_THRESHOLD) -> dict[str, Cut]:
    """Remove the dead channels of every group from a network, in place; every group keeps at least one channel.

    The notes of :func:`remove_channels` apply. All weights of a dead channel are below the threshold in absolute value.

    Returns:
        The remaining part of each tensor that shrank, by state-dict name; empty if no channel was dead.
    """
    groups, tensors = list(groups), dict(module.state_dict(keep_vars=True))
    kept = {group.name: _survivors(tensors, group, dead_channels(module, group, threshold)) for group in groups}
    return remove_channels(module, groups, kept)


def remove_channels(
    module: nn.Module, groups: Iterable[ChannelGroup], kept: Mapping[str, Sequence[int] | torch.Tensor]
) -> dict[str, Cut]:
    """Remove all channels of some groups except those given, in place.

    Parameters stay the objects that they are (``.data`` and ``.grad`` are replaced), so that optimizers and hooks keep
    them; the optimizer's state is cut by :func:`prune_optimizer`. Call it between steps: no backward pass can follow
    through earlier results. A chain that shares the layers must be built again (``Chain.from_module``), because its
    units record sizes.

    Args:
        module: the network that the groups were found in, or one with its state-dict names; may be on meta.
        groups: from ``find_groups`` or ``hidden_groups``; they stay valid and can be used again.
        kept: indices, (n,), of the channels to keep, in any order, by the group's name; other groups keep all.

    Returns:
        The remaining part of each tensor that shrank, by state-dict name.

    Raises:
        ModelError: no channel of a group would stay; nothing is changed then.
        UsageError: an unknown group, or a channel that does not exist or is named twice; nothing is changed then.
    """
    cuts: dict[str, Cut] = {}
    tensors = dict(module.state_dict(keep_vars=True))
    for group, left in _checked(module, groups, kept):
        for slot in group.slots:
            cut = cuts.setdefault(slot.tensor, Cut(tensors[slot.tensor].shape, {}))
            cut.kept[slot.dim] = (left[:, None] * slot.block + torch.arange(slot.block)).flatten()
    for name, cut in cuts.items():
        owner, _, key = name.rpartition(".")
        set_tensor(module.get_submodule(owner), key, partial(apply_cut, cut=cut))
    for owner in {name.rpartition(".")[0] for name in cuts}:
        set_sizes(module.get_submodule(owner))
    return cuts


def _checked(
    module: nn.Module, groups: Iterable[ChannelGroup], kept: Mapping[str, Sequence[int] | torch.Tensor]
) -> list[tuple[ChannelGroup, torch.Tensor]]:
    """The groups that lose channels, each with the sorted indices, (n,), of those that stay."""
    known = {group.name: group for group in groups}
    found = []
    for name, channels in kept.items():
        if name not in known:
            raise UnknownNameError("group of channels", name, known)
        left = torch.unique(torch.as_tensor(channels, dtype=torch.int64).cpu())
        size = width(module, known[name])
        if not len(left):
            raise ModelError(f"no channel of layer {name} would be left of {size}; keep at least one.")
        if len(left) != len(channels) or left[0] < 0 or left[-1] >= size:
            raise UsageError(f"the channels to keep of layer {name} must be different numbers from 0 to {size - 1}.")
        if len(left) < size:
            found.append((known[name], left))
    return found


def apply_cut(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Apply a cut to a tensor of the shape before it, such as a momentum buffer; its memory format is kept."""
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    row_major = tensor.is_contiguous()
    for dim, kept in cut.kept.items():
        tensor = tensor.index_select(dim, kept.to(tensor.device))
    return tensor.contiguous(memory_format=torch.channels_last) if channels_last and not row_major else tensor


def prune_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, cuts: dict[str, Cut]) -> None:
    """Cut all optimizer state that has its parameter's old shape: momentum, second moments, averages."""
    parameters = dict(module.named_parameters())
    for name in cuts.keys() & parameters.keys():
        state = optimizer.state.get(parameters[name], {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == cuts[name].before:
                state[key] = apply_cut(value, cuts[name])


def _below(tensors: dict[str, torch.Tensor], slots: Iterable[Slot], threshold: float) -> torch.Tensor:
    """Channels whose every weight in the slots is below the threshold, shape (channels,), bool."""
    return torch.stack([channel_norms(tensors[slot.tensor], slot, math.inf) < threshold for slot in slots]).all(0)


def _survivors(tensors: dict[str, torch.Tensor], group: ChannelGroup, dead: torch.Tensor) -> torch.Tensor:
    """Indices, (n,), of the channels that stay. If all are dead the strongest stays."""
    if dead.all():
        strength = torch.stack([channel_norms(tensors[slot.tensor], slot) for slot in group.producers]).sum(0)
        dead[strength.argmax()] = False
    return (~dead).nonzero().flatten()


def set_tensor(layer: nn.Module, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the data and gradient of a parameter, or a buffer, of any shape, by ``change(tensor)``, in place."""
    parameter = layer._parameters.get(name)
    if parameter is None:
        setattr(layer, name, change(getattr(layer, name)))
        return
    gradient, parameter.grad = parameter.grad, None  # a gradient of another shape than its parameter is refused
    changed = change(parameter.data)
    # Autograd remembers the old shape while a loss of an earlier step lives; a change of type makes it forget.
    other = torch.float64 if changed.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=changed.device)
    parameter.data = changed
    if gradient is not None:
        parameter.grad = change(gradient)


def set_sizes(layer: nn.Module) -> None:
    """Set a layer's attributes for channels or features from its tensors."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    if isinstance(layer, _ConvNd):
        if is_depthwise(layer):
            layer.groups = weight.shape[0]
        layer.out_channels, layer.in_channels = weight.shape[0], weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, _BatchNorm):
        layer.num_features = weight.shape[0]
    elif isinstance(layer, nn.LayerNorm):
        layer.normalized_shape = tuple(weight.shape)


def adopt_widths(
    module: nn.Module, state: Mapping[str, torch.Tensor], input_shape: tuple[int, ...] | None = None
) -> None:
    """Resize the layers of a newly built network to the shapes of saved weights, which then load into it.

    Convolutions, linear layers, BatchNorm and LayerNorm whose tensors have other shapes in the state get empty tensors
    of those shapes; everything else is left for ``load_state_dict`` to check. It may be on meta. With the shape
    of one sample, the layers must also fit each other.

    Raises:
        CheckpointError: a layer's tensors contradict each other or differ in more than channels, or the layers do not
            fit each other.
    """
    changed = False
    for name, layer in module.named_modules():
        own = {key: tensor for key, tensor in _tensors(layer).items() if f"{name}.{key}".lstrip(".") in state}
        sizes = {key: state[f"{name}.{key}".lstrip(".")].shape for key in own}
        if all(own[key].shape == size for key, size in sizes.items()):
            continue
        if not _agree(layer, sizes):
            shapes = ", ".join(f"{key} {tuple(size)}" for key, size in sizes.items())
            raise CheckpointError(
                f"the weights of layer {name} belong to another model: {shapes} do not make a {layer}."
            )
        for key, size in sizes.items():
            set_tensor(layer, key, methodcaller("new_empty", size))
        set_sizes(layer)
        changed = True
    if changed and input_shape is not None:
        try:
            run_on_meta(module, input_shape, training=False)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"the weights belong to another model: layers do not fit each other ({first_line(error)})."
            ) from error


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers (n, ...) of a layer that may be resized, by name; empty for other layers."""
    if not isinstance(layer, (_ConvNd, nn.Linear, _BatchNorm, nn.LayerNorm)) or isinstance(layer, _ConvTransposeNd):
        return {}
    tensors = {**layer._parameters, **layer._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None and tensor.dim()}


def _agree(layer: nn.Module, sizes: Mapping[str, torch.Size]) -> bool:
    """Whether tensors of these sizes form a layer of this kind."""
    weight, size = layer._parameters["weight"], sizes.get("weight")
    if weight is None or size is None or len(size) != weight.dim() or 0 in size:
        return False
    others = {tuple(other) for key, other in sizes.items() if key != "weight"}
    if others - {tuple(size if isinstance(layer, nn.LayerNorm) else size[:1])}:
        return False
    if not isinstance(layer, _ConvNd):
        return True
    alone = layer.groups == 1 or size[1] == weight.shape[1]  # only the inputs per group tell the number of groups
    return alone and size[2:] == weight.shape[2:] and (is_depthwise(layer) or size[0] % layer.groups == 0)
