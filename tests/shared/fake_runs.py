"""Realistic run folders made up for the report's tests: VGG-16 in four blocks under 100 MB, and plain backprop."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path

from snugfit._core.profile import ProbeLine, ProbePoint
from snugfit._core.record import ExitRecord, PhaseRecord, Record
from snugfit._core.serial import to_data
from snugfit._storage.manifest import Manifest

BUDGET = 100_000_000
WIDTHS = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
SIDES = [32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2]
UNITS = [f"features.{i}" for i in (0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40)]
BLOCKS = [(0, 1, 71), (1, 2, 59), (2, 5, 74), (5, 13, 171)]
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "<b>&")
COLUMNS = ["phase", "epoch", "step", "loss", "accuracy", "val_accuracy", "lr", "seconds", "current_bytes", "peak_bytes",
           "map50"]  # fmt: skip


def line(index: int) -> ProbeLine:
    """Line of unit ``index``: its maps grow with the batch, its weights do not."""
    width, side, before = WIDTHS[index], SIDES[index], WIDTHS[index - 1] if index else 3
    sample = 4 * side * side * (before + 4 * width + 2 * (256 if index > 1 else 32))
    fixed = 12 * 9 * width * (before + (256 if index > 1 else 32))
    noise = random.Random(index)
    points = tuple(
        ProbePoint(b, int(fixed + sample * b - 1.5e5 * noise.random()), 0.01 + 0.0004 * b) for b in (8, 32, 128)
    )
    return ProbeLine(f"unit:{UNITS[index]}", fixed, sample, 0.0, 0.01, 0.0004, points)


def exits() -> tuple[ExitRecord, ...]:
    """Accuracy that saturates at the fifth unit while the parameters keep growing."""
    accuracy = [0.61, 0.745, 0.801, 0.852, 0.9045, 0.9021, 0.9052, 0.904, 0.9018, 0.9032, 0.899, 0.9006, 0.9015]
    total, found = 0, []
    for index, value in enumerate(accuracy):
        total += 9 * WIDTHS[index] * (WIDTHS[index - 1] if index else 3) + 3 * WIDTHS[index]
        found.append(ExitRecord(UNITS[index], index, value, total + 10_250))
    return tuple(found)


def confusion(classes: int) -> list[list[int]]:
    """Mostly right; class 3 is often taken for class 5."""
    noise = random.Random(7)
    matrix = [[noise.randrange(0, 16) for _ in range(classes)] for _ in range(classes)]
    for row in range(classes):
        matrix[row][row] = 880 + noise.randrange(60)
    matrix[3][5] = 118
    return matrix


def blockwise(run_dir: Path) -> Record:
    """VGG-16 trained in four blocks, cut after unit 5."""
    measured, caches, predicted = (88.1, 92.7, 85.4, 71.9), (6.55e8, 3.28e8, 8.2e7, 0), (93.0, 98.6, 90.2, 78.3)
    phases = [
        PhaseRecord(
            f"block {i + 1}/4 {UNITS[first]}" + (f"-{UNITS[end - 1]}" if end - first > 1 else ""),
            tuple(UNITS[first:end]), batch, int(predicted[i] * 1e6), int(measured[i] * 1e6), int(measured[i] * 9e5),
            310.0 - 40 * i, 322.0 - 44 * i, 8, 50_000 // batch, int(caches[i]),
        )
        for i, (first, end, batch) in enumerate(BLOCKS)
    ]  # fmt: skip
    phases.append(PhaseRecord("exit selection", (), 256, 61_000_000, 52_300_000, 0, 21.0, 19.4, 0, 0))
    return Record(
        strategy="blockwise", model="vgg16", data="cifar10", device="cpu", enforced=True, run_dir=str(run_dir),
        budget={"memory_bytes": BUDGET, "storage_bytes": 2_000_000_000, "time_ratio": None},
        predicted={"peak_bytes": 98_600_000, "seconds": 1021.0, "storage_bytes": 990_000_000},
        measured={"peak_bytes": 92_700_000, "peak_metric": "RssAnon above baseline", "tensor_peak_bytes": 83_430_000,
                  "seconds": 1043.4, "storage_bytes": 983_000_000},
        accuracy={"val": 0.9045, "test": 0.8991, "test_top5": 0.9946},
        parameters={"full": 14_728_266, "trained_model": 567_050}, exit={"unit": UNITS[4], "index": 4, "of": 13},
        settings={"local_loss": "aan", "rho": 0.4, "cache_dtype": "float16", "views": 1, "saturation_stop": False},
        phases=tuple(phases), exits=exits(), confusion=confusion(10), class_names=NAMES,
        profile={"units": [], "base_bytes": 4_000_000, "seconds": 31.0,
                 "lines": {f"unit:{UNITS[i]}": to_data(line(i)) for i in range(13)} | {"head": to_data(line(12))}},
        overhead_seconds={"profiling": 31.2, "caching": 44.0, "exit_selection": 19.4},
        workload={"model": "vgg16", "data": "cifar10", "input_shape": [3, 32, 32], "classes": 10,
                  "train_count": 45_000, "val_count": 5_000, "test_count": 10_000,
                  "epochs": 8, "batch_size": 128, "batch_limit": 256,
                  "optimizer": {"name": "sgd", "lr": 0.05}, "augment": True},
        hardware={"device": "cpu", "name": "Cortex-A72", "threads": 4, "memory_bytes": 4_000_000_000,
                  "system": "Linux aarch64", "torch": "2.13.0", "enforces": True},
    )  # fmt: skip


def backprop(run_dir: Path) -> Record:
    """The whole network at once: one phase, no exits, no caches, no memory model, over budget."""
    phase = PhaseRecord("network", tuple(UNITS), 16, 176_000_000, 181_300_000, 171_000_000, 900.0, 961.0, 8, 2812)
    return Record(
        strategy="backprop", model="vgg16", data="cifar10", device="cpu", enforced=False, run_dir=str(run_dir),
        budget={"memory_bytes": 180_000_000, "storage_bytes": None, "time_ratio": None},
        predicted={"peak_bytes": 176_000_000, "seconds": 900.0, "storage_bytes": 0},
        measured={"peak_bytes": 181_300_000, "peak_metric": "RssAnon above baseline", "tensor_peak_bytes": 171_000_000,
                  "seconds": 961.0, "storage_bytes": 0},
        accuracy={"val": 0.921, "test": None, "test_top5": None},
        parameters={"full": 14_728_266, "trained_model": 14_728_266}, exit=None, settings={"batch_size": 16},
        phases=(phase,),
    )  # fmt: skip


def metrics(record: Record, epochs: int = 8, steps: int = 40) -> list[dict[str, object]]:
    """Rows of ``metrics.csv``: losses that fall, accuracies that rise, memory below the phase's peak."""
    rows: list[dict[str, object]] = []
    noise, now = random.Random(1), 0.0
    for block, phase in enumerate(p for p in record.phases if p.units):
        for epoch in range(epochs):
            for step in range(1, steps + 1):
                done = (epoch * steps + step) / (epochs * steps)
                now += phase.seconds / (epochs * steps)
                loss = (1.1 - 0.12 * block) * math.exp(-2 * done) + 0.5 - 0.05 * block + 0.08 * noise.random()
                row = dict.fromkeys(COLUMNS, "") | {"phase": phase.name, "epoch": epoch, "seconds": f"{now:.6g}"}
                accuracy = min(1 - loss / 2.3 + 0.05 * noise.random(), 1)
                rows.append(row | {
                    "step": step, "loss": f"{loss:.6g}", "accuracy": f"{accuracy:.6g}", "lr": 0.05 * (1 - done),
                    "current_bytes": int(phase.measured_peak_bytes * (0.4 + 0.02 * noise.random())),
                    "peak_bytes": int(phase.measured_peak_bytes),
                })  # fmt: skip
            value = 0.9 - 0.25 * math.exp(-1.2 * (epoch + 1) - block)
            rows.append(row | {"loss": f"{loss:.6g}", "accuracy": f"{accuracy:.6g}", "val_accuracy": f"{value:.6g}"})
    return rows


def write_run(run_dir: Path, record: Record, rows: list[dict[str, object]] | None) -> Path:
    """Write ``record.json`` and, where there are rows, ``metrics.csv``; and the manifest of what is there."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "record.json").write_text(json.dumps(record.to_json()))
    if rows is not None:
        with (run_dir / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    Manifest.of(run_dir)
    return run_dir
