"""The batch on which ultralytics' steps are measured, on a trainer that is not its own: the library is not needed."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

COUNTS = (1, 0, 7, 2, 9, 1)
"""Boxes of each image."""


class Boxed(Dataset):
    """Images (1, 2, 2) whose pixels are their number, with labels as ultralytics' data sets have them."""

    labels = tuple({"cls": torch.zeros(count, 1)} for count in COUNTS)

    def __len__(self):
        return len(COUNTS)

    def __getitem__(self, index):
        return {"img": torch.full((1, 2, 2), float(index)), "cls": self.labels[index]["cls"]}


def collated(items):
    images = torch.cat([torch.full((len(item["cls"]),), number) for number, item in enumerate(items)])
    classes = torch.cat([item["cls"] for item in items])
    return {"img": torch.stack([item["img"] for item in items]), "cls": classes, "batch_idx": images}


class Seen(nn.Module):
    """A network that keeps what it was given, and returns a loss as ultralytics' networks do."""

    def __init__(self):
        super().__init__()
        self.weight, self.batches = nn.Parameter(torch.ones(1)), []

    def forward(self, batch):
        self.batches.append(batch)
        return self.weight * batch["img"].sum(), None


@pytest.fixture
def integration(monkeypatch, tmp_path):
    """The module over an ultralytics that has nothing but settings and callbacks of experiment trackers."""
    name, trackers = "snugfit.integrations.ultralytics", "ultralytics.utils.callbacks"
    for each in ("ultralytics", "ultralytics.utils", "ultralytics.utils.torch_utils"):
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    utils = sys.modules["ultralytics.utils"]
    utils.__path__, utils.SETTINGS = [str(tmp_path)], {"raytune": True, "wandb": True, "mlflow": False, "sync": True}
    (tmp_path / "callbacks").mkdir()
    for each in ("__init__", "raytune", "wb", "mlflow"):
        (tmp_path / "callbacks" / f"{each}.py").write_text("")
    for each in [name, *(each for each in sys.modules if each.startswith(trackers))]:
        monkeypatch.delitem(sys.modules, each, raising=False)
    yield importlib.import_module(name)
    for each in [name, *(each for each in sys.modules if each.startswith(trackers))]:
        sys.modules.pop(each, None)


def test_trackers_that_the_trainer_imports_are_there_before_the_budget_counts(integration):
    found = {each.rpartition(".")[2] for each in sys.modules if each.startswith("ultralytics.utils.callbacks.")}
    assert found == {"raytune", "wb"}


def trainer_of(dataset):
    model = Seen()
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        amp=False,
        device=torch.device("cpu"),
        preprocess_batch=lambda batch: batch,
        train_loader=DataLoader(dataset, batch_size=4, collate_fn=collated),
        ema=SimpleNamespace(ema=nn.Linear(1, 1)),
    )


def test_steps_are_measured_on_the_images_with_the_most_boxes(integration):
    trainer = trainer_of(Boxed())
    step = integration._step(trainer, 4)
    for images in (4, 2):
        step.passes(images)
    whole, part = trainer.model.batches
    assert whole["img"][:, 0, 0, 0].tolist() == [4, 2, 3, 0] and len(whole["cls"]) == 9 + 7 + 2 + 1
    assert part["img"][:, 0, 0, 0].tolist() == [4, 2] and len(part["cls"]) == 9 + 7


def test_images_without_boxes_stay_in_order(integration):
    assert integration.most_boxes_first([None] * 3) == [0, 1, 2]
