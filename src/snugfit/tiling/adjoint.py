"""Backward passes of operators on parts of maps: the gradient of what an operator reads, and of its weights.

A tile computes gradients of its inputs wherever layers below it ask for them, of what its neighbours compute too as
well; but of its weights only what its own pixels contribute, so that the sum over tiles counts every pixel once.
Shapes: B batch, C channels, h and w height and width of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.tiling.layers import Layer, MapSize, Region
from snugfit.tiling.schedule import Reads

_BACKWARD = torch.ops.aten.convolution_backward


@dataclass(frozen=True)
class RegionTensor:
    """A part of a map.

    Attributes:
        values: (B, C, h, w).
        region: of the map.
        spare: whether nothing else reads this memory, so that it may be overwritten.
    """

    values: Tensor
    region: Region
    reusable: bool = False

    def part(self, region: Region) -> Tensor:
        """A view of a region that lies in it."""
        return self.values[..., region.rows.within(self.region.rows), region.columns.within(self.region.columns)]

    def padded(self, region: Region, size: MapSize, fill: float = 0.0) -> Tensor:
        """A region that may reach beyond the map, where it is filled; a view if it does not."""
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
        """A region of any place, zero where nothing is held; a view where all of it is."""
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
    """What the backward pass of an operator on one tile is given.

    Attributes:
        layer: the operator's geometry.
        sizes: of the maps that it reads.
        gradient: of its output, where the tile needs that.
        core: the part of the output that belongs to the tile.
        inputs, output: what was kept of the maps that it reads, and makes; those that its adjoint reads.
        wanted: of each map that it reads, where its gradient is wanted; None where it is not.
        moments: mean and variance (C,) of the whole map, for norms that normalise by its batch.
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
        """What of its inputs the output where its gradient is held was made of; not clipped."""
        return self.layer.needs(self.gradient.region)


class Adjoint:
    """The backward pass of an operator, by autograd on its input.

    Args:
        call: the operator, on inputs that hold exactly what an output needs.
        fill: what padding is filled with.
    """

    reads: Reads = "input"
    owns_memory = False
    """Whether the gradient that it gives is in memory of its own, or in memory that was spare."""

    def __init__(self, call: Callable[..., Tensor], fill: float = 0.0) -> None:
        self.call, self.fill = call, fill

    def has_trainable_weights(self) -> bool:
        """Whether there are weights that have gradients."""
        return False

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """Gradients of what it reads, on the parts that are wanted."""
        held = part.inputs[0]
        assert held is not None
        entry = held.padded(part.needs, part.sizes[0], self.fill).detach().requires_grad_(True)
        with torch.enable_grad():
            made = self.call(entry)
        (found,) = torch.autograd.grad(made, entry, part.gradient.values)
        return wanted_gradients(found, part)

    def add_weight_gradients(self, part: BackwardInput) -> None:
        """Add to the gradients of its weights what the tile's own pixels contribute."""


class LinearAdjoint(Adjoint):
    """Of an operator whose backward pass reads nothing: average pools, pixels left out, channels of zeros added."""

    reads: Reads = "nothing"

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """Gradients of what it reads."""
        size, needs = part.sizes[0], part.needs
        shape = (len(part.gradient.values), size.channels, len(needs.rows), len(needs.columns))
        entry = part.gradient.values.new_zeros(shape).requires_grad_(True)
        with torch.enable_grad():
            made = self.call(entry)
        (found,) = torch.autograd.grad(made, entry, part.gradient.values)
        return wanted_gradients(found, part)


class AddAdjoint(LinearAdjoint):
    """Of a sum of maps: everything that it reads has the gradient of what it makes."""

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """The same gradient for all."""
        return wanted_gradients(part.gradient.values, part)


class MaxPoolAdjoint(Adjoint):
    """Of a max pool, padded with minus infinity."""

    owns_memory = True

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__(call, -torch.inf)


