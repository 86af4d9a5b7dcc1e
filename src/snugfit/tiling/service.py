"""The gateway gives orders, the other processes follow them: so that one process alone runs the training loop.

:class:`GatewayForward` stands where the network's forward pass would be called, and the gradients that it returns are
sums over all tiles; whoever calls it need not know of other processes. :func:`serve` is what the others do meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from snugfit.errors import ModelError
from snugfit.tiling.distributed import TiledNetwork, schedule_of
from snugfit.tiling.geometry import weighted
from snugfit.tiling.layers import Layers, Tiling
from snugfit.tiling.messages import Line, receive_tensors, send_tensors
from snugfit.tiling.operators import Stem
from snugfit.tiling.profile import named_profile
from snugfit.tiling.reductions import buckets, in_one
from snugfit.tiling.routes import cells_of
from snugfit.tiling.sequential import rest_of
from snugfit.tiling.stem import stem_of
from snugfit.tiling.transport import Transport

Shares = tuple[tuple[float, ...], tuple[float, ...]]
"""Weights of a grid's rows and of its columns."""
WeightUpdate = Literal["all-reduce", "gateway"]
"""Where weights are updated: by every process, from sums that all have; or by the gateway, which sends them out."""
NOTHING, WEIGHTS, ALL = range(3)


@dataclass(frozen=True)
class TilePlan:
    """How a network is cut.

    Attributes:
        grid: tiles down and across.
        replicas: shares of the batch, each of which has tiles of its own.
        forward, backward: grouping profiles, as they print; or ``one`` or ``every``.
        recompute: whether the backward pass computes anew the maps that it reads.
        update: where weights are updated.
        shares: of rows and of columns, in proportion; equal ones by default.
    """

    grid: tuple[int, int]
    replicas: int = 1
    forward: str = "every"
    backward: str = "every"
    recompute: bool = False
    update: WeightUpdate = "all-reduce"
    shares: Shares | None = None

    @property
    def cells(self) -> int:
        """Tiles of all replicas."""
        return self.grid[0] * self.grid[1] * self.replicas


@dataclass(frozen=True)
class Order:
    """What the gateway wants the others to do.

    Attributes:
        kind: end; a training step; a forward pass in evaluation mode; or take weights and optimizer state.
        images: of the batch.
        update: whether weights are updated after the step.
        fresh: what the gateway sends first: nothing, weights, or weights and the state of optimizers.
        lr_factor: share of the peak learning rate.
    """

    kind: Literal["stop", "step", "evaluate"]
    images: int = 0
    update: bool = True
    fresh: int = NOTHING
    lr_factor: float = 1.0

    def __str__(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read an order as it prints; one that says nothing means the end."""
        return cls(**(json.loads(text) or {"kind": "stop"}))


class Tiles:
    """A network's tiled part on one process, for training and for evaluation.

    Args:
        module: a traced network, such as ``Chain.to_module()``; only the layers that are tiled need have weights.
        input_shape: channels, height, width of one image.
        plan: how it is cut.
        transport: to the other processes.

    Raises:
        ModelError: it does not begin with layers that can be tiled, or its maps are too small for the grid.
    """

    def __init__(
        self, module: fx.GraphModule, input_shape: tuple[int, ...], plan: TilePlan, transport: Transport
    ) -> None:
        self.module, self.plan, self.transport = module, plan, transport
        self.training = self._network(stem_of(module.train(), input_shape), backward=True)
        self.evaluation = self._network(stem_of(module.eval(), input_shape), backward=False)
        self.stem = self.training.stem

    def _network(self, stem: Stem, *, backward: bool) -> TiledNetwork:
        plan, last, cuts = self.plan, stem.layers.maps[-1], stem.layers.cuts
        require_grid(plan.grid, last.height, last.width)
        tiling = tiling_of(stem.layers, plan.grid, plan.shares)
        back = named_profile(plan.backward, cuts) if backward else None
        schedule = schedule_of(stem, tiling, named_profile(plan.forward, cuts), back, recompute=plan.recompute)
        busy = min(self.transport.size, plan.cells)
        return TiledNetwork(stem, schedule, cells_of(tiling.tiles, plan.replicas, busy), self.transport)

    def tensors(self) -> list[Tensor]:
        """Weights and buffers of the tiled layers."""
        layers = [each.module for each in self.stem.operators if each.module is not None]
        found = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        return list(dict.fromkeys(found))

    def share_weights(self) -> None:
        """Give all processes the gateway's weights and buffers."""
        for some in buckets([each.detach() for each in self.tensors()]):
            with in_one(some) as flat:
                self.transport.from_gateway(flat)


def tiling_of(layers: Layers, grid: tuple[int, int], shares: Shares | None = None) -> Tiling:
    """Tiles of a grid, all alike or in proportion to weights.

    Args:
        layers: the network.
        grid: tiles down and across.
        shares: weights of rows and of columns.
    """
    last, (rows, columns) = layers.maps[-1], shares or ((1.0,) * grid[0], (1.0,) * grid[1])
    return Tiling.of(layers, weighted(last.height, rows), weighted(last.width, columns))


def require_grid(grid: tuple[int, int], height: int, width: int) -> None:
    """Check that every tile has something of the last map.

    Raises:
        ModelError: the map has fewer rows or columns than the grid.
    """
    if min(grid) < 1 or grid[0] > height or grid[1] > width:
        raise ModelError(f"a map of {height}x{width} cannot be cut into {grid[0]}x{grid[1]} tiles: use a smaller grid.")


class GatewayForward:
    """The forward pass of a network over processes, as the gateway calls it: images (B, C, H, W) to logits.

    Args:
        tiles: the tiled part on this process.
        line: to the others.
        state: the state of the optimizers of tiled layers, by names that the others know.

    Attributes:
        update: whether the next backward pass ends a step: then gradients are summed over processes and returned.
        lr_factor: share of the peak learning rate that the others update at.
    """

    def __init__(self, tiles: Tiles, line: Line, state: Callable[[], dict[str, Tensor]] = dict) -> None:
        self.tiles, self.rest, self._line, self._state = tiles, rest_of(tiles.module, tiles.stem), line, state
        self.update, self.lr_factor = True, 1.0
        self._fresh = ALL
        self._partial: list[Tensor | None] = []

    def __call__(self, images: Tensor) -> Tensor:
        """Images to the network's output."""
        if torch.is_grad_enabled():
            parameters = self.tiles.training.parameters()
            value = _OverTiles.apply(self, images, *parameters)  # type: ignore[no-untyped-call]
        else:
            self._order("evaluate", len(images))
            value = self.tiles.evaluation.forward(images, len(images))
        output: Tensor = value if self.rest is None else self.rest(value)
        return output

    def _order(self, kind: Literal["step", "evaluate"], images: int) -> None:
        tiles = self.tiles
        self._line.give(str(Order(kind, images, self.update, self._fresh, self.lr_factor)))
        if self._fresh != NOTHING:
            tiles.share_weights()
        if self._fresh == ALL:
            send_tensors(self._state(), tiles.transport)
        changed = tiles.plan.update == "gateway" and kind == "step" and self.update
        self._fresh = WEIGHTS if changed else NOTHING

    def begin(self, images: Tensor) -> Tensor:
        """The forward pass of a step; the last map."""
        self._order("step", len(images))
        found = self.tiles.training.forward(images, len(images))
        assert found is not None
        return found

    def end(self, gradient: Tensor) -> list[Tensor | None]:
        """The backward pass of a step; gradients of the parameters, where it is the last one before an update."""
        parameters = self.tiles.training.parameters()
        before = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, self._partial or [None] * len(parameters), strict=True):
            parameter.grad = grad
        self.tiles.training.backward(gradient)
        if self.update:
            sum_gradients(self.tiles)
        found = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        self._partial = [] if self.update else found
        return found if self.update else [None] * len(parameters)


