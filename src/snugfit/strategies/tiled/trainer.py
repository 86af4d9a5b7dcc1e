"""Trainers of networks whose leading layers are tiled."""

from __future__ import annotations

from functools import partial

from torch import Tensor, fx, nn

from snugfit._chain import Chain
from snugfit._core.workload import Workload
from snugfit._training.network import Forward, NetworkTrainer
from snugfit._training.step import StepResult
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
    """Trains a network tile after tile.

    Args:
        chain: its chain.
        module: its units as one traced module.
        workload: optimizer and precision.
        micro_batches: batches accumulated to one step.
        plan: grid and groups.
        scratch: where whole maps lie; in memory by default.
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
        """The tiled forward pass."""
        self.module.eval()
        return self.forward

    def tiled_norms(self) -> dict[nn.Module, int]:
        """The norms in tiles."""
        return self.forward.prefix.norms()


class GatewayTrainer(NetworkTrainer):
    """Trains a network whose tiles are with other processes too; these update their own weights, or are sent them.

    Where the rest is replicated, the others train it as this process does: its batches, weights and draws are the same.

    Args:
        chain: its chain.
        module: its units as one traced module.
        workload: optimizer and precision.
        micro_batches: batches accumulated to one step.
        plan: grid, groups, where weights are updated, and who computes the rest.
        transport: to the other processes.
        line: to the other processes, for orders.
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
        """The state of the optimizers that the others have too."""
        return {key: value for key, value in self.optimizers.state().items() if key.rpartition("/")[0] in names}

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """One forward and backward over all processes."""
        self.forward.update, self.forward.share, self.forward.targets = update, share, labels
        return super().step(inputs, labels, share, update)

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate, that of the others too."""
        super().set_lr_factor(factor)
        self.forward.lr_factor = factor

    def evaluating(self) -> Forward:
        """The forward pass over all processes."""
        self.module.eval()
        return self.forward

    def tiled_norms(self) -> dict[nn.Module, int]:
        """The norms in tiles."""
        return self.forward.tiles.prefix.norms()


def on_one_device(plan: TilePlan, scratch: MappedScratch) -> MakeTrainer:
    """What trains a network tile after tile, with whole maps in scratch files where the plan says so."""
    where = scratch if plan.scratch else None

    def make(chain: Chain, module: nn.Module, workload: Workload, micro_batches: int) -> NetworkTrainer:
        return OneDeviceTrainer(chain, module, workload, micro_batches, plan, where)

    return make


def over_processes(plan: TilePlan, transport: Transport, channel: CommandChannel) -> MakeTrainer:
    """What trains a network on the gateway."""

    def make(chain: Chain, module: nn.Module, workload: Workload, micro_batches: int) -> NetworkTrainer:
        return GatewayTrainer(chain, module, workload, micro_batches, plan, transport, channel)

    return make
