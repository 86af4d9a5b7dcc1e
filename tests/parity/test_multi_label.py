"""Runs on images with several labels are those of plain PyTorch, within their budget, and are resumed and used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import assert_same, interrupt
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import snugfit
from snugfit._core.registry import strategies
from snugfit.errors import InfeasibleBudgetError, ModelError, UsageError

pytestmark = pytest.mark.usefixtures("measured_once")

OPTIONS: dict[str, Any] = {
    "strategy": "backprop", "epochs": 2, "batch_size": 8, "threads": 1, "schedule": "constant", "seed": 3,
    "augment": False,
}  # fmt: skip


class Corners(Dataset[tuple[Tensor, Tensor]]):
    """Each of three corners is bright or dark; a label for each."""

    def __init__(self, count: int = 32, seed: int = 0, side: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count, 3), generator=generator)
        self.images = 0.4 * torch.rand(count, 3, side, side, generator=generator)
        for label, (row, column) in enumerate(((0, 0), (0, 1), (1, 0))):
            half = side // 2
            rows, columns = slice(row * half, (row + 1) * half), slice(column * half, (column + 1) * half)
            self.images[:, :, rows, columns] += 0.6 * self.labels[:, label, None, None, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    """Two convolutions and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.more = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.more(self.conv(x).relu()).relu().flatten(1))


