"""Backward passes of operators on parts of feature maps.

A tile computes the gradient of its inputs wherever layers below it need that, including where its neighbours compute it
too. Of the weights' gradients it computes the share of its own pixels only, so that the sum over tiles counts every
pixel once. Shapes: B batch, C channels, h and w height and width of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.tiling.layers import Layer, MapSize, Region
from snugfit.tiling.schedule import Reads

_BACKWARD = torch.ops.aten.convolution_backward


@dataclass(frozen=True)
class RegionTensor:
    """A part (B, C, h, w) of a feature map and its place; ``reusable`` memory is read by nothing else."""

    values: Tensor
    region: Region
    reusable: bool = False

    def part(self, region: Region) -> Tensor:
        """A view (B, C, h, w) of a region inside this part."""
        return self.values[..., region.rows.within(self.region.rows), region.columns.within(self.region.columns)]

    def padded(self, region: Region, size: MapSize, fill: float = 0.0) -> Tensor:
        """A region (B, C, h, w), filled where it reaches beyond the feature map; a view if it does not."""
        inside = region & size.whole
        if not inside.area:
            shape = (*self.values.shape[:2], len(region.rows), len(region.columns))
            return self.values.new_full(shape, fill)
        part = self.part(inside)
        frame = (
            inside.columns.start - region.columns.start,
            region.columns.stop - inside.columns.stop,
            inside.rows.start - region.rows.start,
            region.rows.stop - inside.rows.stop,
        )
        return nn.functional.pad(part, frame, value=fill) if any(frame) else part

    def zero_extended(self, region: Region) -> Tensor:
        """Any region (B, C, h, w), zero where nothing is held; a view if all of it is held."""
        if region in self.region:
            return self.part(region)
        height, width = len(region.rows), len(region.columns)
        found = self.values.new_zeros(*self.values.shape[:2], height, width)
        common = region & self.region
        if common.area:
            RegionTensor(found, region).part(common).copy_(self.part(common))
        return found


@dataclass(frozen=True)
class BackwardInput:
    """Inputs of the backward pass of an operator on one tile.

    Attributes:
        layer: the operator's geometry.
        sizes: of the feature maps that it reads.
        gradient: of its output, where the tile needs it.
        core: the tile's own part of the output.
        inputs, output: saved parts of the feature maps that it reads and makes; only those that its adjoint reads.
        wanted: for each feature map that it reads, the region whose gradient is needed; None if none is.
        moments: mean and variance (C,) of the whole feature map, for norms that normalise by their batch.
    """

    layer: Layer
    sizes: Sequence[MapSize]
    gradient: RegionTensor
    core: Region
    inputs: Sequence[RegionTensor | None]
    output: RegionTensor | None
    wanted: Sequence[Region | None]
    moments: tuple[Tensor, Tensor] | None = None

    @property
    def needs(self) -> Region:
        """The input region from which the output was made where its gradient is held; not clipped."""
        return self.layer.needs(self.gradient.region)


class Adjoint:
    """The backward pass of an operator, by autograd on inputs that hold exactly what an output needs.

    Args:
        call: the operator.
        fill: value of the padding.
        owns_memory: whether the gradient that it returns is in memory of its own, or in memory that was reusable.
    """

    @property
    def reads(self) -> Reads:
        """What its backward pass reads."""
        return "input"

    def __init__(self, call: Callable[..., Tensor], fill: float = 0.0, *, owns_memory: bool = False) -> None:
        self.call, self.fill, self.owns_memory = call, fill, owns_memory

    def has_trainable_weights(self) -> bool:
        """Whether any weight is trained."""
        return False

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """Gradients of its inputs, each (B, C, h, w) on the wanted region."""
        entry = self.entry(part).detach().requires_grad_(True)
        with torch.enable_grad():
            made = self.call(entry)
        (found,) = torch.autograd.grad(made, entry, part.gradient.values)
        return wanted_gradients(found, part)

    def entry(self, part: BackwardInput) -> Tensor:
        """The input (B, C, h, w) at which the operator is differentiated."""
        assert part.inputs[0] is not None
        return part.inputs[0].padded(part.needs, part.sizes[0], self.fill)

    def add_weight_gradients(self, part: BackwardInput) -> None:
        """Add the share of the tile's own pixels to the gradients of the weights."""


