"""Records of runs that select tensors, made up for the report's tests."""

from __future__ import annotations

import random
from pathlib import Path

from snugfit._core.profile import OperatorStats, Profile, TensorProfile, TensorStats
from snugfit._core.record import IntervalRecord, PhaseRecord, Record
from snugfit._core.serial import to_data
from snugfit._core.workload import Workload

FULL = 0.622
TRAIN = 2880


def names(count: int) -> tuple[str, ...]:
    """Weights, norms' weights and norms' biases in turns, then the classifier's two."""
    kinds = ("conv.weight", "norm.weight", "norm.bias")
    layers = [f"layers.{i // 3}.{kinds[i % 3]}" for i in range(count - 2)]
    return (*layers, "fc.weight", "fc.bias")


def profile(count: int) -> dict[str, object]:
    """Operators with 100 parameters in the first tensor, 200 in the second, and so on."""

    def operator(name: str, *tensors: TensorStats) -> OperatorStats:
        return OperatorStats(name, "", (), 0, 0, 0.0, 0.0, tensors=tensors)

    owned = [operator(str(i), TensorStats(name, 100 * i, 0, 0.0, 0.0)) for i, name in enumerate(names(count)[:-2], 1)]
    head = [TensorStats(name, 50, 0, 0.0, 0.0) for name in names(count)[-2:]]
    operators = (*owned, operator("relu"), operator("fc", *head))
    return to_data(Profile((), tensors=TensorProfile(16, operators)))


def elastic(run_dir: Path, count: int = 158, intervals: int = 4, *, epochs: int = 3, ratio: float = 0.5) -> Record:
    """A run of ``intervals`` selections of later tensors rather than earlier ones."""
    every, chance, rows, phases = names(count), random.Random(3), [], []
    for index in range(intervals):
        drawn = [name for i, name in enumerate(every[:-2]) if chance.random() < 0.75 * (i / count) ** 2]
        predicted, measured = ratio * FULL * (1 - 0.01 * chance.random()), ratio * FULL * (0.9 + 0.08 * chance.random())
        rows.append(IntervalRecord(
            epochs * index, (*drawn, *every[-2:]), predicted, FULL, 460_000_000 + 10_000_000 * index, 900_000_000,
            271_000_000, epochs, measured, 1.84, dict.fromkeys(every, 0.1), profiled=index == 2,
        ))  # fmt: skip
        phases.append(PhaseRecord(
            f"interval {index + 1}", (), 16, 271_000_000, 243_000_000 + 1_000_000 * index, 0, 60.0, 58.2, epochs,
            epochs * TRAIN // 16,
        ))  # fmt: skip
    workload = Workload("mobilenet_v2", "folder:photos", (3, 224, 224), 10, TRAIN, 0, 0, epochs * intervals)
    return Record(
        strategy="elastic", model="mobilenet_v2", data="folder:photos", device="cpu", enforced=True,
        run_dir=str(run_dir), exit=None, settings={"scheme": "elastic", "time_ratio": ratio, "interval": epochs},
        budget={"memory_bytes": 280_000_000, "storage_bytes": None, "time_ratio": ratio},
        predicted={"peak_bytes": 271_000_000, "seconds": 240.0, "storage_bytes": 0},
        measured={"peak_bytes": 246_000_000, "peak_metric": "RssAnon above baseline", "tensor_peak_bytes": 220_000_000,
                  "seconds": 232.8, "storage_bytes": 0},
        accuracy={"val": 0.88, "test": 0.87, "test_top5": None},
        parameters={"full": 2_226_434, "trained_model": 2_226_434}, phases=tuple(phases), intervals=tuple(rows),
        tensors=every, profile=profile(count), workload=to_data(workload),
    )  # fmt: skip
