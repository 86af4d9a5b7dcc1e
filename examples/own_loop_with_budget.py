"""A plain PyTorch loop inside a memory budget: snugfit.fit chooses micro-batches and recomputation by measurement."""

import torch
from torch import nn

import snugfit

BATCH, STEPS, BUDGET = 64, 12, "35MB"


def make_network() -> nn.Module:
    """Images (B, 3, 32, 32) to logits (B, 10); each of its feature maps takes 4 MB in a batch of 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


def main() -> None:
    """Train a few steps."""
    snugfit.prepare_process()  # the budget counts from here: before model and data exist
    torch.manual_seed(0)
    model, loss_function = make_network(), nn.CrossEntropyLoss()
    images, targets = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    with snugfit.fit(
        model, loss_function, memory=BUDGET, batch_size=BATCH, example=(images, targets), optimizer="adamw"
    ) as step:
        losses = []
        for number in range(STEPS):
            step.lr = 0.002 * (1 - number / STEPS)
            losses.append(float(step(images, targets)))
    print(step.record)
    print(f"loss fell: {losses[-1] < losses[0]}; images at once: {step.record.micro_batch} of {BATCH}")
    print(f"within the budget: {step.record.measured_bytes <= step.record.predicted_bytes <= 35_000_000}")


if __name__ == "__main__":
    main()
