"""Claim: training fits boards of 256, 400 and 512 MB, with Python, torch and all other processes of the run counted.

Every run is a whole ``snugfit train --total-memory auto``, or with another total, in a memory control group with such a
limit and without swap.
The kernel counts what it always counts for a group: all processes, and the files that they read and write.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program, run, run_folder, slim, to_flags
from benchmarks.store import ResultFile, finish, markdown, mb
from snugfit._core.machine_memory import MemoryGroup, counts, memory_groups
from snugfit._quantities import MB

WORKLOADS: dict[str, Settings] = {
    "README's first command": {
        "data": "digits", "model": "vgg16", "batch_size": 16, "epochs": 1, "saturation_stop": True,
    },
    "photos, pre-trained": {
        "data": "folder:flower_photos", "model": "mobilenet_v2", "image_size": 96, "batch_size": 16, "epochs": 1,
    },
    "VGG-16 on CIFAR-10": {"data": "cifar10", "model": "vgg16", "max_train": 2000, "max_val": 500, "epochs": 1},
}  # fmt: skip
_INSIDE = "benchmarks.boards_inside"

app = program("boards")


@app.default
def main(
    *,
    limits: tuple[int, ...] = (256, 400, 512),
    workloads: tuple[str, ...] = tuple(WORKLOADS),
    weights: str | None = None,
    total: str = "auto",
    python: str = sys.executable,
    options: Options = DEFAULTS,
) -> None:
    """Train every workload in a control group of every size.

    Needs the right to make memory control groups, and to drop the cached files of the machine before each run.

    Args:
        limits: sizes in MB.
        workloads: which of them.
        weights: ImageNet weights of MobileNetV2 for the photos; random ones by default.
        total: ``--total-memory`` of the runs, such as 248MB; ``auto`` leaves out the files that are mapped.
        python: interpreter of the runs. Files that another process uses do not count to the group, such as torch's
            libraries in the environment of this benchmark: give one that nothing else uses.
        options: what every benchmark takes.
    """
    results = ResultFile("boards", options)
    for limit in limits:
        for name in workloads:
            pretrained = weights is not None and "pre-trained" in name
            settings = {**options.settings(), **WORKLOADS[name], "total_memory": total}
            label = f"{limit} MB: {' '.join(to_flags(settings))}{' --weights' if pretrained else ''}"
            extra = ["--weights", weights] if weights is not None and pretrained else []
            results.once(
                label,
                lambda s=settings, e=extra, n=limit: _train(s, e, n * MB, options, python),  # type: ignore[misc]
                settings=settings, limit=limit, workload=name,
            )  # fmt: skip
    finish(results, render)


def _train(settings: Settings, extra: list[str], limit: int, options: Options, python: str) -> Cell:
    folder = run_folder({**settings, "limit": limit}, options)
    shutil.rmtree(folder, ignore_errors=True)
    flags = [*to_flags(settings), *extra, "--json", "--quiet", "--out", str(folder)]
    _drop_cached_files()
    with control_group(limit) as group:
        cell = run([_INSIDE, str(group.folder), "train", *flags], options, interpreter=python)
        cell["group_peak_bytes"] = _peak(group)
        cell["kills"] = counts(group.folder / _events(group)).get("oom_kill", 0)
    output = cell.pop("output")
    cell |= {"error": output["error"]} if "error" in output else {"record": slim(output)} if output else {}
    shutil.rmtree(folder, ignore_errors=True)
    return cell


def _drop_cached_files() -> None:
    """Make the kernel read files again, so that they count to the next group: they count where they are read first."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


@contextmanager
def control_group(limit: int) -> Iterator[MemoryGroup]:
    """A memory control group below this process's own, with a limit in bytes and without swap.

    Raises:
        OSError: none can be made here.
    """
    parent = next(memory_groups())
    group = MemoryGroup(parent.folder / f"snugfit-boards-{os.getpid()}", parent.version)
    group.folder.mkdir()
    try:
        if group.version == 1:  # the limit with swap must not be below the one without
            files = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
        else:
            files = {"memory.max": limit, "memory.swap.max": 0}
        for name, value in files.items():
            (group.folder / name).write_text(str(value))
        yield group
    finally:
        group.folder.rmdir()


def _peak(group: MemoryGroup) -> int:
    name = "memory.max_usage_in_bytes" if group.version == 1 else "memory.peak"
    return int((group.folder / name).read_text())


def _events(group: MemoryGroup) -> str:
    return "memory.oom_control" if group.version == 1 else "memory.events"


def render(cells: list[Cell]) -> str:
    """One row for each control group and workload."""
    header = (
        "control group", "workload", "exit code", "strategy", "at rest (MB)", "allowed / predicted / measured (MB)",
        "counted by the kernel, at most (MB)", "killed", "test accuracy", "seconds",
    )  # fmt: skip
    return markdown(header, [_row(cell) for cell in cells if "limit" in cell])


def _row(cell: Cell) -> list[str]:
    record = cell.get("record")
    start = [f"{cell['limit']} MB", cell["workload"], str(cell["exit_code"])]
    end = [mb(cell["group_peak_bytes"]), str(cell["kills"])]
    if record is None:
        return [*start, cell.get("error", {}).get("message", "-").replace("|", "/"), "-", "-", *end, "-", "-"]
    totals = [record[part]["total_memory_bytes"] for part in ("budget", "predicted", "measured")]
    rest = record["budget"]["total_memory_bytes"] - record["budget"]["memory_bytes"]
    accuracy = f"{100 * record['accuracy']['test']:.1f} %"
    return [*start, record["strategy"], mb(rest), " / ".join(map(mb, totals)), *end, accuracy, f"{cell['seconds']:.0f}"]


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("memory control groups are a feature of Linux.")
    app()
