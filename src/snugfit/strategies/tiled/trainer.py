"""Trainers of networks whose leading layers are tiled."""

from __future__ import annotations

from functools import partial

from torch import Tensor, fx, nn

from snugfit._chain import Chain
from snugfit._core.workload import Workload
from snugfit._training.network import Forward, NetworkTrainer
from snugfit._training.task import StepResult
from snugfit.memory.mapped import MappedScratch
from snugfit.strategies.full_network import MakeTrainer
from snugfit.tiling.coordinator import GatewayForward
from snugfit.tiling.messages import CommandChannel
from snugfit.tiling.plan import TilePlan, Tiles
from snugfit.tiling.profile import named_profile
from snugfit.tiling.sequential import TiledForward
from snugfit.tiling.tileable_prefix import find_tileable_prefix
from snugfit.tiling.transport import Transport


class OneDeviceTrainer(NetworkTrainer):
    """Train a network tile by tile.

    Args:
        chain: its chain.
        module: its units as one traced module.
        workload: optimizer and precision.
        micro_batches: batches accumulated to one step.
        plan: grid and groups.
        scratch: storage of whole feature maps; memory by default.
    """

    def __init__(
        self,
        chain: Chain,
        module: nn.Module,
        workload: Workload,
        micro_batches: int,
        plan: TilePlan,
        scratch: MappedScratch | None = None,
    ) -> None:
        super().__init__(module, module, workload, micro_batches)
        assert isinstance(module, fx.GraphModule)
        cuts = find_tileable_prefix(module.train(), chain.input_shape).layers.cuts
        profile = named_profile(plan.forward, cuts)
        self.forward: TiledForward = TiledForward(module, chain.input_shape, plan.grid, profile, scratch)

    def evaluating(self) -> Forward:
        """The tiled forward pass, from images (B, C, H, W) to outputs (B, ...)."""
        self.module.eval()
        return self.forward

    def tiled_norms(self) -> dict[nn.Module, int]:
        """The norms of the tiled layers."""
        return self.forward.prefix.norms()


class GatewayTrainer(NetworkTrainer):
    """Train a network in tiles over several processes; the others update their weights or receive them.

    If the rest is replicated, the others train it like this process, with the same batches, weights and random draws.

    Args:
        chain: its chain.
        module: its units as one traced module.
        workload: optimizer and precision.
        micro_batches: batches accumulated to one step.
        plan: grid, groups, where weights are updated, and which process computes the rest.
        transport: to the other processes.
        channel: commands to the other processes.
    """

    forward: GatewayForward

    def __init__(
        self,
        chain: Chain,
        module: nn.Module,
        workload: Workload,
        micro_batches: int,
        plan: TilePlan,
        transport: Transport,
        channel: CommandChannel,
    ) -> None:
        super().__init__(module, module, workload, micro_batches)
        assert isinstance(module, fx.GraphModule)
        tiles = Tiles(module, chain.input_shape, plan, transport)
        state = partial(self._state_of, set(tiles.updated_by_all()))
        self.forward = GatewayForward(tiles, channel, state, micro_batches)

    def _state_of(self, names: set[str]) -> dict[str, Tensor]:
        """The optimizer state that the other processes have, too, in the shapes of the parameters."""
        return {key: value for key, value in self.optimizers.state().items() if key.rpartition("/")[0] in names}

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """One forward and backward pass over all processes; inputs (B, C, H, W), labels (B,) or targets."""
        self.forward.update, self.forward.share, self.forward.targets = update, share, labels
        return super().step(inputs, labels, share, update)

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate of all processes."""
        super().set_lr_factor(factor)
        self.forward.lr_factor = factor

    def evaluating(self) -> Forward:
        """The forward pass over all processes, from images (B, C, H, W) to outputs (B, ...)."""
        self.module.eval()
        return self.forward

    def tiled_norms(self) -> dict[nn.Module, int]:
        """The norms of the tiled layers."""
        return self.forward.tiles.prefix.norms()


def one_device_trainer(plan: TilePlan, scratch: MappedScratch) -> MakeTrainer:
    """Factory of trainers on one device, with scratch files if the plan has them."""
    storage = scratch if plan.scratch else None

    def make(chain: Chain, module: nn.Module, workload: Workload, micro_batches: int) -> NetworkTrainer:
        return OneDeviceTrainer(chain, module, workload, micro_batches, plan, storage)

    return make


def gateway_trainer(plan: TilePlan, transport: Transport, channel: CommandChannel) -> MakeTrainer:
    """Factory of trainers on the gateway."""

    def make(chain: Chain, module: nn.Module, workload: Workload, micro_batches: int) -> NetworkTrainer:
        return GatewayTrainer(chain, module, workload, micro_batches, plan, transport, channel)

    return make
