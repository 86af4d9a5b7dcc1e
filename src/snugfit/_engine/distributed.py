"""Runs over several processes: connecting them, and serving the gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit._core.workload import Workload
from snugfit._engine.process import baseline, choose_device
from snugfit._training.launch import Commands, Heartbeat, World, join, naming_lost, world
from snugfit.errors import SnugfitError
from snugfit.memory import MemoryLimit, make_meter


@dataclass(frozen=True)
class LaunchMember:
    """This process among others.

    Attributes:
        here: which one it is.
        commands: from the gateway to the others.
    """

    here: World
    commands: Commands


_joined: list[LaunchMember] = []
T = TypeVar("T")


@contextlib.contextmanager
def connected(device: str | None = None) -> Iterator[LaunchMember | None]:
    """Connect with the other processes of the launch, until the context ends; None if this process is alone.

    Raises:
        WorkerLostError: a process did not join, died, was stopped or disconnected.
    """
    here = world()
    if here is None or here.size == 1:
        yield None
        return
    where = str(choose_device(device))
    with (
        join(here, device=where),
        Heartbeat(here) as heartbeat,
        naming_lost(heartbeat),
        Commands(heartbeat) as commands,
    ):
        _joined[:] = [LaunchMember(here, commands)]
        try:
            yield _joined[0]
        finally:
            _joined.clear()


def commands_of_run() -> Commands | None:
    """The connection to the other processes; None if there are none."""
    return _joined[0].commands if _joined else None


def dismissing_at_failure(member: LaunchMember | None, work: Callable[[], T]) -> T:
    """Do the gateway's work; if it fails, the others are dismissed."""
    from snugfit.strategies.tiled.runner import cancel_workers

    try:
        return work()
    except SnugfitError:
        if member is not None:
            cancel_workers(member.commands)
        raise


def serve(member: LaunchMember, threads: int | None = None, model: nn.Module | None = None) -> dict[str, Any]:
    """Compute tiles for the gateway until it ends; on every process but the gateway.

    Args:
        member: this process.
        threads: of this process.
        model: the module, if the gateway trains one that was passed from Python.

    Returns:
        ``rank`` and ``peak_bytes`` of this process, above its baseline.
    """
    from snugfit.strategies.tiled.runner import gather_peaks, receive_task, serve_gateway
    from snugfit.tiling.transport import ProcessTransport

    resting, device = baseline(threads), choose_device(None)
    task = receive_task(member.commands)
    if task is None:
        return {"rank": member.here.rank, "peak_bytes": 0}
    workload, plan, memory_bytes = task
    meter = make_meter(resting, device)
    peaks = [0]

    with MemoryLimit(memory_bytes, resting, device) as limit:

        def tick() -> None:
            peaks[0] = max(peaks[0], meter.mark())
            limit.refresh()

        serve_gateway(_chain(workload, model), workload, plan, ProcessTransport(), member.commands, device, tick)
    gather_peaks(float(peaks[0]), ProcessTransport())
    return {"rank": member.here.rank, "peak_bytes": peaks[0]}


def _chain(workload: Workload, model: nn.Module | None) -> Chain:
    """The network of a workload, on the meta device."""
    shape = workload.input_shape
    if model is None:
        with torch.device("meta"):
            model = models.build(workload.model, workload.classes, shape[-1], shape[0])
    return Chain.from_module(model, shape, workload.model)
