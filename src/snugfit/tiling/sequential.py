"""A network's leading layers, tile after tile on one device: exact, with the activations of one tile alive at a time.

Only the maps at which groups meet are kept. In the backward pass every tile of a group's output runs forward again, and
what its gradient adds to the group's input and weights is summed: tiles of the output overlap nowhere, so that nothing
counts twice, and halos of the input sum up by themselves. A BatchNorm layer that normalises by its batch needs the
whole map in front of it, so that groups meet there too (NOTES, Tiled training 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from snugfit.chain.part import part_of
from snugfit.errors import ModelError
from snugfit.tiling.geometry import EMPTY, balanced
from snugfit.tiling.layers import Region, Tiling
from snugfit.tiling.operators import Stem, normalises_by_batch
from snugfit.tiling.profile import Profile, every_cut
from snugfit.tiling.statistics import BatchStatistics, track
from snugfit.tiling.stem import stem_of


class TiledForward:
    """The forward pass of a network whose leading layers run tile after tile.

    It computes what the network does, and so does its backward pass; called where the network would be called, in a
    training loop of one's own too. Weights, buffers and hooks on parameters are the network's; forward hooks of tiled
    layers do not run.

    Args:
        module: a traced network, such as ``Chain.to_module()``.
        input_shape: channels, height, width of one image.
        grid: tiles down and across.
        profile: groups of layers; between two a whole map is kept. A group per layer by default.

    Raises:
        ModelError: the model does not begin with layers that can be tiled, or its last tiled map has fewer rows or
            columns than the grid.
    """

    def __init__(
        self, module: fx.GraphModule, input_shape: tuple[int, ...], grid: tuple[int, int],
        profile: Profile | None = None,
    ) -> None:  # fmt: skip
        self.stem = stem_of(module, input_shape)
        size = self.stem.layers.maps[-1]
        if grid[0] > size.height or grid[1] > size.width or min(grid) < 1:
            raise ModelError(
                f"a map of {size.height}x{size.width} cannot be cut into {grid[0]}x{grid[1]} tiles: use a smaller grid."
            )
        self.tiling = Tiling.of(self.stem.layers, balanced(size.height, grid[0]), balanced(size.width, grid[1]))
        self.profile = profile or every_cut(self.stem.layers.cuts)
        self.rest = rest_of(module, self.stem)
        self._segments: dict[frozenset[int], list[_Segment]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to the network's output."""
        maps = {0: images}
        for segment in self._cut():
            moments = self._statistics(segment.start, maps) if segment.by_batch else ()
            entries = [maps[number] for number in segment.entries]
            parameters = self.stem.parameters(segment.start, segment.stop)
            made = _Tiled.apply(segment, *entries, *moments, *parameters)  # type: ignore[no-untyped-call]
            maps |= dict(zip(segment.outputs, made, strict=True))
            maps = {number: maps[number] for number in self.stem.layers.alive(segment.stop)}
        value = maps[len(self.stem.operators)]
        output: Tensor = value if self.rest is None else self.rest(value)
        return output

    def _cut(self) -> list[_Segment]:
        """The stretches between groups, and in front of norms that now normalise by their batch."""
        operators = enumerate(self.stem.operators)
        by_batch = frozenset(number for number, each in operators if normalises_by_batch(each.module))
        if by_batch not in self._segments:
            self._segments[by_batch] = [
                _Segment(self.stem, self.tiling, start, stop, start in by_batch)
                for start, stop in pairwise(sorted({*self.profile.cuts, *by_batch}))
            ]
        return self._segments[by_batch]

    def _statistics(self, number: int, maps: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        each = self.stem.operators[number]
        entry = maps[each.layer.reads[0]]
        pixels = entry.numel() // entry.shape[1]
        if pixels < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {entry.shape}")
        mean, variance = BatchStatistics.apply(entry)  # type: ignore[no-untyped-call]
        assert isinstance(each.module, nn.BatchNorm2d)
        track(each.module, mean, variance, pixels)
        return mean, variance


@dataclass(frozen=True)
class _Segment:
    """Layers ``start``, ..., ``stop - 1``, of which the first may be a norm that normalises by its batch."""

    stem: Stem
    tiling: Tiling
    start: int
    stop: int
    by_batch: bool

    @cached_property
    def entries(self) -> list[int]:
        """Numbers of the maps that are read."""
        reads = {read for layer in self.stem.layers.layers[self.start : self.stop] for read in layer.reads}
        return sorted(number for number in reads if number <= self.start)

    @cached_property
    def outputs(self) -> list[int]:
        """Numbers of the maps that are made for others."""
        return [number for number in self.stem.layers.alive(self.stop) if number > self.start]

    @cached_property
    def tiles(self) -> list[tuple[dict[int, Region], dict[int, Region]]]:
        """The parts of its outputs that each tile makes, and what the tile holds of every map for that."""
        found = []
        for tile in self.tiling.tiles:
            cores = {number: self.tiling.core(number, tile) for number in self.outputs}
            cores = {number: core for number, core in cores.items() if core.area}
            if cores:
                found.append((cores, self.stem.layers.needed(self.start, self.stop, cores)))
        return found

    def run(
        self, regions: dict[int, Region], entries: Sequence[Tensor], moments: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Run a tile on parts of its entries."""
        read = {number: entry for number, entry in zip(self.entries, entries, strict=True) if number in regions}
        statistics = {self.start: (moments[0], moments[1])} if self.by_batch else None
        return self.stem.run(self.start, self.stop, regions, read, statistics)


class _Tiled(torch.autograd.Function):
    """A segment on maps (B, C, H, W), tile by tile of what it makes; arguments are entries, moments, parameters."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, *arguments: Tensor) -> tuple[Tensor, ...]:
        count, moments = len(segment.entries), 2 * segment.by_batch
        entries, given = arguments[:count], arguments[count : count + moments]
        ctx.save_for_backward(*arguments[: count + moments])
        ctx.segment, ctx.parameters = segment, arguments[count + moments :]
        ctx.autocast = _autocast_now(arguments[0].device.type)
        outputs: dict[int, Tensor] = {}
        for cores, regions in segment.tiles:
            made = segment.run(regions, _parts(segment, entries, regions), given)
            for number, core in cores.items():
                if number not in outputs:
                    outputs[number] = _whole(segment, number, made[number], like=entries[0])
                _part(outputs[number], core).copy_(_within(made[number], regions[number], core))
        return tuple(outputs[number] for number in segment.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        segment: _Segment = ctx.segment
        count = len(segment.entries)
        needed, saved = ctx.needs_input_grad[1:], ctx.saved_tensors
        sums = _Sums(segment, saved[:count], needed[:count], [*saved[count:], *ctx.parameters], needed[count:])
        upper = dict(zip(segment.outputs, gradients, strict=True))
        for cores, regions in segment.tiles:
            sums.add(cores, regions, upper, len(saved) - count, ctx.autocast)
        return None, *sums.entries, *sums.others


class _Sums:
    """Gradients of a segment's arguments, summed over tiles; None for those that need none."""

    def __init__(
        self, segment: _Segment, entries: Sequence[Tensor], wanted: Sequence[bool], others: Sequence[Tensor],
        needed: Sequence[bool],
    ) -> None:  # fmt: skip
        self.segment, self.inputs, self.arguments, self.needed = segment, entries, others, needed
        self.entries = [torch.zeros_like(e) if want else None for e, want in zip(entries, wanted, strict=True)]
        self.others: list[Tensor | None] = [None] * len(others)

    def add(
        self, cores: dict[int, Region], regions: dict[int, Region], gradients: dict[int, Tensor], moments: int,
        autocast: Any,
    ) -> None:  # fmt: skip
        """Run a tile forward and backward."""
        parts = [part.detach() for part in _parts(self.segment, self.inputs, regions)]
        leaves = [p.requires_grad_(True) for p, total in zip(parts, self.entries, strict=True) if total is not None]
        given = [each.detach() for each in self.arguments[:moments]]
        others = [*given, *self.arguments[moments:]]
        for each, need in zip(given, self.needed, strict=False):
            each.requires_grad_(need)
        wanted = [place for place, need in enumerate(self.needed) if need]
        with torch.enable_grad(), autocast():
            made = self.segment.run(regions, parts, given)
            outputs = [_within(made[number], regions[number], core) for number, core in cores.items()]
        upper = [_part(gradients[number], core) for number, core in cores.items()]
        flowing = [(out, up) for out, up in zip(outputs, upper, strict=True) if out.requires_grad]
        if not flowing:
            return
        found = list(
            torch.autograd.grad(
                [out for out, _ in flowing], [*leaves, *(others[place] for place in wanted)],
                [up for _, up in flowing], allow_unused=True,
            )
        )  # fmt: skip
        for number, total in zip(self.segment.entries, self.entries, strict=True):
            if total is not None and (part := found.pop(0)) is not None:
                _part(total, regions[number]).add_(part)
        for place, part in zip(wanted, found, strict=True):
            before = self.others[place]
            if part is not None:
                self.others[place] = part if before is None else before.add_(part)


def _autocast_now(device: str) -> Callable[[], AbstractContextManager[object]]:
    """What makes the backward pass compute in the types of the forward pass."""
    if device == "meta":
        return nullcontext
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))


def _parts(segment: _Segment, entries: Sequence[Tensor], regions: dict[int, Region]) -> list[Tensor]:
    """What a tile reads of each entry; nothing of those that it does not need."""
    nothing = Region(EMPTY, EMPTY)
    return [_part(entry, regions.get(n, nothing)) for n, entry in zip(segment.entries, entries, strict=True)]


def _part(tensor: Tensor, region: Region) -> Tensor:
    return tensor[..., region.rows.start : region.rows.stop, region.columns.start : region.columns.stop]


def _within(tensor: Tensor, held: Region, core: Region) -> Tensor:
    """The core of a tile, of a tensor that holds more: another output may need its halo."""
    return tensor[..., core.rows.within(held.rows), core.columns.within(held.columns)]


def _whole(segment: _Segment, number: int, part: Tensor, like: Tensor) -> Tensor:
    size = segment.stem.layers.maps[number]
    last = like.is_contiguous(memory_format=torch.channels_last)
    return torch.empty(
        (len(part), size.channels, size.height, size.width), dtype=part.dtype, device=part.device,
        memory_format=torch.channels_last if last else torch.contiguous_format,
    )  # fmt: skip


def rest_of(module: fx.GraphModule, stem: Stem) -> nn.Module | None:
    """What follows the tiled layers, with the network's own layers; None where nothing does."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    after = nodes[len(stem.nodes) :]
    return part_of(module, after, stem.nodes[-1]) if after else None
