"""A loop of timm's model, data, optimizer and schedule in a memory budget: five lines are new or changed, marked."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import create_loader, resolve_model_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import Tensor
from torch.utils.data import Dataset

import snugfit  # new

BATCH, EPOCHS, BUDGET = 64, 2, "100MB"
SETTINGS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0}


class Photos(Dataset[tuple[Tensor, int]]):
    """Photos of one colour each, which tells their class; timm's loader sets the transform."""

    transform: Callable[[Image.Image], Tensor]

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """A photo (3, 96, 96) and the number of its class."""
        label = index % 10
        return self.transform(Image.new("RGB", (120, 100), (25 * label, 250 - 25 * label, 100))), label


def main() -> None:
    """Train two epochs."""
    snugfit.prepare_process()  # new: the budget counts from here, before model and data exist
    torch.manual_seed(0)
    model = timm.create_model("mobilenetv3_small_050", num_classes=10)
    config = resolve_model_data_config(model, {"input_size": (3, 96, 96)})
    loader = create_loader(
        Photos(192),
        config["input_size"],
        BATCH,
        is_training=True,
        mean=config["mean"],
        std=config["std"],
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
    )
    loss_fn = LabelSmoothingCrossEntropy(smoothing=0.1)
    optimizer = create_optimizer_v2(model, opt="momentum", **SETTINGS)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=EPOCHS)
    # new; the optimizer stays for the schedule, and snugfit applies gradients itself
    with snugfit.fit(model, loss_fn, memory=BUDGET, batch_size=BATCH, example=next(iter(loader)), **SETTINGS) as step:
        for epoch in range(epochs):
            total = 0.0
            for images, targets in loader:
                # changed, from: loss = loss_fn(model(images), targets)
                # optimizer.zero_grad(); loss.backward(); optimizer.step()
                loss = step(images, targets)
                total += float(loss) * len(images)
            scheduler.step(epoch + 1)
            step.lr = optimizer.param_groups[0]["lr"]  # new
            print(f"epoch {epoch}: loss {total / 192:.3f}, next learning rate {step.lr:.4f}")
    record = step.record
    print(record)
    print(f"images at once: {record.micro_batch} of {BATCH}; steps: {record.steps}")
    print(f"within the budget: {record.measured_bytes <= record.predicted_bytes <= 100_000_000}")


if __name__ == "__main__":
    main()