class OutputAdjoint(Adjoint):
    """Of an activation whose slope follows from what it makes.

    Args:
        slope: writes the gradient of the input into the last of: that of the output, the output, and either's like.
    """

    reads: Reads = "output"
    owns_memory = True

    def __init__(self, slope: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.slope = slope

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """Gradients of what it reads; in the memory of that of its output, where that is spare."""
        assert part.output is not None
        upper = part.gradient.values
        into = upper if part.gradient.reusable else torch.empty_like(upper)
        return wanted_gradients(self.slope(upper, part.output.part(part.gradient.region), into), part)


class ConvAdjoint(Adjoint):
    """Of a convolution; its weights read the input, where they train."""

    owns_memory = True

    def __init__(self, layer: nn.Conv2d) -> None:
        self.layer = layer

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """Its input on the tile, for the weights."""
        return "core" if self.layer.weight.requires_grad else "nothing"

    def has_trainable_weights(self) -> bool:
        """Whether weights or biases train."""
        return _trains(self.layer)

    def input_gradients(self, part: BackwardInput) -> list[Tensor | None]:
        """The gradient of what it reads (section 4.1); what is wanted at neither end is left out, as padding."""
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
        """Add what the tile's own pixels contribute (section 4.1): the input's halo is half a kernel wide."""
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
    """Of BatchNorm, by running statistics or by those of the batch, as its layer is set."""

    owns_memory = True

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        self.layer = layer

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """Its input: everywhere where it normalises by its batch, on the tile for its weights."""
        if self.by_batch:
            return "input"
        return "core" if self.layer.weight is not None and self.layer.weight.requires_grad else "nothing"

    @property
    def by_batch(self) -> bool:
        """Whether it normalises by the statistics of its batch now."""
        return self.layer.training or self.layer.running_mean is None

    def has_trainable_weights(self) -> bool:
        """Whether scale or shift train."""
        return _trains(self.layer)

    def sums(self, part: BackwardInput) -> tuple[Tensor, Tensor]:
        """Over the tile's own pixels, per channel: the gradient, and the gradient times the normalised input."""
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
        """The gradient of what it reads, with frozen statistics; in the memory of that of its output, if spare."""
        return wanted_gradients(self._scaled(part), part)

    def input_gradients_by_batch(
        self, part: BackwardInput, plain: Tensor, products: Tensor, pixels: int
    ) -> list[Tensor | None]:
        """The gradient of what it reads, from sums over the whole map.

        Args:
            part: the tile's.
            plain, products: (C,), as :meth:`sums` tells of tiles.
            pixels: values per channel of the whole map.
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
        """Add what the tile's own pixels contribute to scale and shift."""
        weight, bias = self.layer.weight, self.layer.bias
        if weight is not None and weight.requires_grad:
            self.add(*self.sums(part))
        elif bias is not None and bias.requires_grad:
            accumulate(bias, part.gradient.part(part.core).sum((0, 2, 3)))

    def add(self, plain: Tensor, products: Tensor) -> None:
        """Add a tile's sums to the gradients of scale and shift."""
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


def wanted_gradients(found: Tensor, part: BackwardInput) -> list[Tensor | None]:
    """A gradient of all that an operator reads, on the parts that are wanted."""
    held = RegionTensor(found, part.needs)
    return [None if region is None else held.zero_extended(region) for region in part.wanted]


def zero_gradients(part: BackwardInput) -> list[Tensor | None]:
    """Gradients of what an operator reads where the tile has nothing of what it makes."""
    upper, batch = part.gradient.values, len(part.gradient.values)
    return [
        None if region is None else upper.new_zeros(batch, size.channels, len(region.rows), len(region.columns))
        for region, size in zip(part.wanted, part.sizes, strict=True)
    ]


@torch.no_grad()
def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def activation(layer: nn.Module) -> Adjoint | None:
    """The adjoint of an activation whose slope follows from its output; None for others."""
    if isinstance(layer, nn.LeakyReLU) and layer.negative_slope > 0:
        return leaky_relu(layer.negative_slope)
    return next((found() for kind, found in _ACTIVATIONS.items() if isinstance(layer, kind)), None)


def leaky_relu(slope: float) -> Adjoint:
    """Of a ReLU with a slope above 0 on the left."""
    back = torch.ops.aten.leaky_relu_backward
    return OutputAdjoint(lambda upper, made, into: back(upper, made, slope, True, grad_input=into))


def relu() -> Adjoint:
    """Of a ReLU."""
    back = torch.ops.aten.threshold_backward
    return OutputAdjoint(lambda upper, made, into: back(upper, made, 0, grad_input=into))


def relu6() -> Adjoint:
    """Of a ReLU6."""
    back = torch.ops.aten.hardtanh_backward
    return OutputAdjoint(lambda upper, made, into: back(upper, made, 0.0, 6.0, grad_input=into))


_ACTIVATIONS: Mapping[type[nn.Module], Callable[[], Adjoint]] = {nn.ReLU: relu, nn.ReLU6: relu6}


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())
