"""The gateway sends commands and the other processes follow them: one process alone runs the training loop.

:class:`GatewayForward` replaces the forward pass of the network. The gradients that it returns are sums over all tiles,
so its caller need not know of other processes. :func:`serve` runs on the other processes: their tiles, and where the
rest of the network is replicated, the gateway's own step through :class:`DistributedForward`.
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

from snugfit.tiling.plan import Tiles
from snugfit.tiling.sequential import rest_of
from snugfit.tiling.step_cost import GATEWAY
from snugfit.tiling.transport import CommandChannel, receive_tensor, receive_tensors, send_tensor, send_tensors

NOTHING, STATISTICS, WEIGHTS, ALL = range(4)


@dataclass(frozen=True)
class TargetSpec:
    """Type and shape of the targets of a batch, for the processes that receive them."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Command:
    """A command of the gateway to the other processes.

    Attributes:
        kind: end; a training step; a forward pass in evaluation mode; or one in which norms track statistics.
        images: in the batch.
        update: whether weights are updated after the step.
        sync: what the gateway sends first: nothing, statistics of norms, all weights, or the state of optimizers too.
        lr_factor: share of the peak learning rate.
        micro_batches: of a step.
        share, seed, targets: for steps with a replicated rest: the batch's share of the step, the random seed of the
            rest, and the form of the targets.
    """

    kind: Literal["stop", "step", "evaluate", "track"]
    images: int = 0
    update: bool = True
    sync: int = NOTHING
    lr_factor: float = 1.0
    micro_batches: int = 1
    share: float = 1.0
    seed: int = 0
    targets: TargetSpec | None = None

    def __str__(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Command:
        """Read a command from its JSON; an empty one means the end."""
        said = json.loads(text) or {"kind": "stop"}
        form = said.get("targets")
        return cls(**{**said, "targets": form and TargetSpec(form["dtype"], tuple(form["shape"]))})


class DistributedForward:
    """The forward pass of a network over processes, on a process that computes the rest.

    The gradients that it returns are sums over all tiles.

    Attributes:
        update: whether the next backward pass ends a step: then gradients are summed over processes and returned.
        seed: random seed of the rest in its next forward pass; None continues torch's generators.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.rest = tiles, rest_of(tiles.module, tiles.prefix)
        self.update, self.seed = True, None if tiles.plan.rest == "gateway" else 0
        self._accumulated: list[Tensor | None] = []

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the network's output from images (B, C, H, W); (B, 0) on all processes but the gateway."""
        parameters = self.tiles.training.parameters()
        return self.apply_rest(_Step.apply(self, images, *parameters))

    def apply_rest(self, value: Tensor) -> Tensor:
        """Compute the network's output from the last feature map, (B, C, H, W)."""
        if self.rest is None:
            return value
        with seeded_rng(self.seed, value.device):
            output: Tensor = self.rest(value)
        return output

    def begin(self, images: Tensor) -> Tensor:
        """The forward pass of a step: images (B, C, H, W) to the last feature map, (B, C, H, W)."""
        here = self.tiles.transport.rank == GATEWAY
        found = self.tiles.training.forward(images if here else None, len(images))
        assert found is not None
        return found

    def end(self, gradient: Tensor) -> list[Tensor | None]:
        """The backward pass of a step, from the gradient (B, C, H, W) of the last feature map.

        Returns gradients of the parameters where this is the last pass before an update here; else None for each.
        """
        parameters = self.tiles.training.parameters()
        before = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, self._accumulated or [None] * len(parameters), strict=True):
            parameter.grad = grad
        self.tiles.training.backward(gradient, sums=self.update and self.tiles.plan.update == "all-reduce")
        if self.update:
            self.tiles.sum_gradients()
        found = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        self._accumulated = [] if self.update else found
        return found if self.update and self.tiles.updates else [None] * len(parameters)


