"""A network's leading layers, tile after tile on one device: exact, with the activations of one tile alive at a time.

Only the feature maps between groups are kept, in memory or in memory-mapped files. In the backward pass every tile of a
group's output runs forward again, and the gradients of the group's input and weights are summed. Tiles of the output do
not overlap, so nothing counts twice; halos of the input add up by themselves. A BatchNorm layer that normalises by its
batch needs the whole feature map before it, so a group ends there too.

If a feature map is read by a segment and by a later one, the segment hands it on. So each feature map has one reader,
whose gradient is added to in place, and autograd never adds up whole feature maps in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from snugfit._chain.subgraph import computed_nodes, subgraph_module
from snugfit.memory.autocast import META_AS, autocast
from snugfit.memory.scratch import MappedScratch
from snugfit.tiling.adjoint import normalises_by_batch
from snugfit.tiling.exchange import empty_map
from snugfit.tiling.grouping import Profile, every_cut
from snugfit.tiling.layers import EMPTY_REGION, MapSize, Region, Tiling, require_grid, tiling_of
from snugfit.tiling.operators import TileablePrefix
from snugfit.tiling.statistics import add_statistics_gradient, mean_and_variance, update_running_statistics
from snugfit.tiling.tileable_prefix import find_tileable_prefix


@dataclass(frozen=True)
class Segment:
    """Layers ``start``, ..., ``stop - 1``; with ``by_batch``, the first is a norm that normalises by its batch.

    Feature maps between segments lie in ``scratch``, or in memory. A tile has at most ``images`` images, or all.
    """

    prefix: TileablePrefix
    tiling: Tiling
    start: int
    stop: int
    by_batch: bool
    scratch: MappedScratch | None = None
    images: int | None = None

    @cached_property
    def entries(self) -> list[int]:
        """Numbers of the feature maps that are read."""
        return self.prefix.layers.entries(self.start, self.stop)

    @cached_property
    def outputs(self) -> list[int]:
        """Numbers of the feature maps that are made for later segments."""
        return self.prefix.layers.outputs(self.start, self.stop)

    def size(self, number: int) -> MapSize:
        """Size of a feature map."""
        return self.prefix.layers.maps[number]

    @property
    def normed(self) -> int:
        """Number of the feature map that the first layer reads."""
        return self.prefix.layers.layers[self.start].reads[0]

    @cached_property
    def tiles(self) -> list[tuple[dict[int, Region], dict[int, Region]]]:
        """For each tile, the regions of its outputs, and the regions of every feature map that it holds for them."""
        found = []
        for tile in self.tiling.tiles:
            cores = {number: self.tiling.core(number, tile) for number in self.outputs}
            cores = {number: core for number, core in cores.items() if core.area}
            if cores:
                found.append((cores, self.prefix.layers.needed(self.start, self.stop, cores)))
        return found

    def spans(self, entry: Tensor) -> list[slice]:
        """The images of the tiles, from a batch (B, C, H, W); on the meta device two tiles stand for all."""
        batch = len(entry)
        size = self.images or max(batch, 1)
        found = [slice(first, min(first + size, batch)) for first in range(0, max(batch, 1), size)]
        return [found[0], found[-1]] if entry.is_meta and len(found) > 2 else found

    def __call__(self, maps: dict[int, Tensor], moments: Sequence[Tensor]) -> dict[int, Tensor]:
        """Its outputs and the entries that are handed on, (B, C, H, W), by number, from the feature maps that it reads.

        ``moments`` are mean and variance (C,) of the feature map that a norm by its batch reads.
        """
        alive = self.prefix.layers.alive(self.stop)
        passed = [number for number in self.entries if number in alive and maps[number].requires_grad]
        parameters = self.prefix.parameters(self.start, self.stop)
        entries = [maps[number] for number in self.entries]
        made = _Tiled.apply(self, passed, *entries, *moments, *parameters)
        return dict(zip([*self.outputs, *passed], made, strict=True))

    @cached_property
    def unread(self) -> list[int]:
        """Numbers of those outputs that no layer of the segment reads."""
        read = {number for layer in self.prefix.layers.layers[self.start : self.stop] for number in layer.reads}
        return [number for number in self.outputs if number not in read]

    def run(
        self,
        regions: dict[int, Region],
        entries: Sequence[Tensor],
        moments: Sequence[Tensor],
        *,
        for_backward: bool = False,
    ) -> dict[int, Tensor]:
        """Run a tile on parts (B, C, h, w) of its entries, with moments (C,).

        For the backward pass, outputs of convolutions that the segment does not read itself have no values.
        """
        read = {number: entry for number, entry in zip(self.entries, entries, strict=True) if number in regions}
        statistics = {self.start: (moments[0], moments[1])} if self.by_batch else None
        unread = self.unread if for_backward else ()
        return self.prefix.run(self.start, self.stop, regions, read, statistics, unread=unread)

    def whole(self, number: int, like: Tensor, entry: Tensor) -> Tensor:
        """Storage (B, C, H, W) for a feature map or its gradient: in scratch, except for the first and the last one.

        ``like`` is a part of it, (b, C, h, w); ``entry`` is a feature map (B, C, H, W) whose memory format is used.
        """
        size = self.size(number)
        shape = (len(entry), size.channels, size.height, size.width)
        last = entry.is_contiguous(memory_format=torch.channels_last)
        if self.scratch is not None and 0 < number < len(self.prefix.operators):
            return self.scratch.empty(shape, like.dtype, last=last, meta=like.is_meta)
        return empty_map(shape, like, last=last)


class _Tiled(torch.autograd.Function):
    """A segment on feature maps (B, C, H, W), tile by tile; arguments are entries, moments and parameters."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, passed: list[int], *arguments: Tensor) -> tuple[Tensor, ...]:
        count, moments = len(segment.entries), 2 * segment.by_batch
        entries, given = arguments[:count], arguments[count : count + moments]
        ctx.save_for_backward(*arguments[: count + moments])
        ctx.set_materialize_grads(False)
        ctx.segment, ctx.passed, ctx.parameters = segment, passed, arguments[count + moments :]
        ctx.autocast = _autocast_now(arguments[0].device.type)
        outputs: dict[int, Tensor] = {}
        for images, (cores, regions) in product(segment.spans(entries[0]), segment.tiles):
            made = segment.run(regions, _parts(segment, entries, regions, images), given)
            for number, core in cores.items():
                if number not in outputs:
                    outputs[number] = segment.whole(number, made[number], entries[0])
                _part(outputs[number], core, images).copy_(_within(made[number], regions[number], core))
        handed_on = [entries[segment.entries.index(number)] for number in passed]
        return (*(outputs[number] for number in segment.outputs), *handed_on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        sums = _GradientSums(segment, ctx.saved_tensors, ctx.parameters, ctx.needs_input_grad[2:])
        own = len(segment.outputs)
        sums.begin(dict(zip(ctx.passed, gradients[own:], strict=True)))
        upper = dict(zip(segment.outputs, gradients[:own], strict=True))
        for images, (cores, regions) in product(segment.spans(sums.entries[0]), segment.tiles):
            sums.add(_Tile(images, cores, regions), upper, ctx.autocast)
        sums.end()
        moments = [None] * (len(ctx.saved_tensors) - len(segment.entries))
        return None, None, *sums.totals, *moments, *sums.weights


class _Tile(NamedTuple):
    """Images of a batch, the regions of a segment's outputs, and those of every feature map held for them."""

    images: slice
    cores: dict[int, Region]
    regions: dict[int, Region]


class _GradientSums:
    """Gradients of a segment's entries, (B, C, H, W), and weights, summed over tiles; None for those that need none."""

    def __init__(
        self, segment: Segment, saved: Sequence[Tensor], parameters: Sequence[Tensor], needed: Sequence[bool]
    ) -> None:
        count = len(segment.entries)
        self.segment, self.entries, self.moments = segment, saved[:count], saved[count:]
        self.parameters, self.wanted = parameters, needed[:count]
        self.trained = [place for place, need in enumerate(needed[len(saved) :]) if need]
        self.totals: list[Tensor | None] = []
        self.weights: list[Tensor | None] = [None] * len(parameters)
        self.to_moments: list[Tensor | None] = [None] * len(self.moments)
        self.fresh: set[int] = set()  # entries of which each part is written once

    @property
    def _moments_matter(self) -> bool:
        return self.segment.by_batch and self.wanted[self.segment.entries.index(self.segment.normed)]

    def begin(self, handed_on: dict[int, Tensor | None]) -> None:
        """Start with the gradients (B, C, H, W) from later readers, in place, and with zeros for other entries."""
        for number, entry, want in zip(self.segment.entries, self.entries, self.wanted, strict=True):
            total = handed_on.get(number)
            if want and total is None:
                total = self.segment.whole(number, entry, entry)
                if [regions.get(number) for _, regions in self.segment.tiles] == [self.segment.size(number).whole]:
                    self.fresh.add(number)
                else:
                    total.zero_()
            self.totals.append(total if want else None)

    def add(self, tile: _Tile, gradients: dict[int, Tensor | None], autocast: Any) -> None:
        """Run a tile forward and backward, with gradients (B, C, H, W) of the segment's outputs."""
        images, cores, regions = tile
        parts = [part.detach() for part in _parts(self.segment, self.entries, regions, images)]
        leaves = [part.requires_grad_(True) for part, want in zip(parts, self.wanted, strict=True) if want]
        moments = [each.detach().requires_grad_(self._moments_matter) for each in self.moments]
        trained = [self.parameters[place] for place in self.trained]
        with torch.enable_grad(), autocast():
            made = self.segment.run(regions, parts, moments, for_backward=True)
            outputs = {number: _within(made[number], regions[number], core) for number, core in cores.items()}
        flowing = [(number, up) for number, up in gradients.items() if up is not None and number in outputs]
        flowing = [(number, up) for number, up in flowing if outputs[number].requires_grad]
        if not flowing:
            self._collect(tile, [None] * len(leaves))
            return
        edges = [get_gradient_edge(outputs[number]) for number, _ in flowing]
        upper = [_part(up, cores[number], images) for number, up in flowing]
        del made, outputs  # their memory is not read again, but for what operators have kept
        read = [*leaves, *(moments if self._moments_matter else []), *trained]
        found = list(torch.autograd.grad(edges, read, upper, allow_unused=True))
        self._collect(tile, found[: len(leaves)])
        del found[: len(leaves)]
        if self._moments_matter:
            self.to_moments = [_added(before, found.pop(0)) for before in self.to_moments]
        for place, part in zip(self.trained, found, strict=True):
            self.weights[place] = _added(self.weights[place], part)

    def _collect(self, tile: _Tile, parts: Sequence[Tensor | None]) -> None:
        """Add a tile's gradients (b, C, h, w) of the entries that need one."""
        wanted = [(number, total) for number, total in zip(self.segment.entries, self.totals, strict=True)]
        for (number, total), part in zip([each for each in wanted if each[1] is not None], parts, strict=True):
            own = _part(cast(Tensor, total), tile.regions.get(number, EMPTY_REGION), tile.images)
            if number in self.fresh:
                own.zero_() if part is None else own.copy_(part)
            elif part is not None:
                own.add_(part)

    def end(self) -> None:
        """Pass the summed gradients of mean and variance back to the feature map."""
        to_mean, to_variance = self.to_moments if self._moments_matter else (None, None)
        if to_mean is not None and to_variance is not None:
            place = self.segment.entries.index(self.segment.normed)
            total = self.totals[place]
            assert total is not None
            add_statistics_gradient(total, self.entries[place], self.moments[0], to_mean, to_variance)


def _added(before: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Add two gradients of one shape, in place; None counts as zero."""
    if part is None or before is None:
        return before if part is None else part
    return before.add_(part)


def _autocast_now(device: str) -> Callable[[], AbstractContextManager[object]]:
    """The autocast context that makes the backward pass compute in the types of the forward pass."""
    if device == "meta":
        is_on = torch.is_autocast_enabled(META_AS)
        return partial(autocast, device, torch.get_autocast_dtype(META_AS)) if is_on else nullcontext
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))


def _parts(segment: Segment, entries: Sequence[Tensor], regions: dict[int, Region], images: slice) -> list[Tensor]:
    """The parts (b, C, h, w) that a tile reads of each entry; empty for entries that it does not need."""
    named = zip(segment.entries, entries, strict=True)
    return [_part(entry, regions.get(number, EMPTY_REGION), images) for number, entry in named]


def _part(tensor: Tensor, region: Region, images: slice) -> Tensor:
    """A part (b, C, h, w) of a feature map (B, C, H, W)."""
    rows, columns = region.rows, region.columns
    if (len(rows), len(columns)) == tensor.shape[2:]:
        return tensor[images]
    return tensor[images, :, rows.start : rows.stop, columns.start : columns.stop]


def _within(tensor: Tensor, held: Region, core: Region) -> Tensor:
    """The core (B, C, h, w) of a tile from a tensor that also holds the halo that another output needs."""
    if core == held:
        return tensor
    return tensor[..., core.rows.within(held.rows), core.columns.within(held.columns)]


class TiledForward:
    """The forward pass of a network whose leading layers run tile after tile.

    Outputs and gradients equal the network's. Call it instead of the network, in your own training loop too. Weights,
    buffers and hooks on parameters are the network's; forward hooks of tiled layers do not run.

    Args:
        module: a traced network, such as ``Chain.to_module()``.
        input_shape: channels, height, width of one image.
        grid: tiles down and across.
        profile: groups of layers; a whole feature map is kept between two groups. A group per layer by default.
        scratch: memory-mapped files for feature maps and their gradients, on a CPU; they lie in memory by default.
        images: most images of a tile, which makes micro-batches whose statistics are those of the batch; all by
            default.

    Attributes:
        images: may be changed between steps.

    Raises:
        ModelError: the model does not begin with layers that can be tiled, or its last tiled feature map has fewer rows
            or columns than the grid.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        input_shape: tuple[int, ...],
        grid: tuple[int, int],
        profile: Profile | None = None,
        scratch: MappedScratch | None = None,
        images: int | None = None,
    ) -> None:
        self.prefix = find_tileable_prefix(module, input_shape)
        require_grid(grid, self.prefix.layers.maps[-1])
        self.tiling = tiling_of(self.prefix.layers, grid)
        self.profile = profile or every_cut(self.prefix.layers.cuts)
        self.rest = rest_of(module, self.prefix)
        self.scratch, self.images = scratch, images
        self._segments: dict[tuple[frozenset[int], int | None], list[Segment]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the network's output from images (B, C, H, W).

        Raises:
            OutOfStorageError: feature maps do not fit the scratch files' limit, or the disk.
        """
        maps = {0: images}
        for segment in self._cut():
            moments = self._statistics(segment, maps) if segment.by_batch else ()
            maps |= segment(maps, moments)
            maps = {number: maps[number] for number in self.prefix.layers.alive(segment.stop)}
        value = maps[len(self.prefix.operators)]
        output: Tensor = value if self.rest is None else self.rest(value)
        return output

    def _cut(self) -> list[Segment]:
        """The segments between groups; they also end in front of norms that now normalise by their batch."""
        operators = enumerate(self.prefix.operators)
        by_batch = frozenset(number for number, each in operators if normalises_by_batch(each.module))
        key = by_batch, self.images
        if key not in self._segments:
            self._segments[key] = [
                Segment(self.prefix, self.tiling, start, stop, start in by_batch, self.scratch, self.images)
                for start, stop in pairwise(sorted({*self.profile.cuts, *by_batch}))
            ]
        return self._segments[key]

    @torch.no_grad()
    def _statistics(self, segment: Segment, maps: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance (C,) of the feature map (B, C, H, W) that a norm reads."""
        entry, norm = maps[segment.normed], self.prefix.operators[segment.start].module
        pixels = entry.numel() // entry.shape[1]
        if pixels < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {entry.shape}")
        mean, variance = mean_and_variance(entry)
        assert isinstance(norm, nn.BatchNorm2d)
        update_running_statistics(norm, mean, variance, pixels)
        return mean, variance


def rest_of(module: fx.GraphModule, prefix: TileablePrefix) -> nn.Module | None:
    """The layers behind the tiled ones, sharing the network's weights; None if there are none."""
    nodes = computed_nodes(module.graph)
    after = nodes[len(prefix.nodes) :]
    return subgraph_module(module, after, prefix.nodes[-1]) if after else None
