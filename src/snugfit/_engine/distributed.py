"""Runs over several processes: connecting them, and the work of all but the gateway."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import torch

from snugfit._chain import Chain
from snugfit._core.registry import config_of
from snugfit._core.serial import from_data
from snugfit._core.workload import Workload
from snugfit._engine.loading import build_on_meta
from snugfit._engine.process import baseline, choose_device
from snugfit._training.launch import Commands, Heartbeat, gateway_device, join, naming_lost, world
from snugfit.errors import SnugfitError
from snugfit.memory import MemoryLimit, make_meter
from snugfit.memory.process import library_import

_NO_TASK = "{}"
_connected: list[Commands] = []


@contextlib.contextmanager
def connected(device: str | None = None) -> Iterator[Commands | None]:
    """Connect with the other processes of the launch, until the context ends; None if this process is alone.

    The gateway's device counts for all. If it fails inside the context, the others are dismissed. Raises
    WorkerLostError if a process is lost.
    """
    here = world()
    if here is None or here.size == 1:
        yield None
        return
    where = choose_device(device)
    with (
        join(here, device=device or where.type),
        Heartbeat(here) as heartbeat,
        naming_lost(heartbeat),
        Commands(heartbeat) as commands,
    ):
        _connected[:] = [commands]
        try:
            yield commands
        except SnugfitError:
            if here.is_gateway:
                commands.send(_NO_TASK)
            raise
        finally:
            _connected.clear()


def commands_of_run() -> Commands | None:
    """The connection to the other processes; None if there are none."""
    return _connected[0] if _connected else None


def serve(commands: Commands) -> dict[str, Any]:
    """Work for the gateway until it ends, as its strategy says; returns rank and peak bytes of this process."""
    here = commands.heartbeat.here
    rank, device = here.rank, choose_device(gateway_device(here))
    resting = baseline(None, device)
    task = json.loads(commands.receive())
    if not task:
        return {"rank": rank, "peak_bytes": 0}
    with library_import():
        from snugfit.tiling.transport import ProcessTransport

        work = resolve_name(config_of(task["strategy"]).worker)
    workload = from_data(Workload, task["workload"])
    meter = make_meter(resting, device)
    peaks = [0]

    with MemoryLimit(task["memory_bytes"], resting, device) as limit:

        def tick() -> None:
            peaks[0] = max(peaks[0], meter.mark())
            limit.refresh()

        network = build_on_meta(workload.model, workload.classes, workload.input_shape)
        chain = Chain.from_module(network, workload.input_shape, workload.model)
        work(chain, workload, task["plan"], commands, device, tick)
    ProcessTransport().gather(torch.tensor([float(peaks[0])], dtype=torch.float64)).wait()
    return {"rank": rank, "peak_bytes": peaks[0]}
