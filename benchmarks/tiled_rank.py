"""One process of a tiled benchmark: joins the others, does the jobs it is given, and rank 0 prints what it measured.

Started by :mod:`benchmarks.tiled_steps`, on this machine or in a network namespace; jobs are JSON on the command line.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.memory.heap import set_allocator
from snugfit.memory.process import read_status, release_memory, reset_high_water
from snugfit.memory.scratch import MappedScratch
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.tiling.distributed import TiledNetwork
from snugfit.tiling.exchange import cells_of
from snugfit.tiling.geometry import balanced
from snugfit.tiling.grouping import named_profile
from snugfit.tiling.layers import Tiling
from snugfit.tiling.plan import schedule_of
from snugfit.tiling.sequential import TiledForward
from snugfit.tiling.tileable_prefix import find_tileable_prefix
from snugfit.tiling.transport import ProcessTransport

MODEL, LAYERS = "yolov2_16", 16
Job = dict[str, Any]


def network(size: int, *, frozen: bool = False) -> fx.GraphModule:
    """YOLOv2's 16 layers in ``channels_last``; in evaluation mode where norms are to be frozen."""
    torch.manual_seed(0)
    chain = Chain.from_module(models.build(MODEL, 20, size, 3), (3, size, size), MODEL)
    module = chain.to_module().train(not frozen)
    module.to(memory_format=torch.channels_last)
    assert isinstance(module, fx.GraphModule)
    return module


def images(size: int, batch: int) -> Tensor:
    """Made-up ones."""
    return torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)


def stock_step(module: nn.Module, given: Tensor) -> Callable[[], None]:
    """A step of the whole network, as anyone would write it."""

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(given).square().mean().backward()

    return step


def tiled_step(
    net: TiledNetwork, given: Tensor | None, batch: int, *, sums: bool = True
) -> Callable[[], dict[str, float]]:
    """A step over processes, with gradients summed; seconds of forward and backward and of what was waited for."""

    def step() -> dict[str, float]:
        net.waited.clear()
        for parameter in net.parameters():
            parameter.grad = None
        started = time.perf_counter()
        made = net.forward(given, batch)
        forward, waited = time.perf_counter(), dict(net.waited)
        if net.schedule.network is None:
            return _told(started, forward, forward, forward, waited, {})
        upper = None
        if made is not None:
            last = made.requires_grad_(True)
            with torch.enable_grad():
                (upper,) = torch.autograd.grad(last.square().mean(), last)
        net.backward(upper, sums=sums)
        if not sums:
            dist.barrier()  # nothing else tells when the others are done
        backward = time.perf_counter()
        later = {key: net.waited[key] - waited.get(key, 0.0) for key in net.waited}
        if sums:
            net.sum_gradients()
        return _told(started, forward, backward, time.perf_counter(), waited, later)

    return step


def _told(
    started: float, forward: float, backward: float, end: float, waited: dict[str, float], later: dict[str, float]
) -> dict[str, float]:  # fmt: skip
    return {
        "seconds": end - started, "forward": forward - started, "backward": backward - forward,
        "update": end - backward, **{f"{key}_forward": value for key, value in waited.items()},
        **{f"{key}_backward": value for key, value in later.items()},
    }  # fmt: skip


def net_of(job: Job) -> TiledNetwork:
    """The tiled part of the network on this process: all of it, for it is convolutions to the end."""
    size = job["size"]
    prefix = find_tileable_prefix(network(size, frozen=job.get("frozen", False)), (3, size, size))
    last, cuts = prefix.layers.maps[-1], prefix.layers.cuts
    tiling = Tiling.of(prefix.layers, balanced(last.height, job["grid"][0]), balanced(last.width, job["grid"][1]))
    forward = named_profile(job["forward"], cuts)
    backward = named_profile(job["backward"], cuts) if job["backward"] else None
    schedule = schedule_of(prefix, tiling, forward, backward, recompute=job["recompute"])
    cells = cells_of(tiling.tiles, 1, dist.get_world_size())
    return TiledNetwork(prefix, schedule, cells, ProcessTransport(), split=job.get("split", ()))


def measure_tiled(job: Job) -> dict[str, Any]:
    """Medians of every part of a step."""
    size, batch = job["size"], job["batch"]
    given = images(size, batch) if dist.get_rank() == 0 else None
    step = tiled_step(net_of(job), given, batch, sums=job.get("sums", True))
    found = []
    for _ in range(job["repeats"] + job.get("warm_up", 1)):
        dist.barrier()
        found.append(step())
    found = found[job.get("warm_up", 1) :]
    return {key: statistics.median(each.get(key, 0.0) for each in found) for key in found[0]}


