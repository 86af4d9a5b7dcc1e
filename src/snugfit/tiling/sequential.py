"""A network's leading layers, tile after tile on one device: exact, with the activations of one tile alive at a time.

Only the maps at which groups meet are kept. In the backward pass every tile of a group's output runs forward again, and
what its gradient adds to the group's input and weights is summed: tiles of the output overlap nowhere, so that nothing
counts twice, and halos of the input sum up by themselves. A BatchNorm layer that normalises by its batch needs the
whole map in front of it, so that groups meet there too.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from snugfit._chain.subgraph import part_of
from snugfit.errors import ModelError
from snugfit.memory.mapped import MappedScratch
from snugfit.tiling.geometry import balanced
from snugfit.tiling.layers import Tiling
from snugfit.tiling.operators import TileablePrefix, normalises_by_batch
from snugfit.tiling.profile import Profile, every_cut
from snugfit.tiling.segments import Segment
from snugfit.tiling.statistics import update_running_statistics
from snugfit.tiling.tileable_prefix import find_tileable_prefix


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
        scratch: where whole maps and their gradients lie, in memory-mapped files; in memory by default. On a CPU.

    Raises:
        ModelError: the model does not begin with layers that can be tiled, or its last tiled map has fewer rows or
            columns than the grid.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        input_shape: tuple[int, ...],
        grid: tuple[int, int],
        profile: Profile | None = None,
        scratch: MappedScratch | None = None,
    ) -> None:
        self.prefix = find_tileable_prefix(module, input_shape)
        size = self.prefix.layers.maps[-1]
        if grid[0] > size.height or grid[1] > size.width or min(grid) < 1:
            raise ModelError(
                f"a map of {size.height}x{size.width} cannot be cut into {grid[0]}x{grid[1]} tiles: use a smaller grid."
            )
        self.tiling = Tiling.of(self.prefix.layers, balanced(size.height, grid[0]), balanced(size.width, grid[1]))
        self.profile = profile or every_cut(self.prefix.layers.cuts)
        self.rest = rest_of(module, self.prefix)
        self.scratch = scratch
        self._segments: dict[frozenset[int], list[Segment]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to the network's output.

        Raises:
            OutOfStorageError: whole maps do not fit the scratch files' limit, or the disk.
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
        """The stretches between groups, and in front of norms that now normalise by their batch."""
        operators = enumerate(self.prefix.operators)
        by_batch = frozenset(number for number, each in operators if normalises_by_batch(each.module))
        if by_batch not in self._segments:
            self._segments[by_batch] = [
                Segment(self.prefix, self.tiling, start, stop, start in by_batch, self.scratch)
                for start, stop in pairwise(sorted({*self.profile.cuts, *by_batch}))
            ]
        return self._segments[by_batch]

    @torch.no_grad()
    def _statistics(self, segment: Segment, maps: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of what a norm reads; segments pass gradients back through them."""
        entry, norm = maps[segment.normed], self.prefix.operators[segment.start].module
        pixels = entry.numel() // entry.shape[1]
        if pixels < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {entry.shape}")
        variance, mean = torch.var_mean(entry, (0, 2, 3), correction=0)
        assert isinstance(norm, nn.BatchNorm2d)
        update_running_statistics(norm, mean, variance, pixels)
        return mean, variance


def rest_of(module: fx.GraphModule, prefix: TileablePrefix) -> nn.Module | None:
    """What follows the tiled layers, with the network's own layers; None where nothing does."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    after = nodes[len(prefix.nodes) :]
    return part_of(module, after, prefix.nodes[-1]) if after else None
