"""Training in tiles, on one device or over processes: trainers, the gateway's messages, and the work of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from snugfit._chain import Chain
from snugfit._core.record import Record
from snugfit._core.serial import to_data
from snugfit._core.workload import Workload
from snugfit._training.network import NetworkTrainer
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit._training.task import StepResult
from snugfit._upstream import to_channels_last
from snugfit.errors import UsageError
from snugfit.strategies.full_network import fit_network
from snugfit.strategies.micro_batch import MicroBatching
from snugfit.strategies.tiled_training import TiledTrainer
from snugfit.tiling.coordinator import (
    Command,
    DistributedForward,
    GatewayForward,
    Worker,
    replicated_step,
    serve,
    worker_step,
)
from snugfit.tiling.plan import TilePlan, Tiles
from snugfit.tiling.transport import CommandChannel, ProcessTransport, Transport


class GatewayTrainer(TiledTrainer):
    """Train a network, traced as one module, over several processes; the others update their weights or receive them.

    If the rest is replicated, the others train it like this process, with the same batches, weights and random draws.
    """

    floor_in_one_pass = False
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
        self.prefix = tiles.prefix
        state = partial(self._state_of, set(tiles.updated_by_all()))
        self.forward = GatewayForward(tiles, channel, state, micro_batches)

    def _state_of(self, names: set[str]) -> dict[str, Tensor]:
        """The optimizer state that the other processes have, too, in the shapes of the parameters."""
        return {key: value for key, value in self.optimizers.state().items() if key.rpartition("/")[0] in names}

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """One forward and backward pass over all processes; inputs (B, C, H, W), labels (B,) or targets."""
        self.forward.update, self.forward.share, self.forward.targets = update, share, labels
        return super().step(inputs, labels, share, update)

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Restore a state, in the shapes of the weights; the others receive it with the next command."""
        super().load_state(load)
        self.forward.send_all()

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate of all processes."""
        super().set_lr_factor(factor)
        self.forward.lr_factor = factor


def fit_over_processes(strategy: MicroBatching, chain: Chain, data: TrainingData, run: Run, plan: TilePlan) -> Record:
    """Train on the gateway: send the task to the other processes, train, and stop them."""
    transport, channel = ProcessTransport(), run.commands
    if channel is None:
        raise UsageError("several processes require `snugfit cluster launch`; use one process without it.")
    task = {"strategy": strategy.name, "workload": to_data(run.workload), "plan": asdict(plan)}
    channel.send(json.dumps({**task, "memory_bytes": run.budget.memory_bytes}))
    make = partial(GatewayTrainer, plan=plan, transport=transport, channel=channel)
    record = fit_network(strategy, chain, data, run, make)
    channel.send(str(Command("stop")))
    peaks = gather_peaks(float(record.measured["peak_bytes"]), transport)
    return replace(record, measured={**record.measured, "process_peak_bytes": [int(peak) for peak in peaks]})


def gather_peaks(own: float, transport: Transport) -> list[float]:
    """The measured peaks of all processes, in bytes."""
    return [float(each) for each in transport.gather(torch.tensor([own], dtype=torch.float64)).wait()]


def serve_task(
    chain: Chain,
    workload: Workload,
    plan: dict[str, Any],
    channel: CommandChannel,
    device: torch.device,
    tick: Callable[[], None],
    transport: Transport | None = None,
) -> None:
    """Execute the gateway's commands on another process until it sends ``stop``; call ``tick`` after every command.

    Only layers of the chain that this process computes get memory. ``plan`` is the tile plan as data.
    """
    shares = plan["shares"] and tuple(map(tuple, plan["shares"]))
    cut = TilePlan(**{**plan, "grid": tuple(plan["grid"]), "shares": shares})
    module = cast(fx.GraphModule, chain.to_module())
    tiles = Tiles(module, chain.input_shape, cut, transport or ProcessTransport())
    layers = [each.module for each in tiles.prefix.operators if each.module is not None]
    for each in [module] if cut.rest == "replicated" else layers:
        to_channels_last(each.to_empty(device=device))
    worker = _with_rest if cut.rest == "replicated" else _with_tiles
    serve(tiles, channel, worker(tiles, workload, tick))


def _with_tiles(tiles: Tiles, workload: Workload, tick: Callable[[], None]) -> Worker:
    """A worker that computes tiles, and updates their weights if every process does."""
    optimizers = [ParameterOptimizers({}.items(), workload.optimizer)]

    def load(command: Command, state: dict[str, Tensor]) -> None:
        optimizers[0].release()
        optimizers[0] = ParameterOptimizers(tiles.updated_by_all().items(), workload.optimizer)
        optimizers[0].load_state(state)

    def update(factor: float) -> None:
        optimizers[0].set_lr_factor(factor)
        optimizers[0].step()

    return Worker(lambda command: worker_step(tiles, command, update), load, tick)


def _with_rest(tiles: Tiles, workload: Workload, tick: Callable[[], None]) -> Worker:
    """A worker that computes tiles and all layers after them, in the steps of a trainer like the gateway's."""
    forward = DistributedForward(tiles)
    trainers: list[NetworkTrainer] = []

    def load(command: Command, state: dict[str, Tensor]) -> None:
        for spent in trainers:
            spent.optimizers.release()
        trainers[:] = [NetworkTrainer(tiles.module, forward, workload, command.micro_batches)]
        trainers[0].optimizers.load_state(state)

    def step(command: Command) -> None:
        trainers[0].set_lr_factor(command.lr_factor)
        replicated_step(forward, command, trainers[0].step)

    return Worker(step, load, tick)
