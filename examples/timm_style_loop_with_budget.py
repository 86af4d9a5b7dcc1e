"""A loop in the style of timm's train.py in a memory budget: five lines are new or changed, marked by a comment."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import snugfit  # new

BATCH, EPOCHS, RATE, BUDGET = 64, 2, 0.01, "35MB"


def make_model() -> nn.Module:
    """Images (B, 3, 32, 32) to logits (B, 10)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.GELU()]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def rate_of(epoch: int) -> float:
    """Cosine schedule."""
    return RATE * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2


def main() -> None:
    """Train two epochs."""
    snugfit.prepare_process()  # new: the budget counts from here, before model and data exist
    torch.manual_seed(0)
    model, loss_fn = make_model(), nn.CrossEntropyLoss(label_smoothing=0.1)
    data = TensorDataset(torch.randn(160, 3, 32, 32), torch.randint(10, (160,)))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    # changed, from: optimizer = create_optimizer_v2(model, opt="sgd", lr=RATE)
    with snugfit.fit(model, loss_fn, memory=BUDGET, batch_size=BATCH, example=next(iter(loader)), lr=RATE) as step:
        for epoch in range(EPOCHS):
            step.lr = rate_of(epoch)  # changed, from: scheduler.step(epoch)
            total = 0.0
            for images, targets in loader:
                # changed, from: loss = loss_fn(model(images), targets)
                # optimizer.zero_grad(); loss.backward(); optimizer.step()
                loss = step(images, targets)
                total += float(loss) * len(images)
            print(f"epoch {epoch}: loss {total / len(data):.3f}, learning rate {step.lr:.4f}")
    record = step.record
    print(record)
    print(f"images at once: {record.micro_batch} of {BATCH}; steps: {record.steps}")
    print(f"within the budget: {record.measured_bytes <= record.predicted_bytes <= 35_000_000}")


if __name__ == "__main__":
    main()
