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
from snugfit.errors import UsageError
from snugfit.strategies.full_network import fit_whole
from snugfit.strategies.micro_batch import MicroBatching
from snugfit.strategies.tiled.trainer import over_processes
from snugfit.tiling.coordinator import Follower, Order, OverTiles, follow_step, follow_whole_step, serve
from snugfit.tiling.messages import Line
from snugfit.tiling.plan import TilePlan, Tiles
from snugfit.tiling.transport import Processes, Transport


def fit_over_processes(strategy: MicroBatching, chain: Chain, data: TrainingData, run: Run, plan: TilePlan) -> Record:
    """Train with the others' help, who are told what to do first, and to end last."""
    transport, line = Processes(), run.commands
    if line is None:
        raise UsageError("several processes take `snugfit cluster launch`; without it, start one.")
    said = {"workload": to_data(run.workload), "plan": asdict(plan), "memory_bytes": run.budget.memory_bytes}
    line.give(json.dumps(said))
    record = fit_whole(strategy, chain, data, run, over_processes(plan, transport, line))
    line.give(str(Order("stop")))
    peaks = peaks_of_all(float(record.measured["peak_bytes"]), transport)
    return replace(record, measured={**record.measured, "process_peak_bytes": [int(peak) for peak in peaks]})


def dismiss(line: Line) -> None:
    """Tell the others that nothing will be trained."""
    line.give("{}")


def peaks_of_all(own: float, transport: Transport) -> list[float]:
    """The measured peaks of all processes, in bytes."""
    return [float(each) for each in transport.all_gather(torch.tensor([own], dtype=torch.float64))]


def told(line: Line) -> tuple[Workload, TilePlan, int | None] | None:
    """Wait for what the gateway trains: workload, plan and memory budget in bytes; None where it trains nothing."""
    said = json.loads(line.take())
    if not said:
        return None
    plan, shares = said["plan"], said["plan"]["shares"]
    cut = {**plan, "grid": tuple(plan["grid"]), "shares": shares and tuple(map(tuple, shares))}
    return from_data(Workload, said["workload"]), TilePlan(**cut), said["memory_bytes"]


def follow(
    chain: Chain, workload: Workload, plan: TilePlan, transport: Transport, line: Line,
    device: torch.device, tick: Callable[[], None],
) -> None:  # fmt: skip
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
    layers = [each.module for each in tiles.stem.operators if each.module is not None]
    for each in [module] if plan.rest == "replicated" else layers:
        each.to_empty(device=device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    follower = _with_rest if plan.rest == "replicated" else _with_tiles
    serve(tiles, line, follower(tiles, workload, tick))


def _with_tiles(tiles: Tiles, workload: Workload, tick: Callable[[], None]) -> Follower:
    """Computes tiles, and updates their weights if every process does."""
    optimizers = [ParameterOptimizers({}.items(), workload.optimizer)]

    def load(order: Order, state: dict[str, Tensor]) -> None:
        optimizers[0].release()
        optimizers[0] = ParameterOptimizers(tiles.updated_by_all().items(), workload.optimizer)
        optimizers[0].load_state(state)

    def update(factor: float) -> None:
        optimizers[0].set_lr_factor(factor)
        optimizers[0].step()

    return Follower(lambda order: follow_step(tiles, order, update), load, tick)


def _with_rest(tiles: Tiles, workload: Workload, tick: Callable[[], None]) -> Follower:
    """Computes tiles and all layers behind them, in the steps of a trainer like the gateway's."""
    forward = OverTiles(tiles)
    trainers: list[NetworkTrainer] = []

    def load(order: Order, state: dict[str, Tensor]) -> None:
        for spent in trainers:
            spent.optimizers.release()
        trainers[:] = [NetworkTrainer(tiles.module, forward, workload, order.micro_batches)]
        trainers[0].optimizers.load_state(state)

    def step(order: Order) -> None:
        trainers[0].set_lr_factor(order.lr_factor)
        follow_whole_step(forward, order, trainers[0].step)

    return Follower(step, load, tick)
