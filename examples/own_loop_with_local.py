"""A training loop of your own in which every unit learns from a local loss: no gradient crosses from unit to unit."""

import torch
from torch import Tensor, nn

from snugfit import Chain
from snugfit.local import NetworkStats, UnitShape, build_local_loss

IMAGE, CLASSES = (1, 16, 16), 10


def synthetic_images(count: int) -> tuple[Tensor, Tensor]:
    """Noisy patterns (B, 1, 16, 16), one for each class, and their labels (B,)."""
    patterns = torch.randn(CLASSES, *IMAGE, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(CLASSES, (count,))
    return patterns[labels] + torch.randn(count, *IMAGE), labels


def make_network() -> nn.Module:
    """Images (B, 1, 16, 16) to logits (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def main() -> None:
    """Train unit by unit, and measure the classifier that each local loss is."""
    torch.manual_seed(0)
    chain = Chain.from_module(make_network(), IMAGE)  # any network that torch.fx traces; weights are shared with it
    stats = NetworkStats.from_widths([16, 32], CLASSES)
    units = [unit.module for unit in chain.units]
    losses = [build_local_loss("aan", UnitShape(unit.output_shape), stats) for unit in chain.units]
    optimizers = [
        torch.optim.SGD([*unit.parameters(), *loss.parameters()], lr=0.05, momentum=0.9)
        for unit, loss in zip(units, losses, strict=True)
    ]

    for _ in range(60):
        features, labels = synthetic_images(32)
        for unit, local_loss, optimizer in zip(units, losses, optimizers, strict=True):
            features = unit(features.detach())  # here the gradient ends
            loss, _ = local_loss(features, labels)
            loss.backward()  # only this unit's activations are alive
            optimizer.step()
            optimizer.zero_grad()

    features, labels = synthetic_images(500)
    for place, local_loss in zip(chain.units, losses, strict=True):
        with torch.no_grad():
            features = place.module.eval()(features)
            right = (local_loss.eval().predict(features).argmax(1) == labels).float().mean().item()
        print(f"exit after {place.name}: accuracy {right:.0%} on images never seen")


if __name__ == "__main__":
    main()
