"""A network's leading layers, tile after tile on one device: exact, with the activations of one tile alive at a time.

Only the feature maps between groups are kept. In the backward pass every tile of a group's output runs forward again,
and the gradients of the group's input and weights are summed. Tiles of the output do not overlap, so nothing counts
twice; halos of the input add up by themselves. A BatchNorm layer that normalises by its batch needs the whole feature
map before it, so a group ends there too.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from snugfit._chain.subgraph import computed_nodes, subgraph_module
from snugfit.memory.mapped import MappedScratch
from snugfit.tiling.geometry import balanced
from snugfit.tiling.layers import Tiling, require_grid
from snugfit.tiling.operators import TileablePrefix, normalises_by_batch
from snugfit.tiling.profile import Profile, every_cut
from snugfit.tiling.segments import Segment
from snugfit.tiling.statistics import mean_and_variance, update_running_statistics
from snugfit.tiling.tileable_prefix import find_tileable_prefix


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
    ) -> None:
        self.prefix = find_tileable_prefix(module, input_shape)
        size = self.prefix.layers.maps[-1]
        require_grid(grid, size)
        self.tiling = Tiling.of(self.prefix.layers, balanced(size.height, grid[0]), balanced(size.width, grid[1]))
        self.profile = profile or every_cut(self.prefix.layers.cuts)
        self.rest = rest_of(module, self.prefix)
        self.scratch = scratch
        self._segments: dict[frozenset[int], list[Segment]] = {}

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
        if by_batch not in self._segments:
            self._segments[by_batch] = [
                Segment(self.prefix, self.tiling, start, stop, start in by_batch, self.scratch)
                for start, stop in pairwise(sorted({*self.profile.cuts, *by_batch}))
            ]
        return self._segments[by_batch]

    @torch.no_grad()
    def _statistics(self, segment: Segment, maps: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance (C,) of the feature map (B, C, H, W) that a norm reads.

        Segments pass gradients back through them.
        """
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
