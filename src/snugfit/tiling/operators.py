"""Operators on parts of feature maps, and sequences of them on the parts that a tile needs.

Shapes: B batch, C channels, H and W height and width, h and w those of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx, nn

from snugfit.lean.convolution import convolution_for_backward
from snugfit.tiling.adjoint import AddAdjoint, Adjoint, BatchNormAdjoint, ConvAdjoint, RegionTensor
from snugfit.tiling.geometry import SAME
from snugfit.tiling.layers import Layer, Layers, Region
from snugfit.tiling.statistics import Normalised

_PADDING = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
_LEAST_MACS = 2_000_000
"""Multiply-accumulates of a convolution from which leaving it out takes less time than saying so."""
Statistics = Mapping[int, tuple[Tensor, Tensor]]
"""Mean and variance (C,) of the feature map that a norm reads, by the norm's number."""


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        layer: its geometry.
        call: computes an output from inputs, (B, C, h, w), that hold exactly what the output needs, padding included.
        adjoint: its backward pass.
        overwrite: computes the output in the memory of its input, which nothing else may read; None if it cannot.
        fill: value of the padding.
        module: the layer, if the operator is one.
    """

    layer: Layer
    call: Callable[..., Tensor]
    adjoint: Adjoint
    overwrite: Callable[[Tensor], Tensor] | None = None
    fill: float = 0.0
    module: nn.Module | None = None


@dataclass(frozen=True)
class TileablePrefix:
    """The leading part of a network that can be tiled; one operator and one node of the graph per layer."""

    layers: Layers
    operators: tuple[Operator, ...]
    nodes: tuple[fx.Node, ...]

    def parameters(self, start: int, stop: int) -> list[nn.Parameter]:
        """Parameters of the layers between two cuts, each once."""
        layers = [each.module for each in self.operators[start:stop] if each.module is not None]
        return list(dict.fromkeys(parameter for layer in layers for parameter in layer.parameters()))

    def norms(self) -> dict[nn.Module, int]:
        """BatchNorm layers, each with the number of pixels of the feature map that it reads."""
        maps, norms = self.layers.maps, [each for each in self.operators if isinstance(each.module, nn.BatchNorm2d)]
        return {each.module: maps[each.layer.reads[0]].whole.area for each in norms if each.module is not None}

    def cropped(self, count: int) -> TileablePrefix:
        """Its first operators, up to a cut."""
        layers = Layers(self.layers.maps[: count + 1], self.layers.layers[:count])
        return TileablePrefix(layers, self.operators[:count], self.nodes[:count])

    def run(
        self,
        start: int,
        stop: int,
        regions: Mapping[int, Region],
        entries: Mapping[int, Tensor],
        statistics: Statistics | None = None,
        keep: Container[int] = (),
        unread: Container[int] = (),
    ) -> dict[int, Tensor]:
        """Run layers ``start``, ..., ``stop - 1`` on parts (B, C, h, w) of feature maps.

        Returns the parts of the feature maps that are alive behind the last layer. After every layer, whatever lies
        outside the image is padding again.

        Args:
            start, stop: numbers of feature maps.
            regions: the region of each feature map that is held, as returned by :meth:`Layers.needed`.
            entries: the parts of feature maps up to ``start`` that are read, by number.
            statistics: for norms that normalise by their batch, by number.
            keep: numbers of feature maps that are returned too.
            unread: numbers of feature maps that nothing reads but for gradients: those of convolutions that take long
                have no values.
        """
        values, alive = dict(entries), {*self.layers.alive(stop)}
        kept = {*alive, *(number for number in regions if number in keep)}
        last = {read: number for number in range(start, stop) for read in self.layers.layers[number].reads}
        for number in range(start, stop):
            if number + 1 not in regions:
                continue
            each, made = self.operators[number], regions[number + 1]
            inputs = [RegionTensor(values[read], regions[read]) for read in each.layer.reads]
            moments = statistics.get(number) if statistics else None
            reusable = self._is_reusable(number, start, kept)
            work = each.layer.macs * made.area * len(inputs[0].values)
            backward = number + 1 in unread and work >= _LEAST_MACS
            values[number + 1] = self._made(number, made, inputs, moments, reusable=reusable, for_backward=backward)
            del inputs
            for read in each.layer.reads:
                if last[read] == number and read not in kept:
                    values.pop(read, None)
        wanted = [number for number in values if number > start and (number in alive or number in keep)]
        return {number: values[number] for number in wanted}

    def part(self, number: int, made: Region, held: RegionTensor) -> Tensor:
        """A part of a layer's output, (B, C, h, w), from a part of the one feature map that it reads."""
        return self._made(number, made, [held], None, reusable=False)

    def _is_reusable(self, number: int, start: int, kept: Container[int]) -> bool:
        """Whether an operator may overwrite its input: computed here in memory of its own, for this operator alone."""
        reads = self.operators[number].layer.reads
        if self.operators[number].overwrite is None or reads[0] <= start or reads[0] in kept:
            return False
        alone = self.layers.readers[reads[0]] == 1
        return alone and isinstance(self.operators[reads[0] - 1].adjoint, (AddAdjoint, ConvAdjoint, BatchNormAdjoint))

    def _made(
        self,
        number: int,
        made: Region,
        inputs: Sequence[RegionTensor],
        moments: tuple[Tensor, Tensor] | None,
        *,
        reusable: bool,
        for_backward: bool = False,
    ) -> Tensor:
        """The output (B, C, h, w) of an operator on parts of feature maps.

        If it is only ``for_backward``, that of a convolution has no values.
        """
        each, batch = self.operators[number], len(inputs[0].values)
        if not made.area or not batch:
            shape = (batch, self.layers.maps[number + 1].channels, len(made.rows), len(made.columns))
            return inputs[0].values.new_empty(shape)
        if reusable and each.overwrite is not None and inputs[0].region == made:
            return each.overwrite(inputs[0].values)
        sizes = [self.layers.maps[read] for read in each.layer.reads]
        whole = made == self.layers.maps[number + 1].whole and inputs[0].region == sizes[0].whole
        if whole and isinstance(each.module, _PADDING):  # the layer pads without a copy
            if for_backward and isinstance(each.module, nn.Conv2d) and not isinstance(each.module.padding, str):
                return convolution_for_backward(each.module, inputs[0].values, each.module.padding)
            return cast(Tensor, each.module.forward(inputs[0].values))
        if each.layer.rows is SAME and each.layer.columns is SAME and all(held.region == made for held in inputs):
            framed = [held.values for held in inputs]
        else:
            needs = each.layer.needs(made)
            framed = [held.padded(needs, size, each.fill) for held, size in zip(inputs, sizes, strict=True)]
        if for_backward and isinstance(each.module, nn.Conv2d):
            return convolution_for_backward(each.module, framed[0], (0, 0))
        return each.call(*framed) if moments is None else normalised(each.module, framed[0], *moments)


def normalised(norm: nn.Module | None, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Apply BatchNorm to a part of a feature map, (B, C, h, w), with mean and variance (C,) of the whole one."""
    assert isinstance(norm, nn.BatchNorm2d)
    made: Tensor = Normalised.apply(x, mean, variance, norm.weight, norm.bias, norm.eps)
    return made
