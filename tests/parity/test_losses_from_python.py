"""Runs by a loss that was passed from Python: they are those of the same loss by name, and can be resumed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity_helpers import SHORT, assert_same, interrupt, network, weights
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import snugfit
from snugfit.errors import InterruptedRunError, UsageError

Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("strategy", ["backprop", "checkpoint"])
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_cross_entropy_from_python_is_cross_entropy(tmp_path: Path, strategy: str, loss: Loss) -> None:
    named = weights(tmp_path / "a", strategy=strategy)
    assert_same(named, weights(tmp_path / "b", strategy=strategy, loss=loss))


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Focal loss by its formula."""
    p = logits.softmax(1).gather(1, labels[:, None])
    return -((1 - p) ** 2 * p.log()).mean()


def test_the_focal_loss_is_its_formula(tmp_path: Path) -> None:
    named, plain = weights(tmp_path / "a", loss="focal", strategy="backprop"), weights(tmp_path / "c")
    assert_same(named, weights(tmp_path / "b", loss=focal, strategy="backprop"), tolerance=1e-5)
    assert any((named[name] - plain[name]).abs().max() > 1e-3 for name in named)


def test_a_resumed_run_takes_the_loss_again(tmp_path: Path) -> None:
    whole = weights(tmp_path / "whole", loss=focal, strategy="backprop")
    plan = snugfit.plan(network(), "digits", loss=focal, strategy="backprop", **SHORT)
    assert plan.plan.workload.loss == "python" and plan.plan.command is None
    interrupt(plan, tmp_path / "run")
    with pytest.raises(UsageError, match="loss of your own; pass it again"):
        snugfit.resume(tmp_path / "run", (), model=network())
    with pytest.raises(UsageError, match="not the mean over the images"):
        snugfit.resume(tmp_path / "run", (), model=network(), loss=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(UsageError, match="pass a function"):
        snugfit.resume(tmp_path / "run", (), model=network(), loss="focal")
    snugfit.resume(tmp_path / "run", (), model=network(), loss=focal)
    assert_same(whole, load_file(tmp_path / "run" / "model.safetensors"))


def test_a_run_by_a_named_loss_takes_no_other(tmp_path: Path) -> None:
    stop = snugfit.StopFlag()
    stop.request()
    with pytest.raises(InterruptedRunError):
        snugfit.plan(network(), "digits", strategy="backprop", **SHORT).run((), out=tmp_path, stop=stop)
    with pytest.raises(UsageError, match="trained by --loss cross-entropy; leave out loss="):
        snugfit.resume(tmp_path, (), model=network(), loss=focal)


def test_a_loss_is_tried_and_measured_in_every_plan() -> None:
    """Its measurements may be those of another function, so none is taken from the cache or kept."""
    calls: list[int] = []

    def counted(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(len(labels))
        return F.cross_entropy(logits, labels)

    for _ in range(2):
        calls.clear()
        plan = snugfit.plan(network(), "digits", loss=counted, strategy="backprop", **SHORT)
        assert calls[:3] == [18, 2, 2] and 20 in calls[3:]
    (trial,) = plan.compare(steps=1)
    assert trial.error is None


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"class_weights": "balanced"}])
@pytest.mark.parametrize("loss", [focal, "focal"])
def test_what_changes_cross_entropy_alone_is_refused(options: dict[str, Any], loss: Loss | str) -> None:
    (flag,) = (f"--{name.replace('_', '-')}" for name in options)
    with pytest.raises(UsageError, match=rf"{flag} applies to cross entropy; leave it out with --loss (focal|python)"):
        snugfit.plan(network(), "digits", loss=loss, **options, **SHORT)


def test_a_sum_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(UsageError, match="loss= is not the mean over the images of a batch"):
        snugfit.plan(network(), "digits", loss=nn.CrossEntropyLoss(reduction="sum"), **SHORT)


def test_the_name_of_losses_from_python_names_none() -> None:
    with pytest.raises(UsageError, match="pass the function itself"):
        snugfit.plan(network(), "digits", loss="python", **SHORT)


def test_a_loss_is_not_copied_with_the_network() -> None:
    """It may hold what cannot be copied, or much that need not be."""

    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
            with self.lock:
                return F.cross_entropy(logits, labels)

    assert snugfit.plan(network(), "digits", loss=Locked(), strategy="backprop", **SHORT).plan.choice is not None
