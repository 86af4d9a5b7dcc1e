"""Runs on photos of a height and a width of their own, which are measured and classified as in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import snugfit
from snugfit._core.request import Request
from snugfit._core.serial import from_data
from snugfit.errors import UsageError

OPTIONS: dict[str, Any] = {"image_size": "16x24", "epochs": 1, "batch_size": 8, "memory": "80MB", "threads": 1}


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """Photos that are dark on the left, or not; so narrow that a square of the centre would not show it."""
    root = tmp_path / "photos"
    for number in range(60):
        pixels = np.full((20, 60, 3), 200, dtype=np.uint8)
        pixels[:, : 20 if number % 2 else 0] = 20
        (root / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / "ab"[number % 2] / f"{number:02}.png")
    return f"folder:{root}"


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 8 * 12, 2))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("checkpoint", {}),
        ("blockwise", {}),
        ("elastic", {"scheme": "full"}),
        ("tiled", {"tiles": "2x2"}),
        ("feedback", {}),
    ],
)
def test_strategies_train_on_rectangles(photos: str, tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    record = snugfit.plan(network(), photos, strategy=strategy, **OPTIONS, **options).run((), out=tmp_path / "run")
    assert record.model.eval()(torch.zeros(2, 3, 16, 24)).shape == (2, 2)


def test_a_model_reads_photos_later_as_in_training(photos: str, tmp_path: Path) -> None:
    planned = snugfit.plan(network(), photos, strategy="backprop", augment=False, **{**OPTIONS, "epochs": 4})
    assert planned.plan.workload.input_shape == (3, 16, 24)
    record = planned.run((), out=tmp_path / "run")
    assert record.accuracy["test"] == 1, "the left edge decides, which a square would leave out"
    found = snugfit.evaluate(tmp_path / "run", model=network())
    assert found["accuracy"] == 1
    elsewhere = snugfit.evaluate(tmp_path / "run", data=photos, split="all", model=network())
    assert (elsewhere["count"], elsewhere["accuracy"]) == (60, 1)
    folder = photos.removeprefix("folder:")
    assert all(
        Path(path).parent.name == name for path, name, _ in snugfit.predict(tmp_path / "run", folder, model=network())
    )


def test_a_network_for_squares_says_so(photos: str) -> None:
    with pytest.raises(UsageError, match=r"vit_b_16 takes square images, .*, not 16x24; give --image-size one side"):
        snugfit.plan("vit_b_16", photos, **OPTIONS)
    prepared = snugfit.from_dataset([(torch.zeros(3, 16, 32), number % 2) for number in range(20)], as_is=True)
    with pytest.raises(UsageError, match="not 16x32"):
        snugfit.plan("vit_b_16", prepared, **{**OPTIONS, "image_size": None})


def test_requests_of_earlier_versions_hold_a_number() -> None:
    data = Request.of(image_size=32).to_json()
    assert data["model"]["image_size"] == "32"
    data["model"]["image_size"] = 32
    assert from_data(Request, data) == Request.of(image_size=32)
    assert Request.of(image_size=(96, 160)).model.image_size == "96x160"
