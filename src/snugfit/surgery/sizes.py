"""Changing the size of layers' tensors, and of the attributes that describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import methodcaller

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from snugfit._chain.propagation import run_on_meta
from snugfit.errors import CheckpointError
from snugfit.surgery.channels import is_depthwise


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
    of those shapes; everything else is left for ``load_state_dict`` to check.

    Args:
        module: the network before channels were removed; on any device, including meta.
        state: weights of the network after removal.
        input_shape: shape of one sample; if given, the layers must also fit each other.

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
        _check(name, layer, sizes)
        for key, size in sizes.items():
            set_tensor(layer, key, methodcaller("new_empty", size))
        set_sizes(layer)
        changed = True
    if changed and input_shape is not None:
        _check_fit(module, input_shape)


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers (n, ...) of a layer that may be resized, by name; empty for other layers."""
    if not isinstance(layer, (_ConvNd, nn.Linear, _BatchNorm, nn.LayerNorm)) or isinstance(layer, _ConvTransposeNd):
        return {}
    tensors = {**layer._parameters, **layer._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None and tensor.dim()}


def _check(name: str, layer: nn.Module, sizes: Mapping[str, torch.Size]) -> None:
    """Check that tensors of these sizes form a layer of this kind."""
    if not _agree(layer, sizes):
        shapes = ", ".join(f"{key} {tuple(size)}" for key, size in sizes.items())
        raise CheckpointError(f"the weights of layer {name} belong to another model: {shapes} do not make a {layer}.")


def _agree(layer: nn.Module, sizes: Mapping[str, torch.Size]) -> bool:
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


def _check_fit(module: nn.Module, input_shape: tuple[int, ...]) -> None:
    try:
        run_on_meta(module, input_shape, training=False)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"the weights belong to another model: layers do not fit each other ({reason})."
        ) from error
