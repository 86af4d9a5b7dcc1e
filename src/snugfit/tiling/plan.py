"""How a network is cut into tiles over processes, and the tiled part of it on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._core.options import Rest, WeightUpdate
from snugfit.tiling.distributed import TiledNetwork
from snugfit.tiling.exchange import cells_of
from snugfit.tiling.grouping import Profile, named_profile
from snugfit.tiling.layers import Shares, Tiling, require_grid, tiling_of
from snugfit.tiling.operators import TileablePrefix
from snugfit.tiling.schedule import BackwardRules, Schedule
from snugfit.tiling.step_cost import GATEWAY
from snugfit.tiling.tileable_prefix import find_tileable_prefix
from snugfit.tiling.transport import Transport, buckets, flattened


def schedule_of(
    prefix: TileablePrefix,
    tiling: Tiling,
    forward: Profile,
    backward: Profile | None,
    *,
    recompute: bool = False,
    image: bool = False,
) -> Schedule:
    """Schedule of the tiles in a step, with layers in the mode and with the frozen parameters of the step.

    Args:
        prefix: the layers.
        tiling: their tiles.
        forward, backward: grouping profiles; without the latter there is no backward pass.
        recompute: whether the backward pass recomputes the feature maps that it reads.
        image: whether the gradient of the images is needed.
    """
    if backward is None:
        return Schedule(tiling, forward, forward, None).merged()
    adjoints = [each.adjoint for each in prefix.operators]
    network = BackwardRules.of(
        prefix.layers,
        [each.has_trainable_weights() for each in adjoints],
        [each.reads for each in adjoints],
        image=image,
    )
    return Schedule(tiling, forward, backward, network, recompute).merged()


@dataclass(frozen=True)
class TilePlan:
    """How a network is cut.

    Attributes:
        grid: tiles down and across.
        replicas: shares of the batch, each with tiles of its own.
        forward, backward: grouping profiles as text; or ``one`` or ``every``.
        recompute: whether the backward pass recomputes the feature maps that it reads.
        update: where weights of tiled layers are updated: on every process, from sums that all have; or on the gateway,
            which sends them out.
        rest: who computes the layers behind the tiled ones and updates their weights: the gateway, or every process.
        shares: relative sizes of rows and of columns; equal by default.
        scratch: bytes per image that feature maps take in memory-mapped files, on one device; 0 keeps them in memory.
    """

    grid: tuple[int, int]
    replicas: int = 1
    forward: str = "every"
    backward: str = "every"
    recompute: bool = False
    update: WeightUpdate = "all-reduce"
    shares: Shares | None = None
    rest: Rest = "gateway"
    scratch: int = 0

    @property
    def cells(self) -> int:
        """Number of tiles in all replicas."""
        return self.grid[0] * self.grid[1] * self.replicas


class Tiles:
    """A network's tiled part on one process, for training and for evaluation.

    Args:
        module: a traced network, such as ``Chain.to_module()``; on a process without the rest, only the tiled layers
            need weights.
        input_shape: channels, height, width of one image.
        plan: how it is cut.
        transport: to the other processes.

    Raises:
        ModelError: it does not begin with layers that can be tiled, or its feature maps are too small for the grid.
    """

    def __init__(
        self, module: fx.GraphModule, input_shape: tuple[int, ...], plan: TilePlan, transport: Transport
    ) -> None:
        self.module, self.plan, self.transport = module, plan, transport
        self.training = self._network(find_tileable_prefix(module.train(), input_shape), backward=True)
        self.evaluation = self._network(find_tileable_prefix(module.eval(), input_shape), backward=False)
        self.prefix = self.training.prefix

    def _network(self, prefix: TileablePrefix, *, backward: bool) -> TiledNetwork:
        plan, last, cuts = self.plan, prefix.layers.maps[-1], prefix.layers.cuts
        require_grid(plan.grid, last)
        tiling = tiling_of(prefix.layers, plan.grid, plan.shares)
        back = named_profile(plan.backward, cuts) if backward else None
        schedule = schedule_of(prefix, tiling, named_profile(plan.forward, cuts), back, recompute=plan.recompute)
        busy = min(self.transport.size, plan.cells)
        cells, rest = cells_of(tiling.tiles, plan.replicas, busy), plan.rest if backward else "gateway"
        return TiledNetwork(prefix, schedule, cells, self.transport, rest)

    @property
    def updates(self) -> bool:
        """Whether this process updates the weights of tiled layers."""
        return self.plan.update == "all-reduce" or self.transport.rank == GATEWAY

    def updated_by_all(self) -> dict[str, nn.Parameter]:
        """The parameters that every process updates, by name in the network."""
        tiled = {id(parameter) for parameter in self.training.parameters()}
        everywhere = {True: self.plan.update == "all-reduce", False: self.plan.rest == "replicated"}
        return {name: each for name, each in self.module.named_parameters() if everywhere[id(each) in tiled]}

    def tensors(self, *, everything: bool = False) -> list[Tensor]:
        """Weights and buffers, in their shapes, of the tiled layers, or of all layers that other processes have."""
        layers: list[nn.Module] = [each.module for each in self.prefix.operators if each.module is not None]
        if everything and self.plan.rest == "replicated":
            layers = [self.module]
        found = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        return list(dict.fromkeys(found))

    def share_weights(self, *, everything: bool) -> None:
        """Send all processes the gateway's weights and buffers, of tiled layers or of all that they have."""
        self.share(self.tensors(everything=everything))

    def statistics(self) -> list[Tensor]:
        """Running means and variances, (C,), and batch counts, (), of norms that other processes have too."""
        norms = [each for each in self.module.modules() if isinstance(each, _BatchNorm)]
        shared = norms if self.plan.rest == "replicated" else self.prefix.norms()
        return [tensor for norm in shared for tensor in norm.buffers()]

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Send all processes the gateway's values of these tensors, of any shapes; integers apart, never rounded."""
        found = [each.detach() for each in tensors]
        whole = [each for each in found if not each.is_floating_point()]
        for some in [*buckets([each for each in found if each.is_floating_point()]), *buckets(whole)]:
            with flattened(some) as flat:
                self.transport.broadcast(flat)

    def sum_gradients(self) -> None:
        """Add up gradients over processes; all have the sums if all update weights."""
        if self.plan.update == "all-reduce":
            self.training.sum_gradients()
            return
        for some in buckets(self.training.gradients()):
            with flattened(some) as flat:
                self.transport.reduce_at_gateway(flat)
