"""A training loop of your own that trains only the most important tensors, selected again every few steps."""

import time

import torch
from torch import Tensor, nn

from snugfit import Chain
from snugfit.lean import use_lean
from snugfit.profiling import time_tensors
from snugfit.selection import TensorSelection

IMAGE, CLASSES, BATCH, RATIO = (1, 24, 24), 10, 16, 0.8
PATTERNS = torch.randn(CLASSES, 1, 4, 4, generator=torch.Generator().manual_seed(1)).repeat_interleave(6, 2)


def synthetic_images(count: int) -> tuple[Tensor, Tensor]:
    """Noisy patterns (B, 1, 24, 24), one for each class, and their labels (B,)."""
    labels = torch.randint(CLASSES, (count,))
    return PATTERNS[labels].repeat_interleave(6, 3) + torch.randn(count, *IMAGE), labels


def make_network() -> nn.Module:
    """Images (B, 1, 24, 24) to logits (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, CLASSES),
    )


def main() -> None:
    """Train within a time ratio."""
    torch.manual_seed(0)
    network = make_network()
    chain = Chain.from_module(network, IMAGE)  # shares the weights; traced before the layers are made lean
    use_lean(network)  # what does not train keeps no activations
    optimizer = torch.optim.Adam(network.parameters(), lr=0.002)
    profile = time_tensors(chain, optimizer, BATCH)  # what each tensor takes on this machine
    selection = TensorSelection(chain, profile, optimizer, RATIO, every=30)
    full, least = selection.times.full, selection.times.least
    print(f"a full step takes {full * 1e3:.0f} ms, one of the classifier alone {least * 1e3:.0f} ms")

    seconds = []
    for _ in range(90):
        images, labels = synthetic_images(BATCH)
        if selection.step(images, labels):
            print(f"trains for {selection.predicted_ratio:.0%} of a full step: {' '.join(selection.selected)}")
        started = time.perf_counter()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)

    typical = sorted(seconds)[len(seconds) // 2]
    images, labels = synthetic_images(300)
    with torch.no_grad():
        right = (network(images).argmax(1) == labels).float().mean().item()
    print(f"a step took {typical / full:.0%} of a full one; accuracy {right:.0%} on images never seen")


if __name__ == "__main__":
    main()