class _OverTiles(torch.autograd.Function):
    """The tiled part of a step; arguments are the images and all parameters that train."""

    @staticmethod
    def forward(ctx: Any, service: GatewayForward, images: Tensor, *parameters: Tensor) -> Tensor:
        ctx.service = service
        return service.begin(images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.service.end(gradient)


def sum_gradients(tiles: Tiles) -> None:
    """Add up gradients over processes; where weights are updated by all, all have the sums."""
    if tiles.plan.update == "all-reduce":
        tiles.training.sum_gradients()
        return
    for some in buckets(tiles.training.gradients()):
        with in_one(some) as flat:
            tiles.transport.sum_at_gateway(flat)


@dataclass(frozen=True)
class Follower:
    """What a process does with its weights.

    Attributes:
        update: updates them from their gradients, at a share of the peak learning rate.
        load: takes up the state of optimizers, by name; there may be none.
        tick: called after every order.
    """

    update: Callable[[float], None]
    load: Callable[[dict[str, Tensor]], None]
    tick: Callable[[], None]


def serve(tiles: Tiles, line: Line, follower: Follower) -> None:
    """Follow the gateway's orders until it tells to end.

    Args:
        tiles: the tiled part on this process.
        line: from the gateway.
        follower: what is done with its weights.
    """
    while (order := Order.parse(line.take())).kind != "stop":
        if order.fresh != NOTHING:
            tiles.share_weights()
        if order.fresh == ALL:
            follower.load(receive_tensors(tiles.transport))
        if order.kind == "evaluate":
            tiles.module.eval()
            tiles.evaluation.forward(None, order.images)
        else:
            _step(tiles, order, follower.update)
        follower.tick()


def _step(tiles: Tiles, order: Order, update: Callable[[float], None]) -> None:
    tiles.module.train()
    tiles.training.forward(None, order.images)
    tiles.training.backward(None)
    if not order.update:
        return
    sum_gradients(tiles)
    if tiles.plan.update == "all-reduce":
        update(order.lr_factor)
    for parameter in tiles.training.parameters():
        parameter.grad = None
