"""What ``sidenet`` cannot serve: one clear error, with the exit code of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import snugfit
from snugfit._core.option_groups import BudgetOptions, ModelOptions
from snugfit._core.request import Request, StrategyOptions
from snugfit._engine.builder import make_strategies
from snugfit.errors import DataError, InfeasibleBudgetError, ModelError, SnugfitError, UnknownNameError, UsageError
from snugfit.strategies.sidenet.config import prune_ratio


def conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def cnn() -> nn.Module:
    layers = [*conv(1, 16), *conv(16, 16, 2), *conv(16, 24, 2), *conv(24, 24, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


def pointwise() -> nn.Module:
    """No convolution is wider than a pixel."""
    layers = [nn.Conv2d(1, 8, 1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 8, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


ONE_WAY = {"prune": "off", "sample_wise": "off", "weight_storage": "float32", "side_width": 1.0, "image_size": 64}
"""A single configuration, whose weights alone are more than the budget: nothing is run."""


def fails(model: Any, **options: Any) -> SnugfitError:
    with pytest.raises(SnugfitError) as caught:
        given = {"image_size": 32, "epochs": 1, "max_train": 16, "max_val": 10, "batch_size": 8, **options}
        snugfit.plan(model, "digits", strategy="sidenet", **given).run((), out="never")
    assert len(str(caught.value).splitlines()) <= 2
    assert not Path("never").exists()
    return caught.value


@pytest.mark.parametrize(
    ("model", "options", "kind", "code", "says"),
    [
        (pointwise, {}, ModelError, 4, "no block for a side network"),
        (cnn, {"image_size": 4}, ModelError, 4, "too small for a side network"),
        (cnn, {"prune": "0.98"}, ModelError, 4, "would empty layer"),
        (cnn, {"scheme": "head", "prune": "on"}, UsageError, 2, "--prune requires a side network"),
        (cnn, {"scheme": "bias+head", "sample_wise": "on"}, UsageError, 2, "cannot run by sample"),
        (cnn, {"optimizer": "schedulefree"}, UsageError, 2, "use sgd or adamw"),
        ("vgg16", {"memory": "8MB", **ONE_WAY}, InfeasibleBudgetError, 3, "Smallest budget"),
        (cnn, {"retrain_data": "folder:/nowhere", "prune": "0.5"}, DataError, 4, "nowhere"),
        (cnn, {"retrain_data": "no-such-set", "prune": "0.5"}, UnknownNameError, 2, "no-such-set"),
    ],
)
def test_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, options: dict[str, Any], kind: type, code: int,
    says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    error = fails(model, **options)
    assert isinstance(error, kind) and error.exit_code == code and says in str(error), error


@pytest.mark.parametrize("prune", ["1", "0", "1.5", "half", "-0.2", "nan"])
def test_a_share_of_channels(prune: str) -> None:
    with pytest.raises(UsageError, match="--prune"):
        StrategyOptions(prune=prune)


def test_words_for_pruning_are_no_ratios() -> None:
    assert [prune_ratio(word) for word in ("auto", "on", "off", "0.25")] == [None, None, None, 0.25]


@pytest.mark.parametrize(
    "options",
    [{"side_width": 0.0}, {"side_lr": -1.0}, {"retrain_epochs": -1}],
)
def test_numbers_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--" + next(iter(options)).replace("_", "-")):
        StrategyOptions(**options)


@pytest.mark.parametrize("options", [{"prune_importance": "size"}, {"sample_wise": "yes"}, {"weight_storage": "int4"}])
def test_unknown_words(options: dict[str, Any]) -> None:
    with pytest.raises(UnknownNameError):
        StrategyOptions(**options)


def test_schemes_belong_to_strategies() -> None:
    for strategy, scheme in (("sidenet", "full"), ("elastic", "rep-net"), ("elastic", "bias+head")):
        with pytest.raises(UsageError, match=f"{strategy} has no scheme"):
            make_strategies(Request(strategy=StrategyOptions(strategy, scheme=scheme)))  # type: ignore[arg-type]
    (made,) = make_strategies(Request(strategy=StrategyOptions("sidenet", scheme="head"))).strategies
    assert made.scheme == "head"  # type: ignore[attr-defined]
    (made,) = make_strategies(Request(strategy=StrategyOptions("sidenet"))).strategies
    assert made.scheme == "rep-net"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("weights", "ratio", "there"), [(None, None, False), ("w", None, True), ("w", 0.5, False)])
def test_auto_considers_it_where_there_are_weights(weights: str | None, ratio: float | None, there: bool) -> None:
    request = Request(model=ModelOptions(weights=weights), budget=BudgetOptions(time_ratio=ratio))
    assert ("sidenet" in {strategy.name for strategy in make_strategies(request).strategies}) == there


def test_weights_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    other = nn.Sequential(*conv(1, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    error = fails(cnn, weights=str(tmp_path / "other.safetensors"))
    assert error.exit_code == 4 and "other.safetensors" in str(error)
