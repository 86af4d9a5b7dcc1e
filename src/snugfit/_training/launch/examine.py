"""Measurement of a cluster: the speed of its processes and of the links between them."""

from __future__ import annotations

import json
import platform
import statistics
import time
from dataclasses import asdict
from itertools import combinations
from typing import Any

import psutil
import torch
import torch.distributed as dist

from snugfit._core.hardware import Cluster, Link, Rank, cores
from snugfit._training.launch.group import own_host, unique_names
from snugfit._training.launch.world import GATEWAY, World
from snugfit._version import __version__

_PINGS = 15
_SMALLEST, _LARGEST = 2**16, 2**26
_LONG_ENOUGH = 0.25
"""No larger message is tried after a transfer of this many seconds."""
_CHANNELS, _SIDE, _IMAGES = 64, 56, 4
_MACS = _IMAGES * _CHANNELS * _CHANNELS * 9 * _SIDE * _SIDE


def examine(here: World) -> Cluster | None:
    """Measure this cluster; every member of a joined group calls it, and the gateway gets the result.

    Processes compute at the same time and send one pair at a time, messages of growing size.
    """
    dist.barrier()
    own = {
        "rank": here.rank,
        "threads": torch.get_num_threads(),
        "macs_per_second": _macs_per_second(),
        "free_bytes": psutil.virtual_memory().available,
        "cores": cores(),
        "versions": {"snugfit": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    links: list[Link] = []
    offset = 0.0
    for pair in combinations(range(here.size), 2):
        dist.barrier()
        if here.rank in pair:
            for source, target in (pair, pair[::-1]):
                found, ahead = _measure(here.rank, source, target)
                links += [found] if found else []
                offset = ahead if source == GATEWAY and here.rank == target else offset
    mine = {
        "rank": {**own, "clock_offset_seconds": offset},
        "host": own_host(here.addr),
        "links": list(map(asdict, links)),
    }
    reports = _gather_json(here, mine)
    if not here.is_gateway:
        return None
    named = unique_names([(str(name), str(address)) for name, address in (each["host"] for each in reports)])
    ranks = tuple(Rank(**each["rank"] | {"host": name}) for each, name in zip(reports, named, strict=True))
    found_links = [Link(**link) for each in reports for link in each["links"]]
    return Cluster(ranks, tuple(sorted(found_links, key=lambda link: (link.source, link.target))))


def _gather_json(here: World, said: Any) -> list[Any]:
    """Collect JSON from every process, on the gateway; nothing on the others. It travels in tensors, without pickle."""
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(here.size)]
    dist.all_gather(lengths, torch.tensor([text.numel()]))
    longest = max(int(each) for each in lengths)
    padded = torch.cat([text, torch.zeros(longest - text.numel(), dtype=torch.uint8)])
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(here.size if here.is_gateway else 0)]
    dist.gather(padded, found or None, dst=GATEWAY)
    return [json.loads(bytes(each[: int(n)].tolist())) for each, n in zip(found, lengths, strict=False)]


def _macs_per_second(seconds: float = 0.5) -> float:
    """Multiply-accumulates per second of a 3x3 convolution of 64 channels on 56x56 pixels, warmed up."""
    layer = torch.nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False)
    images = torch.randn(_IMAGES, _CHANNELS, _SIDE, _SIDE)
    times: list[float] = []
    with torch.no_grad():
        for _ in range(3):
            layer(images)
        deadline = time.perf_counter() + seconds
        while not times or time.perf_counter() < deadline:
            began = time.perf_counter()
            layer(images)
            times.append(time.perf_counter() - began)
    return _MACS / statistics.median(times)


def _measure(rank: int, source: int, target: int) -> tuple[Link | None, float]:
    """The link, on its source; and the lead of the target's clock over the source's, on its target."""
    if rank == target:
        return None, _answer(source)
    rounds = [_ping(target) for _ in range(_PINGS)][2:]
    trip = statistics.median(seconds for seconds, _ in rounds)
    dist.send(torch.tensor([min(rounds)[1]], dtype=torch.float64), target)
    size, seconds = _SMALLEST, _transfer(target, _SMALLEST)
    while seconds - trip < _LONG_ENOUGH and size < _LARGEST:
        size *= 4
        seconds = _transfer(target, size)
    seconds = min(seconds, _transfer(target, size))
    dist.send(torch.tensor([0]), target)
    return Link(source, target, size / max(seconds - trip, 1e-9), trip / 2), 0.0


def _ping(target: int) -> tuple[float, float]:
    """Round-trip seconds, and the lead of the other clock."""
    clock = torch.zeros(1, dtype=torch.float64)
    began, wall = time.perf_counter(), time.time()
    dist.send(clock, target)
    dist.recv(clock, target)
    seconds = time.perf_counter() - began
    return seconds, clock.item() - (wall + seconds / 2)


def _transfer(target: int, size: int) -> float:
    """Seconds until a message of this size has been acknowledged."""
    payload, done = torch.zeros(size, dtype=torch.uint8), torch.zeros(1)
    dist.send(torch.tensor([size]), target)
    began = time.perf_counter()
    dist.send(payload, target)
    dist.recv(done, target)
    return time.perf_counter() - began


def _answer(source: int) -> float:
    """The other side of a measurement; returns the lead of this clock."""
    clock = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(clock, source)
        dist.send(torch.tensor([time.time()], dtype=torch.float64), source)
    dist.recv(clock, source)
    size = torch.ones(1, dtype=torch.int64)
    while True:
        dist.recv(size, source)
        if not size.item():
            return float(clock.item())
        dist.recv(torch.empty(int(size.item()), dtype=torch.uint8), source)
        dist.send(torch.zeros(1), source)
