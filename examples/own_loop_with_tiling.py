"""A training loop of your own in which large feature maps are computed tile after tile: same gradients, less memory."""

import copy

import torch
from torch import Tensor, fx, nn

from snugfit.memory import tensor_peak_bytes
from snugfit.tiling import TiledForward, find_tileable_prefix, one_group

IMAGE, CLASSES = (3, 144, 144), 10


def make_network() -> nn.Module:
    """Images (B, 3, 144, 144) to logits (B, 10); the first feature maps are large."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, CLASSES),
    )


def main() -> None:
    """Train two copies, one of them in 3x3 tiles, and compare."""
    torch.manual_seed(0)
    whole = make_network().double()  # in which sums in another order show least
    tiled = fx.symbolic_trace(copy.deepcopy(whole))
    # Maps inside a group of layers are never kept whole: one group keeps least, and computes most edges of tiles twice.
    groups = one_group(find_tileable_prefix(tiled, IMAGE).layers.cuts)
    forward = TiledForward(tiled, IMAGE, grid=(3, 3), profile=groups)  # stands where the network would be called

    optimizers = [torch.optim.SGD(network.parameters(), lr=0.01) for network in (whole, tiled)]
    images, labels = torch.randn(4, *IMAGE, dtype=torch.float64), torch.randint(CLASSES, (4,))

    def gradients(call: nn.Module | TiledForward) -> None:
        nn.functional.cross_entropy(call(images), labels).backward()

    for step in range(3):
        untiled = tensor_peak_bytes(lambda: gradients(whole), [whole, images]) / 1e6
        in_tiles = tensor_peak_bytes(lambda: gradients(forward), [tiled, images]) / 1e6
        difference = max(map(relative_difference, whole.parameters(), tiled.parameters()))
        print(f"step {step}: gradients differ by {difference:.0e} of the largest", end="; ")
        print(f"peak {untiled:.1f} MB whole, {in_tiles:.1f} MB in tiles")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of two parameters' gradients over the largest gradient."""
    assert one.grad is not None and other.grad is not None
    return float((one.grad - other.grad).abs().max() / one.grad.abs().max())


if __name__ == "__main__":
    main()
