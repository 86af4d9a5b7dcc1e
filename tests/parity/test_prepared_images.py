"""Runs on tensors that a data set of one's own prepared: as in plain PyTorch, resumable, and without files later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import assert_same, in_blocks, interrupt
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import snugfit
from snugfit._training.events import CacheProgress
from snugfit.errors import UsageError

OPTIONS: dict[str, Any] = {
    "strategy": "backprop", "epochs": 2, "batch_size": 8, "threads": 1, "schedule": "constant", "seed": 3,
}  # fmt: skip


class Noisy(Dataset[tuple[Tensor, int]]):
    """Images of 6 x 10 pixels, to each of which a transform adds noise whenever it is read."""

    def __init__(self, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images, self.noise = torch.randn(32, 2, 6, 10, generator=generator) * 2, noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index] + self.noise * torch.randn(2, 6, 10), index % 2


def network() -> nn.Module:
    """One convolution and a head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 32, 2))


def deep_network() -> nn.Module:
    """Two convolutions and a head."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 12, 2)]
    return nn.Sequential(*layers)


def plan(noise: float = 0.0, **options: Any) -> Any:
    data = snugfit.from_dataset(Noisy(noise), Noisy(), as_is=True)
    return snugfit.plan(network(), data, **{**OPTIONS, **options})


def test_a_run_trains_on_the_tensors_of_the_data_set(tmp_path: Path) -> None:
    planned, theirs, data = plan(), network(), Noisy()
    planned.run((), out=tmp_path / "run")
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    source = planned.assembly.training_data().train
    for epoch in range(2):
        for batch, labels in source.epoch(epoch, 8):
            nearest = torch.cdist(batch.flatten(1), data.images.flatten(1)).argmin(1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(data.images[nearest]), labels).backward()
            optimizer.step()
    assert_same(load_file(tmp_path / "run" / "model.safetensors"), theirs.state_dict(), tolerance=1e-5)


def test_random_transforms_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    plan(0.5).run((), out=tmp_path / "whole")
    interrupt(plan(0.5), tmp_path / "run")
    data = snugfit.from_dataset(Noisy(0.5), Noisy(), as_is=True)
    snugfit.resume(tmp_path / "run", (), model=network(), data=data)
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run")))


def test_random_transforms_of_a_cache_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    def planned() -> Any:
        data = snugfit.from_dataset(Noisy(0.5), Noisy(0.5), as_is=True)
        options = {**OPTIONS, "strategy": "blockwise", "module_units": "1", "epochs": 1}
        return in_blocks(snugfit.plan(deep_network(), data, **options), (0, 0, 8), (1, 1, 8))

    planned().run((), out=tmp_path / "whole")
    interrupt(planned(), tmp_path / "run", CacheProgress, 1)
    torch.manual_seed(9)
    data = snugfit.from_dataset(Noisy(0.5), Noisy(0.5), as_is=True)
    snugfit.resume(tmp_path / "run", (), model=deep_network(), data=data)
    whole, resumed = (sorted((tmp_path / name / "weights").glob("*.safetensors")) for name in ("whole", "run"))
    assert len(whole) == len(resumed) > 1
    for one, other in zip(whole, resumed, strict=True):
        assert_same(load_file(one), load_file(other))


def test_images_of_files_are_refused_later(tmp_path: Path) -> None:
    record = plan().run((), out=tmp_path / "run")
    assert record.model(torch.zeros(1, 2, 6, 10)).shape == (1, 2)
    with pytest.raises(UsageError, match=r"prepared.*take the model by snugfit\.load"):
        snugfit.evaluate(record.run_dir, data="digits", model=network())
    with pytest.raises(UsageError, match=r"prepared.*take the model by snugfit\.load"):
        list(snugfit.predict(record.run_dir, tmp_path, model=network()))
    with pytest.raises(UsageError, match=r"--erase 0\.5 augments, and as_is=True"):
        plan(erase=0.5)