def measure_memory(job: Job) -> dict[str, Any]:
    """Peak bytes of tensors on every process, those of weights and their gradients apart."""
    size, batch = job["size"], job["batch"]
    net = net_of(job)
    step = tiled_step(net, images(size, batch) if dist.get_rank() == 0 else None, batch)
    step()
    held = nn.ModuleList([each.module for each in net.prefix.operators if each.module is not None])
    weights = sum(each.numel() * each.element_size() for each in (*held.parameters(), *held.buffers()))
    gradients = sum(each.numel() * each.element_size() for each in net.parameters())
    peak = tensor_peak_bytes(step, [held])
    own = torch.tensor([float(peak), float(weights + gradients), float(_resident())], dtype=torch.float64)
    everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return {
        "peak_bytes": [int(each[0]) for each in everyone], "weight_bytes": [int(each[1]) for each in everyone],
        "resident_bytes": [int(each[2]) for each in everyone],
    }  # fmt: skip


def _resident() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def measure_alone(job: Job) -> dict[str, Any]:
    """Seconds of a step on one process, whole or tile after tile, with some threads; and its peak bytes of tensors."""
    if dist.get_rank() != 0:
        return {}
    size, batch = job["size"], job["batch"]
    before = torch.get_num_threads()
    torch.set_num_threads(job.get("threads", 1))
    if job.get("resident"):
        set_allocator()  # as the command line trains
    module, given = network(size, frozen=job.get("frozen", False)), images(size, batch)
    forward: Any = module
    scratch = MappedScratch(Path(tempfile.gettempdir())) if job.get("scratch") else None
    if "grid" in job:
        cuts = find_tileable_prefix(module, (3, size, size)).layers.cuts
        profile = named_profile(job["forward"], cuts)
        forward = TiledForward(module, (3, size, size), tuple(job["grid"]), profile, scratch)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        forward(given).square().mean().backward()

    seconds = _timed(step, job["repeats"])
    found: dict[str, Any] = {"seconds": seconds}
    if job.get("bytes"):
        module.zero_grad(set_to_none=True)
        peak = tensor_peak_bytes(step, [module, given])
        held = sum(each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers()))
        held += sum(each.numel() * each.element_size() for each in module.parameters() if each.requires_grad)
        found |= {"peak_bytes": peak, "weight_bytes": held, "stored_bytes": scratch.bytes if scratch else 0}
    if job.get("resident"):
        module.zero_grad(set_to_none=True)
        found["grown_bytes"] = _grown(step)
    torch.set_num_threads(before)
    return found


def _grown(step: Callable[[], object]) -> int:
    """Most private anonymous memory in a step over that before it; mapped files, as large as before, are left out."""
    release_memory()
    reset_high_water()
    before = read_status()
    step()
    after = read_status()
    return after.high_water - after.file - after.shmem - before.anon


def measure_ddp(job: Job) -> dict[str, Any]:
    """Seconds of a step of DistributedDataParallel: the batch in equal parts, one at least."""
    size, world = job["size"], dist.get_world_size()
    own = len(range(dist.get_rank(), job["batch"], world))
    module = nn.parallel.DistributedDataParallel(copy.deepcopy(network(size)))
    given = images(size, max(own, 1))
    step = stock_step(module, given)
    return {"seconds": _timed(step, job["repeats"], together=True)}


def measure_pipeline(job: Job) -> dict[str, Any]:
    """Seconds of a step of ``torch.distributed.pipelining``: two stages, an image per micro-batch.

    Maps are contiguous here, since it sends no others.
    """
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    size, batch, rank = job["size"], job["batch"], dist.get_rank()
    whole = network(size).to(memory_format=torch.contiguous_format)
    layers = [layer for _, layer in whole.named_modules() if not list(layer.children())]
    cut = job["cut"]
    stage_layers = nn.Sequential(*(layers[:cut] if rank == 0 else layers[cut:]))
    stage = PipelineStage(stage_layers, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, batch, loss_fn=lambda made, wanted: made.square().mean())
    given = images(size, batch).contiguous()

    def step() -> None:
        stage_layers.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(given)
        else:
            schedule.step(target=torch.zeros(batch))

    return {"seconds": _timed(step, job["repeats"], together=True)}


def _timed(step: Callable[[], object], repeats: int, *, together: bool = False) -> float:
    """Median seconds, after one step that does not count."""
    found = []
    for _ in range(repeats + 1):
        if together:
            dist.barrier()
        started = time.perf_counter()
        step()
        if together:
            dist.barrier()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


JOBS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "tiled": measure_tiled,
    "memory": measure_memory,
    "alone": measure_alone,
    "ddp": measure_ddp,
    "pipeline": measure_pipeline,
}


def main() -> None:
    """Rank, size, address and port, and the jobs."""
    rank, size, address, port, jobs = sys.argv[1:6]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=int(rank), world_size=int(size),
        timeout=timedelta(hours=1),
    )  # fmt: skip
    for job in json.loads(jobs):
        dist.barrier()
        found = JOBS[job["kind"]](job)
        if int(rank) == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
