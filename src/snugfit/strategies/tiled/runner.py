"""Runs over several processes: what the gateway does beside training, and what the others do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import cast

import torch
from torch import Tensor, fx

from snugfit._chain import Chain
from snugfit._core.record import Record
from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import Workload
from snugfit._training.network import NetworkTrainer
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.run import Run
from snugfit._training.split import TrainingData
from snugfit._upstream import to_channels_last
from snugfit.errors import UsageError
from snugfit.strategies.full_network import fit_network
from snugfit.strategies.micro_batch import MicroBatching
from snugfit.strategies.tiled.trainer import over_processes
from snugfit.tiling.coordinator import Command, OverTiles, Worker, replicated_step, serve, worker_step
from snugfit.tiling.messages import CommandChannel
from snugfit.tiling.plan import TilePlan, Tiles
from snugfit.tiling.transport import ProcessTransport, Transport


def fit_over_processes(strategy: MicroBatching, chain: Chain, data: TrainingData, run: Run, plan: TilePlan) -> Record:
    """Train with the others' help, who are told what to do first, and to end last."""
    transport, channel = ProcessTransport(), run.commands
    if channel is None:
        raise UsageError("several processes take `snugfit cluster launch`; without it, start one.")
    said = {"workload": to_data(run.workload), "plan": asdict(plan), "memory_bytes": run.budget.memory_bytes}
    channel.send(json.dumps(said))
    record = fit_network(strategy, chain, data, run, over_processes(plan, transport, channel))
    channel.send(str(Command("stop")))
    peaks = peaks_of_all(float(record.measured["peak_bytes"]), transport)
    return replace(record, measured={**record.measured, "process_peak_bytes": [int(peak) for peak in peaks]})


def dismiss(channel: CommandChannel) -> None:
    """Tell the others that nothing will be trained."""
    channel.send("{}")


def peaks_of_all(own: float, transport: Transport) -> list[float]:
    """The measured peaks of all processes, in bytes."""
    return [float(each) for each in transport.all_gather(torch.tensor([own], dtype=torch.float64))]


def told(channel: CommandChannel) -> tuple[Workload, TilePlan, int | None] | None:
    """Wait for what the gateway trains: workload, plan and memory budget in bytes; None where it trains nothing."""
    said = json.loads(channel.receive())
    if not said:
        return None
    plan, shares = said["plan"], said["plan"]["shares"]
    cut = {**plan, "grid": tuple(plan["grid"]), "shares": shares and tuple(map(tuple, shares))}
    return from_data(Workload, said["workload"]), TilePlan(**cut), said["memory_bytes"]


def follow(
    chain: Chain,
    workload: Workload,
    plan: TilePlan,
    transport: Transport,
    channel: CommandChannel,
    device: torch.device,
    tick: Callable[[], None],
) -> None:
    """Serve the gateway until it tells to end.

    Args:
        chain: the network, on the meta device; only layers that this process computes are given memory.
        workload: what is trained.
        plan: how it is cut.
        transport: to the other processes.
        line: from the gateway.
        device: where to compute.
        tick: called after every order.
    """
    module = cast(fx.GraphModule, chain.to_module())
    tiles = Tiles(module, chain.input_shape, plan, transport)
    layers = [each.module for each in tiles.prefix.operators if each.module is not None]
    for each in [module] if plan.rest == "replicated" else layers:
        to_channels_last(each.to_empty(device=device))
    worker = _with_rest if plan.rest == "replicated" else _with_tiles
    serve(tiles, channel, worker(tiles, workload, tick))


def _with_tiles(tiles: Tiles, workload: Workload, tick: Callable[[], None]) -> Worker:
    """Computes tiles, and updates their weights if every process does."""
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
    """Computes tiles and all layers behind them, in the steps of a trainer like the gateway's."""
    forward = OverTiles(tiles)
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