class LinearAdjoint(Adjoint):
    """An operator whose backward pass reads nothing: average pooling, subsampling, zero channels appended."""

    reads: Reads = "nothing"

    def entry(self, part: BackwardInput) -> Tensor:
        """Zeros (B, C, h, w)."""
        needs, upper = part.needs, part.gradient.values
        return upper.new_zeros(len(upper), part.sizes[0].channels, len(needs.rows), len(needs.columns))


class AddAdjoint(LinearAdjoint):
    """A sum of feature maps: every input has the gradient of the output."""

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """The gradient of the output, (B, C, h, w), for every input."""
        return wanted_gradients(part.gradient.values, part)


class OutputAdjoint(Adjoint):
    """An activation whose slope follows from its output.

    ``slope`` takes gradient of the output, output, and destination of the input's gradient, all (B, C, h, w).
    """

    reads: Reads = "output"
    owns_memory = True

    def __init__(self, slope: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.slope = slope

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """The gradient of its input, (B, C, h, w); in the memory of the output's gradient if that is reusable."""
        assert part.output is not None
        upper = part.gradient.values
        into = upper if part.gradient.reusable else torch.empty_like(upper)
        return wanted_gradients(self.slope(upper, part.output.part(part.gradient.region), into), part)


class ConvAdjoint(Adjoint):
    """A convolution; the gradient of trained weights reads the input."""

    owns_memory = True

    def __init__(self, layer: nn.Conv2d) -> None:
        self.layer = layer

    @property
    def reads(self) -> Reads:
        """The tile's own part of the input if weights are trained."""
        return "core" if self.layer.weight.requires_grad else "nothing"

    def has_trainable_weights(self) -> bool:
        """Whether the weight or the bias is trained."""
        return _trains(self.layer)

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """The gradient of its input, (B, C, h, w) (section 4.1).

        Rows and columns that are not wanted at both ends are left out by padding.
        """
        layer, needs, wanted = part.layer, part.needs, part.wanted[0]
        assert wanted is not None
        down = min(needs.rows.around(wanted.rows), layer.rows.reach - 1)
        across = min(needs.columns.around(wanted.columns), layer.columns.reach - 1)
        region = Region(needs.rows.without(down), needs.columns.without(across))
        shape = (len(part.gradient.values), part.sizes[0].channels, len(region.rows), len(region.columns))
        like = part.gradient.values.new_empty(1).expand(shape)
        found = self._gradients(part.gradient.values, like, (True, False, False), (down, across))[0]
        assert found is not None
        return [RegionTensor(found, region).zero_extended(wanted)]

    def add_weight_gradients(self, part: BackwardInput) -> None:
        """Add the share of the tile's own pixels (section 4.1); the input's halo is half a kernel wide."""
        weight, bias = self.layer.weight, self.layer.bias
        own = part.gradient.part(part.core)
        if bias is not None and bias.requires_grad:
            accumulate(bias, own.sum((0, 2, 3)))
        if weight.requires_grad:
            assert part.inputs[0] is not None
            entry = part.inputs[0].padded(part.layer.needs(part.core), part.sizes[0])
            accumulate(weight, self._gradients(own, entry, (False, True, False))[1])

    def _gradients(
        self, upper: Tensor, entry: Tensor, wanted: tuple[bool, bool, bool], pads: tuple[int, int] = (0, 0)
    ) -> Sequence[Any]:
        layer = self.layer
        found: Sequence[Any] = _BACKWARD(
            upper, entry, layer.weight, None, layer.stride, pads, layer.dilation, False, (0, 0), layer.groups, wanted
        )
        return found


class BatchNormAdjoint(Adjoint):
    """BatchNorm, by running statistics or by those of the batch, as its layer is set."""

    owns_memory = True

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        self.layer = layer

    @property
    def reads(self) -> Reads:
        """Its input: all of it if it normalises by its batch, the tile's own part if its weight is trained."""
        if normalises_by_batch(self.layer):
            return "input"
        return "core" if self.layer.weight is not None and self.layer.weight.requires_grad else "nothing"

    def has_trainable_weights(self) -> bool:
        """Whether scale or shift is trained."""
        return _trains(self.layer)

    def sums(self, part: BackwardInput) -> tuple[Tensor, Tensor]:
        """Sums (C,) over the tile's own pixels: of the gradient, and of the gradient times the normalised input."""
        assert part.inputs[0] is not None
        mean, variance = self._moments(part)
        inverse = torch.rsqrt(variance + self.layer.eps)
        upper, entry = part.gradient.part(part.core), part.inputs[0].part(part.core)
        if not upper.numel():
            return torch.zeros_like(mean), torch.zeros_like(mean)
        _, products, plain = torch.ops.aten.native_batch_norm_backward(
            upper, entry, self.layer.weight, None, None, mean, inverse, True, self.layer.eps, (False, True, True)
        )
        return plain, products

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """The gradient of its input, (B, C, h, w), with fixed statistics; in place if the output's is reusable."""
        return wanted_gradients(self._scaled(part), part)

    def input_gradients_by_batch(
        self, part: BackwardInput, plain: Tensor, products: Tensor, pixels: int
    ) -> list[Tensor | None]:
        """The gradient of its input, (B, C, h, w), from the sums (C,) of :meth:`sums` over all tiles.

        ``pixels`` are values per channel of the whole feature map.
        """
        assert part.inputs[0] is not None
        mean, variance = self._moments(part)
        scale, inverse = self._scale(part), torch.rsqrt(variance + self.layer.eps)
        slope = -scale * inverse * products / pixels
        shift = -scale * plain / pixels - slope * mean
        entry = part.inputs[0].part(part.gradient.region)
        found = self._scaled(part).add_(shift[:, None, None]).addcmul_(entry, slope[:, None, None])
        return wanted_gradients(found, part)

    def add_weight_gradients(self, part: BackwardInput) -> None:
        """Add the share of the tile's own pixels to the gradients of scale and shift, (C,)."""
        weight, bias = self.layer.weight, self.layer.bias
        if weight is not None and weight.requires_grad:
            self.add(*self.sums(part))
        elif bias is not None and bias.requires_grad:
            accumulate(bias, part.gradient.part(part.core).sum((0, 2, 3)))

    def add(self, plain: Tensor, products: Tensor) -> None:
        """Add a tile's sums (C,) to the gradients of scale and shift."""
        for parameter, found in ((self.layer.weight, products), (self.layer.bias, plain)):
            if parameter is not None and parameter.requires_grad:
                accumulate(parameter, found)

    def _moments(self, part: BackwardInput) -> tuple[Tensor, Tensor]:
        if part.moments is not None:
            return part.moments
        assert self.layer.running_mean is not None and self.layer.running_var is not None
        return self.layer.running_mean, self.layer.running_var

    def _scaled(self, part: BackwardInput) -> Tensor:
        upper, scale = part.gradient.values, self._scale(part)[:, None, None]
        return upper.mul_(scale) if part.gradient.reusable else upper * scale

    def _scale(self, part: BackwardInput) -> Tensor:
        inverse = torch.rsqrt(self._moments(part)[1] + self.layer.eps)
        return inverse if self.layer.weight is None else inverse * self.layer.weight


def normalises_by_batch(layer: nn.Module | None) -> bool:
    """Whether a layer is a norm that, in its current mode, normalises by the statistics of its batch."""
    return isinstance(layer, nn.BatchNorm2d) and (layer.training or layer.running_mean is None)


def wanted_gradients(found: Tensor, part: BackwardInput) -> list[Tensor | None]:
    """Crop or extend the gradient (B, C, h, w) of the read region to each wanted region."""
    held = RegionTensor(found, part.needs)
    return [None if region is None else held.zero_extended(region) for region in part.wanted]


def zero_gradients(part: BackwardInput) -> list[Tensor | None]:
    """Zero gradients (B, C, h, w) of the wanted regions, for a tile without any output."""
    upper, batch = part.gradient.values, len(part.gradient.values)
    return [
        None if region is None else upper.new_zeros(batch, size.channels, len(region.rows), len(region.columns))
        for region, size in zip(part.wanted, part.sizes, strict=True)
    ]


@torch.no_grad()
def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to ``.grad`` of a parameter of any shape."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def activation(layer: nn.Module) -> Adjoint | None:
    """The adjoint of an activation whose slope follows from its output; None for others."""
    if isinstance(layer, nn.LeakyReLU) and layer.negative_slope > 0:
        return _by_output(torch.ops.aten.leaky_relu_backward, layer.negative_slope, True)
    if isinstance(layer, nn.ReLU):
        return relu()
    return _by_output(torch.ops.aten.hardtanh_backward, 0.0, 6.0) if isinstance(layer, nn.ReLU6) else None


def relu() -> Adjoint:
    """The adjoint of a ReLU."""
    return _by_output(torch.ops.aten.threshold_backward, 0)


def _by_output(back: Any, *options: float) -> Adjoint:
    return OutputAdjoint(lambda upper, made, into: back(upper, made, *options, grad_input=into))


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())
