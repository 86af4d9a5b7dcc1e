"""Trainers of networks whose leading layers run in tiles."""

from __future__ import annotations

from torch import fx, nn

from snugfit._chain import Chain
from snugfit._core.workload import Workload
from snugfit._training.network import Forward, NetworkTrainer
from snugfit.memory.scratch import MappedScratch
from snugfit.tiling.grouping import named_profile
from snugfit.tiling.operators import TileablePrefix
from snugfit.tiling.sequential import TiledForward
from snugfit.tiling.tileable_prefix import find_tileable_prefix


class TiledTrainer(NetworkTrainer):
    """Train a network whose leading layers, the prefix, are tiled."""

    prefix: TileablePrefix

    def evaluating(self) -> Forward:
        """The tiled forward pass, from images (B, C, H, W) to outputs (B, ...)."""
        self.module.eval()
        return self.forward

    def tiled_norms(self) -> dict[nn.Module, int]:
        """The norms of the tiled layers."""
        return self.prefix.norms()


class OneDeviceTrainer(TiledTrainer):
    """Train a network, traced as one module, tile by tile, on one device.

    Args:
        chain, module, workload, micro_batches: as for any trainer.
        grid: tiles down and across.
        groups: groups of layers, as text like ``0-4 | 4-11``, or one, or every.
        scratch: storage for whole feature maps; they lie in memory without it.
    """

    forward: TiledForward

    def __init__(
        self,
        chain: Chain,
        module: nn.Module,
        workload: Workload,
        micro_batches: int,
        grid: tuple[int, int],
        groups: str,
        scratch: MappedScratch | None = None,
    ) -> None:
        super().__init__(module, module, workload, micro_batches, chain.loss, chain.optimizer)
        assert isinstance(module, fx.GraphModule)
        cuts = find_tileable_prefix(module.train(), chain.input_shape).layers.cuts
        self.forward = TiledForward(module, chain.input_shape, grid, named_profile(groups, cuts), scratch)
        self.prefix = self.forward.prefix
