"""Metrics that were passed from Python: measured on the finished model, in record, report and console; errors."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import interrupt
from torch import Tensor, nn

import snugfit
from snugfit._core.record import Record
from snugfit._report.console import _facts
from snugfit._training.events import EpochDone
from snugfit._training.own_metrics import check_metrics
from snugfit.errors import UsageError

OPTIONS: dict[str, Any] = {"epochs": 1, "max_train": 60, "max_val": 40, "batch_size": 20, "threads": 1, "image_size": 8}


class Balanced:
    """Mean accuracy of the classes that occur; 7 before the first reset."""

    def __init__(self, classes: int = 10) -> None:
        self.classes, self.counts = classes, torch.full((classes, classes), 7)

    def reset(self) -> None:
        self.counts = torch.zeros(self.classes, self.classes)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        for row, label in zip(logits, labels, strict=True):
            self.counts[label, row.argmax()] += 1

    def compute(self) -> Tensor:
        seen = self.counts[self.counts.sum(1) > 0]
        right = self.counts.diagonal()[self.counts.sum(1) > 0]
        return (right / seen.sum(1)).mean()


class Broken(Balanced):
    """Fails in one method."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self.fail)

    def fail(self, *given: Any) -> Tensor:
        raise KeyError("no such state")


class Found(Balanced):
    """Gives what it was told."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> Any:
        return self.value


def network() -> nn.Module:
    """Two convolutions and a head."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10)]
    return nn.Sequential(*layers)


def planned(metrics: Any, **options: Any) -> Any:
    return snugfit.plan(network(), "digits", metrics=metrics, **{**OPTIONS, "strategy": "backprop", **options})


def by_confusion(confusion: list[list[int]]) -> float:
    shares = [row[label] / sum(row) for label, row in enumerate(confusion) if sum(row)]
    return sum(shares) / len(shares)


@pytest.mark.parametrize("strategy", ["backprop", "blockwise"])
def test_metrics_are_those_of_the_finished_model(tmp_path: Path, strategy: str) -> None:
    metrics = {"balanced": Balanced(), "<none>": Found(math.nan)}
    record = planned(metrics, strategy=strategy).run((), out=tmp_path / "run")
    found = Record.from_json(record.to_json())
    assert found.metrics["balanced"]["test"] == pytest.approx(by_confusion(found.confusion), abs=1e-6)
    assert 0 <= (found.metrics["balanced"]["val"] or 0) <= 1
    assert found.metrics["<none>"] == {"val": None, "test": None}
    shown = dict(_facts(found))
    assert shown["balanced"].startswith("validation 0.") and "test" in shown["balanced"]
    page = Path(snugfit.draw_report(record.run_dir, model=network())["report"]).read_text()
    assert "&lt;none&gt;" in page and "<none>" not in page and "balanced" in page


def test_a_resumed_run_takes_the_metrics_again(tmp_path: Path) -> None:
    plan = planned({"last": Found(0.5), "balanced": Balanced()})
    assert plan.plan.workload.metrics == ("balanced", "last") and plan.plan.command is None
    interrupt(plan, tmp_path / "run", EpochDone, 1)
    with pytest.raises(UsageError, match=r"measures other metrics: balanced, last\. Pass those: snugfit\.resume"):
        snugfit.resume(tmp_path / "run", (), model=network())
    metrics = {"balanced": Balanced(), "last": Found(0.5)}
    record = snugfit.resume(tmp_path / "run", (), model=network(), metrics=metrics)
    assert record.metrics["balanced"]["test"] == pytest.approx(by_confusion(record.confusion), abs=1e-6)


@pytest.mark.parametrize("strategy", ["backprop", "checkpoint", "elastic"])
def test_metrics_of_every_epoch_are_those_of_its_weights(tmp_path: Path, strategy: str) -> None:
    """The last epoch is kept, so its values are those of the finished model; a run that was stopped has the same."""
    options: dict[str, Any] = {"strategy": strategy, "epochs": 3, "keep": "last", "lr": 0.05}
    options |= {"scheme": "full"} if strategy == "elastic" else {}
    seen = list[EpochDone]()

    def watch(event: snugfit.Event) -> None:
        seen.extend([event] if isinstance(event, EpochDone) else [])

    def metrics() -> dict[str, Any]:
        return {"balanced": Balanced(), "none": Found(math.nan)}

    record = planned(metrics(), **options).run((watch,), out=tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["step"]]
    assert [row["val/none"] for row in rows] == [""] * 3 and len({row["val/balanced"] for row in rows}) > 1
    values = [event.metrics["balanced"] for event in seen]
    assert [float(row["val/balanced"]) for row in rows] == pytest.approx(values, abs=1e-5)
    assert values[-1] == record.metrics["balanced"]["val"]
    if strategy == "backprop":
        interrupt(planned(metrics(), **options), tmp_path / "again", EpochDone, 1)
        snugfit.resume(tmp_path / "again", (), model=network(), metrics=metrics())
        with (tmp_path / "again" / "metrics.csv").open(newline="") as file:
            resumed = [row["val/balanced"] for row in csv.DictReader(file) if not row["step"]]
        assert resumed == [row["val/balanced"] for row in rows]


def test_many_classes_are_tried_on_few_rows() -> None:
    class Counting(Found):
        def update(self, logits: Tensor, labels: Tensor) -> None:
            assert logits.shape == (64, 10_000) and labels.shape == (64,)

    work = planned({}).plan.workload
    check_metrics({"count": Counting(1.0)}, dataclasses.replace(work, classes=10_000))


def test_trials_do_without_them() -> None:
    (trial,) = planned({"balanced": Balanced()}).compare(steps=1)
    assert trial.error is None


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([Balanced()], "metrics= must be a dictionary of metrics by name"),
        ({"": Balanced()}, "metrics= must be a dictionary of metrics by name"),
        ({"f1": len}, r"has 'f1', a builtin_function_or_method without update\(\)"),
        *(({"f1": Broken(name)}, rf"'f1' failed in {name}\(\): KeyError") for name in ("update", "compute", "reset")),
        ({"f1": Found(torch.zeros(3))}, r"'f1' failed in compute\(\): (RuntimeError|ValueError).*one number"),
        ({"f1": Found(None)}, r"'f1' failed in compute\(\): TypeError"),
        ({"f1": Balanced(3)}, r"'f1' failed in update\(\): IndexError"),
    ],
)
def test_what_is_no_metric_is_refused_before_training(metrics: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(metrics)


def test_torchmetrics_are_taken(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {"accuracy": torchmetrics.classification.MulticlassAccuracy(10, average="micro")}
    record = planned(metrics).run((), out=tmp_path / "run")
    assert record.metrics["accuracy"]["test"] == pytest.approx(record.accuracy["test"], abs=1e-6)
