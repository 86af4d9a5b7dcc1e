"""The gateway gives orders, the other processes follow them: so that one process alone runs the training loop.

:class:`GatewayForward` stands where the network's forward pass would be called, and the gradients that it returns are
sums over all tiles; whoever calls it need not know of other processes. :func:`serve` is what the others do meanwhile:
their tiles, and where the rest of the network is replicated, the very step of the gateway through :class:`OverTiles`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from snugfit.tiling.messages import Line, receive_tensor, receive_tensors, send_tensor, send_tensors
from snugfit.tiling.plan import Tiles
from snugfit.tiling.sequential import rest_of
from snugfit.tiling.transport import GATEWAY

NOTHING, STATISTICS, WEIGHTS, ALL = range(4)


@dataclass(frozen=True)
class TargetForm:
    """Type and shape of the targets of a batch, for those who are sent them."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """What the gateway wants the others to do.

    Attributes:
        kind: end; a training step; a forward pass in evaluation mode; or one in which norms track statistics.
        images: of the batch.
        update: whether weights are updated after the step.
        fresh: what the gateway sends first: nothing, statistics of norms, all weights, or the state of optimizers too.
        lr_factor: share of the peak learning rate.
        micro_batches: of a step.
        share, seed, targets: of a step whose rest is replicated: the batch's share of the step, the seed of what the
            rest draws, and what the images show.
    """

    kind: Literal["stop", "step", "evaluate", "track"]
    images: int = 0
    update: bool = True
    fresh: int = NOTHING
    lr_factor: float = 1.0
    micro_batches: int = 1
    share: float = 1.0
    seed: int = 0
    targets: TargetForm | None = None

    def __str__(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read an order as it prints; one that says nothing means the end."""
        said = json.loads(text) or {"kind": "stop"}
        form = said.get("targets")
        return cls(**{**said, "targets": form and TargetForm(form["dtype"], tuple(form["shape"]))})


class OverTiles:
    """The forward pass of a network over processes, on one that computes the rest: images (B, C, H, W) to the output.

    The gradients that it returns are sums over all tiles.

    Args:
        tiles: the tiled part on this process.

    Attributes:
        update: whether the next backward pass ends a step: then gradients are summed over processes and returned.
        seed: of what the rest draws in its next forward pass; from where torch's generators stand, if None.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.rest = tiles, rest_of(tiles.module, tiles.stem)
        self.update, self.seed = True, None if tiles.plan.rest == "gateway" else 0
        self._partial: list[Tensor | None] = []

    def __call__(self, images: Tensor) -> Tensor:
        """Images to the network's output; images (B, 0), without pixels, on all processes but the gateway."""
        parameters = self.tiles.training.parameters()
        return self.behind(_OverTiles.apply(self, images, *parameters))  # type: ignore[no-untyped-call]

    def behind(self, value: Tensor) -> Tensor:
        """The last map to the network's output."""
        if self.rest is None:
            return value
        with drawing_from(self.seed, value.device):
            output: Tensor = self.rest(value)
        return output

    def begin(self, images: Tensor) -> Tensor:
        """The forward pass of a step; the last map."""
        here = self.tiles.transport.rank == GATEWAY
        found = self.tiles.training.forward(images if here else None, len(images))
        assert found is not None
        return found

    def end(self, gradient: Tensor) -> list[Tensor | None]:
        """The backward pass of a step; gradients of the parameters, where it is the last one before an update here."""
        parameters = self.tiles.training.parameters()
        before = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, self._partial or [None] * len(parameters), strict=True):
            parameter.grad = grad
        self.tiles.training.backward(gradient, sums=self.update and self.tiles.plan.update == "all-reduce")
        if self.update:
            self.tiles.sum_gradients()
        found = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        self._partial = [] if self.update else found
        return found if self.update and self.tiles.updates else [None] * len(parameters)


