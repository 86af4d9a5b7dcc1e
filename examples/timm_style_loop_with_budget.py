"""A loop in the style of timm's train.py in a memory budget: five lines of it change, shown beside those before."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import snugfit

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


def train_one_epoch(epoch: int, step: snugfit.FitStep, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Mean loss of an epoch."""
    total, count = 0.0, 0
    for images, targets in loader:
        # output = model(images); loss = loss_fn(output, targets)
        # optimizer.zero_grad(); loss.backward(); optimizer.step()
        loss = step(images, targets)
        total, count = total + float(loss) * len(images), count + len(images)
    print(f"epoch {epoch}: loss {total / count:.3f}, learning rate {step.lr:.4f}")
    return total / count


def main() -> None:
    """Train two epochs."""
    snugfit.prepare_process()  # the budget counts from here: before model and data exist
    torch.manual_seed(0)
    model, loss_fn = make_model(), nn.CrossEntropyLoss(label_smoothing=0.1)
    data = TensorDataset(torch.randn(160, 3, 32, 32), torch.randint(10, (160,)))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    # optimizer = create_optimizer_v2(model, opt="sgd", lr=RATE)
    example = next(iter(loader))
    with snugfit.fit(model, loss_fn, memory=BUDGET, batch_size=BATCH, example=example, lr=RATE) as step:
        for epoch in range(EPOCHS):
            step.lr = rate_of(epoch)  # scheduler.step(epoch)
            train_one_epoch(epoch, step, loader)
    record = step.record
    print(record)
    print(f"images at once: {record.micro_batch} of {BATCH}; steps: {record.steps}")
    print(f"within the budget: {record.measured_bytes <= record.predicted_bytes <= 35_000_000}")


if __name__ == "__main__":
    main()