class GatewayForward(DistributedForward):
    """The forward pass as the gateway calls it: it also sends commands to the other processes.

    Attributes:
        state: the state of the optimizers of what the others update, by names that they know.
        lr_factor: share of the peak learning rate at which the others update.
        share: the next batch's share of the step.
        targets: of the next batch, where the others compute the rest.
    """

    def __init__(
        self,
        tiles: Tiles,
        channel: CommandChannel,
        state: Callable[[], dict[str, Tensor]] = dict,
        micro_batches: int = 1,
    ) -> None:
        super().__init__(tiles)
        self._channel, self._state, self._micro_batches = channel, state, micro_batches
        self.lr_factor, self.share, self.targets = 1.0, 1.0, torch.empty(0)
        self._pending_sync, self._statistics_changed = ALL, False

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the network's output from images (B, C, H, W)."""
        if torch.is_grad_enabled():
            return super().__call__(images)
        tiles, count = self.tiles, len(images)
        if any(norm.training for norm in tiles.prefix.norms()):  # the caller may then change the statistics here
            self._send_command(Command("track", count))
            self._statistics_changed = True
            value = tiles.training.track(images, count)
        else:
            if self._statistics_changed:
                self._pending_sync, self._statistics_changed = max(self._pending_sync, STATISTICS), False
            self._send_command(Command("evaluate", count))
            value = tiles.evaluation.forward(images, count)
        assert value is not None
        return self.apply_rest(value)

    def send_all(self) -> None:
        """Send all weights, and the state of optimizers, before the next command."""
        self._pending_sync = ALL

    def _send_command(self, command: Command) -> None:
        tiles = self.tiles
        self._channel.send(str(replace(command, sync=self._pending_sync, micro_batches=self._micro_batches)))
        _synchronise(tiles, self._pending_sync)
        if self._pending_sync == ALL:
            send_tensors(self._state(), tiles.transport)
        changed = tiles.plan.update == "gateway" and command.kind == "step" and command.update
        self._pending_sync = WEIGHTS if changed else NOTHING

    def begin(self, images: Tensor) -> Tensor:
        """The forward pass of a step: images (B, C, H, W) to the last feature map, (B, C, H, W)."""
        command = Command("step", len(images), self.update, lr_factor=self.lr_factor)
        if self.tiles.plan.rest == "gateway":
            self._send_command(command)
        else:
            self.seed = random.getrandbits(62)
            form = TargetSpec(str(self.targets.dtype).removeprefix("torch."), tuple(self.targets.shape))
            self._send_command(replace(command, share=self.share, seed=self.seed, targets=form))
            send_tensor(self.targets, self.tiles.transport)
        return super().begin(images)


class _Step(torch.autograd.Function):
    """The tiled part of a step; arguments are images (B, C, H, W) and all parameters that are trained."""

    @staticmethod
    def forward(ctx: Any, passes: DistributedForward, images: Tensor, *parameters: Tensor) -> Tensor:
        ctx.passes = passes
        return passes.begin(images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.passes.end(gradient)


def _synchronise(tiles: Tiles, sync: int) -> None:
    """Send all processes the gateway's statistics or weights; called by all of them."""
    if sync == STATISTICS:
        tiles.share(tiles.statistics())
    elif sync != NOTHING:
        tiles.share_weights(everything=sync == ALL)


@contextmanager
def seeded_rng(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed and then restore torch's generators; no effect if the seed is None."""
    if seed is None or device.type == "meta":
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Worker:
    """What a process does at the gateway's commands: a training step, and ``tick`` after every command.

    ``load`` starts again from the present weights and the state of optimizers, by name; the latter may be empty.
    """

    step: Callable[[Command], None]
    load: Callable[[Command, dict[str, Tensor]], None]
    tick: Callable[[], None]


def serve(tiles: Tiles, channel: CommandChannel, worker: Worker) -> None:
    """Follow the gateway's commands until the end."""
    while (command := Command.parse(channel.receive())).kind != "stop":
        _synchronise(tiles, command.sync)
        if command.sync == ALL:
            worker.load(command, receive_tensors(tiles.transport))
        if command.kind == "evaluate":
            tiles.module.eval()
            tiles.evaluation.forward(None, command.images)
        elif command.kind == "track":
            tiles.module.train()
            tiles.training.track(None, command.images)
        else:
            worker.step(command)
        worker.tick()


def worker_step(tiles: Tiles, command: Command, update: Callable[[float], None]) -> None:
    """A step of a process that has tiles only; ``update`` takes a share of the peak learning rate."""
    tiles.module.train()
    tiles.training.forward(None, command.images)
    tiles.training.backward(None, sums=command.update and tiles.plan.update == "all-reduce")
    if not command.update:
        return
    tiles.sum_gradients()
    if tiles.updates:
        update(command.lr_factor)
    for parameter in tiles.training.parameters():
        parameter.grad = None


def replicated_step(
    forward: DistributedForward, command: Command, step: Callable[[Tensor, Tensor, float, bool], object]
) -> None:
    """A step of a process that also computes the rest: the gateway's own step, without images.

    ``step`` takes images (B, 0), targets, the batch's share of a step, and whether to update.
    """
    assert command.targets is not None
    form, transport = command.targets, forward.tiles.transport
    targets = receive_tensor(form.shape, getattr(torch, form.dtype), transport).to(forward.tiles.training.like.device)
    forward.update, forward.seed = command.update, command.seed
    step(torch.empty(command.images, 0), targets, command.share, command.update)
