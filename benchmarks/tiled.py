"""Claims about ``tiled``: memory and time of YOLOv2's first 16 layers over processes, over time, and over slow links.

The claims of Rama and Gerstlauer (UT-CERC-24-02), one sub-command each. Steps are on made-up images, with a mean square
as loss, so that nothing but the network is timed; every process has one thread.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.common import DEFAULTS, Cell, Options, program
from benchmarks.netns import hosts, why_not
from benchmarks.store import ResultFile, finish
from benchmarks.tiled_choices import SCRATCH_GRIDS, scratch_ways, sequential_ways, ways_over_a_link
from benchmarks.tiled_steps import Job, run_jobs
from benchmarks.tiled_tables import render

SIZE = 608
GRIDS = {1: (1, 1), 2: (1, 2), 4: (2, 2), 6: (2, 3), 12: (3, 4), 24: (4, 6)}
RATES = ("0.05mbit", "0.2mbit", "1mbit", "2mbit", "10mbit", "100mbit")
SLOW = RATES[:2]
EVERY = {"forward": "every", "backward": "every", "recompute": False}
FEW = "0-4 | 4-14 | 14-28 | 28-44"
PIPELINE_CUT = 17
"""Layers of the first of two stages: about half of the seconds."""

app = program("tiled")


@app.command
def memory(*, size: int = SIZE, tiles: tuple[int, ...] = tuple(GRIDS), options: Options = DEFAULTS) -> None:
    """Peak bytes of tensors per process, a tile each; activations are what is left without weights and gradients.

    Args:
        size: side of the images in pixels.
        tiles: how many.
        options: what every benchmark takes; the paper's batch size is 1.
    """
    results = ResultFile("tiled", options)
    for count in tiles:
        job: Job = {"kind": "memory", "size": size, "batch": options.batch_size, "grid": GRIDS[count], **EVERY}
        _once(results, "memory", [job], count)
        _once(results, "memory", [{**job, "recompute": True, "forward": FEW, "backward": FEW}], count)
    finish(results, render)


@app.command
def speed(
    *, size: int = SIZE, batches: tuple[int, ...] = (1, 2, 4, 8), rounds: int = 3, repeats: int = 3,
    options: Options = DEFAULTS,
) -> None:  # fmt: skip
    """A step of two processes of one thread against one process of one or two threads, DDP and a pipeline, in turns.

    Args:
        size: side of the images in pixels.
        batches: images in a step.
        rounds: how often all take their turn.
        repeats: steps of a turn, of which the median counts.
        options: what every benchmark takes.
    """
    results = ResultFile("tiled", options)
    for batch in batches:
        common: Job = {"size": size, "batch": batch, "repeats": repeats}
        turns: dict[str, Job] = {
            "one process": {"kind": "alone", **common},
            "tiled": {"kind": "tiled", **common, "grid": (1, 2), **EVERY},
            "tiled, frozen norms": {"kind": "tiled", **common, "grid": (1, 2), **EVERY, "frozen": True},
            "one process, frozen norms": {"kind": "alone", **common, "frozen": True},
            "two threads": {"kind": "alone", **common, "threads": 2},
            "DDP": {"kind": "ddp", **common},
        }
        turns |= {"pipeline": {"kind": "pipeline", **common, "cut": PIPELINE_CUT}} if batch > 1 else {}
        _once(results, "speed", [turns[name] for _ in range(rounds) for name in turns], 2, names=list(turns) * rounds)
    finish(results, render)


@app.command
def links(
    *, size: int = 128, rates: tuple[str, ...] = RATES, repeats: int = 5, options: Options = DEFAULTS
) -> None:  # fmt: skip
    """Forward and backward over a slow link: one group, a group per layer, and what the cost model chooses.

    Two hosts in network namespaces. Sums of gradients are the same for all profiles, and left out.

    Args:
        size: side of the images in pixels; small, since all of it crosses the slowest link.
        rates: of the link.
        repeats: steps, of which the median counts.
        options: what every benchmark takes.
    """
    results = ResultFile("tiled", options)
    if reason := why_not():
        raise SystemExit(reason)
    for rate in rates:
        ways = ways_over_a_link(size, options.batch_size, rate)
        slow = rate in SLOW
        common: Job = {
            "kind": "tiled", "size": size, "batch": options.batch_size, "grid": (1, 2), "frozen": True, "sums": False,
            "recompute": False, "repeats": 1 if slow else repeats, "warm_up": 0 if slow else 1,
        }  # fmt: skip
        jobs = [{**common, "forward": way.forward, "backward": None} for way in ways.values()]
        jobs += [{**common, "forward": way.backward, "backward": way.backward} for way in ways.values()]
        told = {name: asdict(way) for name, way in ways.items()}
        _once(results, "links", jobs, 2, rate=rate, names=list(ways), ways=told)
    finish(results, render)


@app.command
def sequential(*, size: int = SIZE, repeats: int = 3, options: Options = DEFAULTS) -> None:
    """Tile after tile on one device against whole maps: peak bytes of tensors and seconds.

    Frozen statistics; those of the batch; and these with whole maps in memory-mapped files, with private memory too.

    Args:
        size: side of the images in pixels.
        repeats: steps, of which the median counts.
        options: what every benchmark takes.
    """
    results = ResultFile("tiled", options)
    for frozen in (True, False):
        common: Job = {"kind": "alone", "size": size, "batch": options.batch_size, "repeats": repeats, "bytes": True}
        ways = sequential_ways(size, frozen=frozen)
        jobs = [{**common, "frozen": frozen}, *({**common, "frozen": frozen, **way} for way in ways)]
        _once(results, "sequential", jobs, 1, names=["whole", *(f"{w['grid'][0]}x{w['grid'][1]}" for w in ways)])
    for grid in SCRATCH_GRIDS:
        common = {"kind": "alone", "size": size, "batch": options.batch_size, "repeats": repeats, "bytes": True}
        common |= {"frozen": False, "resident": True}
        ways = scratch_ways(size, grid)
        label = f"{grid[0]}x{grid[1]}"
        jobs = [common, *({**common, **way} for way in ways)]
        _once(results, "sequential", jobs, 1, names=["whole", *(label for _ in ways)])
    finish(results, render)


def _once(results: ResultFile, arm: str, jobs: list[Job], processes: int, rate: str = "", **labels: Any) -> Cell:
    """Run the jobs, or take what they gave before; the same job several times counts by its median."""
    label = f"claim={arm} processes={processes} {rate} " + "; ".join(str(job) for job in jobs[:3])

    def work() -> Cell:
        if not rate:
            return {"found": run_jobs(jobs, processes, timeout=results.options.timeout)}
        with hosts(processes, rate) as made:
            return {"found": run_jobs(jobs, processes, made, timeout=results.options.timeout)}

    return results.once(label, work, arm=arm, jobs=jobs, processes=processes, rate=rate, **labels)


if __name__ == "__main__":
    app()