class GatewayForward(OverTiles):
    """The same as the gateway calls it: it tells the others, of whom whoever calls it need not know.

    Args:
        tiles: the tiled part on this process.
        line: to the others.
        state: the state of the optimizers of what the others update, by names that they know.
        micro_batches: of a step.

    Attributes:
        lr_factor: share of the peak learning rate that the others update at.
        share: of the step that the next batch is, and
        targets: what its images show; where the others compute the rest.
    """

    def __init__(
        self, tiles: Tiles, line: Line, state: Callable[[], dict[str, Tensor]] = dict, micro_batches: int = 1
    ) -> None:
        super().__init__(tiles)
        self._line, self._state, self._micro_batches = line, state, micro_batches
        self.lr_factor, self.share, self.targets = 1.0, 1.0, torch.empty(0)
        self._fresh, self._renewed = ALL, False

    def __call__(self, images: Tensor) -> Tensor:
        """Images to the network's output."""
        if torch.is_grad_enabled():
            return super().__call__(images)
        value = self._tracking(images) if self._tracks() else self._evaluating(images)
        assert value is not None
        return self.behind(value)

    def _tracks(self) -> bool:
        """Whether norms in tiles track statistics now."""
        return any(norm.training for norm in self.tiles.stem.norms())

    def _tracking(self, images: Tensor) -> Tensor | None:
        """A forward pass in training mode; whoever calls it may then change the statistics here."""
        self._order(Order("track", len(images)))
        self._renewed = True
        return self.tiles.training.track(images, len(images))

    def _evaluating(self, images: Tensor) -> Tensor | None:
        if self._renewed:
            self._fresh, self._renewed = max(self._fresh, STATISTICS), False
        self._order(Order("evaluate", len(images)))
        return self.tiles.evaluation.forward(images, len(images))

    def _order(self, order: Order) -> None:
        tiles = self.tiles
        self._line.give(str(replace(order, fresh=self._fresh, micro_batches=self._micro_batches)))
        _share(tiles, self._fresh)
        if self._fresh == ALL:
            send_tensors(self._state(), tiles.transport)
        changed = tiles.plan.update == "gateway" and order.kind == "step" and order.update
        self._fresh = WEIGHTS if changed else NOTHING

    def begin(self, images: Tensor) -> Tensor:
        """The forward pass of a step; the last map."""
        order = Order("step", len(images), self.update, lr_factor=self.lr_factor)
        if self.tiles.plan.rest == "gateway":
            self._order(order)
        else:
            self.seed = random.getrandbits(62)
            form = TargetForm(str(self.targets.dtype).removeprefix("torch."), tuple(self.targets.shape))
            self._order(replace(order, share=self.share, seed=self.seed, targets=form))
            send_tensor(self.targets, self.tiles.transport)
        return super().begin(images)


class _OverTiles(torch.autograd.Function):
    """The tiled part of a step; arguments are the images and all parameters that train."""

    @staticmethod
    def forward(ctx: Any, passes: OverTiles, images: Tensor, *parameters: Tensor) -> Tensor:
        ctx.passes = passes
        return passes.begin(images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.passes.end(gradient)


def _share(tiles: Tiles, fresh: int) -> None:
    """Give all processes what the gateway has and they have not; called by all of them."""
    if fresh == STATISTICS:
        tiles.share(tiles.statistics())
    elif fresh != NOTHING:
        tiles.share_weights(everything=fresh == ALL)


@contextmanager
def drawing_from(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw what is random from a seed, and leave torch's generators as they were; as ever, if it is None."""
    if seed is None or device.type == "meta":
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Follower:
    """What a process does at the gateway's orders.

    Attributes:
        step: a training step.
        load: begins anew with the weights that are there and the state of optimizers, by name; there may be none.
        tick: called after every order.
    """

    step: Callable[[Order], None]
    load: Callable[[Order, dict[str, Tensor]], None]
    tick: Callable[[], None]


def serve(tiles: Tiles, line: Line, follower: Follower) -> None:
    """Follow the gateway's orders until it tells to end.

    Args:
        tiles: the tiled part on this process.
        line: from the gateway.
        follower: what is done with its weights.
    """
    while (order := Order.parse(line.take())).kind != "stop":
        _share(tiles, order.fresh)
        if order.fresh == ALL:
            follower.load(order, receive_tensors(tiles.transport))
        if order.kind == "evaluate":
            tiles.module.eval()
            tiles.evaluation.forward(None, order.images)
        elif order.kind == "track":
            tiles.module.train()
            tiles.training.track(None, order.images)
        else:
            follower.step(order)
        follower.tick()


def follow_step(tiles: Tiles, order: Order, update: Callable[[float], None]) -> None:
    """A step of a process that has tiles only.

    Args:
        tiles: the tiled part on this process.
        order: what the gateway wants.
        update: updates weights from their gradients, at a share of the peak learning rate.
    """
    tiles.module.train()
    tiles.training.forward(None, order.images)
    tiles.training.backward(None, sums=order.update and tiles.plan.update == "all-reduce")
    if not order.update:
        return
    tiles.sum_gradients()
    if tiles.updates:
        update(order.lr_factor)
    for parameter in tiles.training.parameters():
        parameter.grad = None


def follow_whole_step(
    forward: OverTiles, order: Order, step: Callable[[Tensor, Tensor, float, bool], object]
) -> None:  # fmt: skip
    """A step of a process that computes the rest too, which is the gateway's own, without images.

    Args:
        forward: the forward pass on this process.
        order: what the gateway wants.
        step: forward and backward of images (B, 0), targets, the share of a step that they are, and whether to update.
    """
    assert order.targets is not None
    form, transport = order.targets, forward.tiles.transport
    targets = receive_tensor(form.shape, getattr(torch, form.dtype), transport).to(forward.tiles.training.like.device)
    forward.update, forward.seed = order.update, order.seed
    step(torch.empty(order.images, 0), targets, order.share, order.update)