def plan(model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    return snugfit.plan(model or Net(), data or (Corners(), Corners(16, 1)), **{**OPTIONS, **options})


def binary(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross entropy by its formula, the mean over images and classes."""
    p = logits.sigmoid()
    return -(targets * p.log() + (1 - targets) * (1 - p).log()).mean()


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    p = logits.sigmoid()
    return -(targets * (1 - p) ** 2 * p.log() + (1 - targets) * p**2 * (1 - p).log()).mean()


WAYS: list[tuple[dict[str, Any], Any]] = [
    ({}, binary),
    ({"strategy": "checkpoint"}, binary),
    ({"strategy": "tiled"}, binary),
    ({"loss": "focal"}, focal),
    ({"mixup": 0.4}, binary),
    ({"loss": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0, 1.0]))}, None),
]


@pytest.mark.parametrize(("options", "loss"), WAYS, ids=["backprop", "checkpoint", "tiled", "focal", "mixup", "own"])
def test_a_run_equals_the_plain_loop(options: dict[str, Any], loss: Any, tmp_path: Path) -> None:
    theirs, loss = Net(), loss or options["loss"]
    planned = plan(Net(), **options)
    assert planned.plan.workload.task == "multi-label"
    planned.run((), out=tmp_path / "run")
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for epoch in range(2):
        for images, targets in planned.assembly.training_data().train.epoch(epoch, 8):
            optimizer.zero_grad()
            loss(theirs(images), targets).backward()
            optimizer.step()
    assert_same(load_file(tmp_path / "run" / "model.safetensors"), theirs.state_dict(), tolerance=1e-5)


@pytest.mark.parametrize("strategy", ["backprop", "checkpoint"])
def test_a_resumed_run_ends_with_the_same_bits(strategy: str, tmp_path: Path) -> None:
    plan(strategy=strategy).run((), out=tmp_path / "whole")
    interrupt(plan(strategy=strategy), tmp_path / "run")
    numbers = [(image, int(label[0])) for image, label in Corners()]
    with pytest.raises(UsageError, match="has one class for each image; --task multi-label takes vectors"):
        snugfit.resume(tmp_path / "run", (), model=Net(), data=(numbers, numbers))
    snugfit.resume(tmp_path / "run", (), model=Net(), data=(Corners(), Corners(16, 1)))
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run")))


class Hamming:
    """A metric like those of torchmetrics, which take integers."""

    def reset(self) -> None:
        self.right, self.all = 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        assert targets.dtype == torch.int64 and outputs.shape == targets.shape
        self.right += int(((outputs > 0) == targets.bool()).sum())
        self.all += targets.numel()

    def compute(self) -> float:
        return self.right / self.all


def test_the_best_epoch_is_that_of_mean_average_precision(tmp_path: Path) -> None:
    val, values = Corners(40, 1), []

    def note(event: snugfit.Event) -> None:
        if isinstance(event, snugfit.EpochDone):
            assert (event.metric, event.accuracy) == ("mAP", None)
            values.append(event.val_accuracy)

    record = plan(data=(Corners(), val), epochs=4, metrics={"hamming": Hamming()}).run((note,), out=tmp_path)
    loaded = snugfit.load(tmp_path, model=Net())
    with torch.no_grad():
        scores = loaded((val.images * 255).round() / 255 * 2 - 1)  # by 8 bits, and the mean and deviation of 0.5
    expected = average_precision_score(val.labels.numpy(), scores.numpy(), average="macro")
    assert record.kept is not None and values[record.kept.epoch] == max(values)
    assert record.accuracy["val"] == record.accuracy["map"] == pytest.approx(expected, abs=1e-6)
    hamming = ((scores > 0) == val.labels.bool()).double().mean().item()
    assert record.metrics["hamming"] == {"val": pytest.approx(hamming)}
    assert record.confusion == [] and record.accuracy["test_top5"] is None


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    for options, said in (
        ({"class_weights": "balanced"}, "--class-weights balanced .*several labels.*BCEWithLogitsLoss"),
        ({"label_smoothing": 0.1}, "--label-smoothing 0.1 .*several labels"),
        ({"loss": F.cross_entropy, "task": "detect"}, "boxes are read from files"),
        ({"loss": lambda logits, labels: F.cross_entropy(logits, labels.long())}, "loss= failed for logits of shape"),
        ({"loss": nn.BCEWithLogitsLoss(reduction="sum")}, "not the mean over the images"),
    ):
        with pytest.raises(UsageError, match=said):
            plan(**options)
    with pytest.raises(ModelError, match=r"outputs of shape \(5,\) per image, but dataset has 3 classes"):
        plan(Net(5))
    numbers = [(image, int(label[0])) for image, label in Corners()]
    with pytest.raises(UsageError, match="dataset has one class for each image"):
        plan(data=(numbers, numbers), task="multi-label")
    for name in set(strategies()) - {"backprop", "checkpoint", "tiled"}:
        (candidate,) = plan(strategy=name, time_ratio=0.5 if name == "elastic" else None).plan.candidates
        assert "its losses need one class for each image; several labels train with backprop" in candidate.reasons[0]
        with pytest.raises(InfeasibleBudgetError, match="several labels train with backprop, checkpoint or tiled"):
            plan(strategy=name, time_ratio=0.5 if name == "elastic" else None).run(())


MEMORY = """
import json, sys
sys.path[:0] = sys.path_of_tests
import snugfit
from test_multi_label import OPTIONS, Many, Wide
snugfit.prepare_process(1)
options = {**OPTIONS, "batch_size": 32, "memory": "24MB", "epochs": 1}
record = snugfit.plan(Wide(), (Many(64), Many(2000)), **options).run((), out="run")
print(json.dumps([record.measured["peak_bytes"], record.predicted["peak_bytes"]]))
"""


class Many(Dataset[tuple[Tensor, Tensor]]):
    """Many labels of one image, whose scores a budget feels."""

    def __init__(self, count: int) -> None:
        self.image, self.labels = torch.rand(3, 16, 16), (torch.rand(count, 600) < 0.3).byte()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.image, self.labels[index]


class Wide(nn.Sequential):
    """Two convolutions and 600 logits."""

    def __init__(self) -> None:
        norm, pool = nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1)
        super().__init__(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), pool, nn.Flatten())
        self.append(nn.Linear(16, 600))


def test_runs_stay_within_prediction_and_budget(tmp_path: Path) -> None:
    """In a process of their own; the scores of 2,000 images take 6 MB, more than a step."""
    code = MEMORY.replace("sys.path_of_tests", repr(sys.path))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured, predicted = json.loads(done.stdout)
    assert 6_000_000 < measured <= predicted <= 24_000_000
