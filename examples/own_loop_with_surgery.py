"""A training loop of your own after surgery: channels pruned, the rest frozen, a side network learns."""

import torch
from torch import Tensor, fx, nn

from snugfit.surgery import attach_side_network, find_groups, prune, width

IMAGE, CLASSES = (3, 32, 32), 10


def synthetic_images(count: int) -> tuple[Tensor, Tensor]:
    """Noisy patterns (B, 3, 32, 32), one for each class, and their labels (B,)."""
    patterns = torch.randn(CLASSES, *IMAGE, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(CLASSES, (count,))
    return patterns[labels] + torch.randn(count, *IMAGE), labels


def make_network() -> nn.Module:
    """Images (B, 3, 32, 32) to logits (B, 10)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 48)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, CLASSES))


def train(network: nn.Module, steps: int, lr: float) -> list[float]:
    """A plain loop over what requires a gradient; the losses."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=lr), []
    for _ in range(steps):
        images, labels = synthetic_images(32)
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def count(network: nn.Module, *, trained: bool = False) -> int:
    """Number of parameters; of those that train."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad or not trained)


def main() -> None:
    """Prune, freeze, attach, train."""
    torch.manual_seed(0)
    network = fx.symbolic_trace(make_network())  # surgery works on the graph; names and weights are the model's

    groups = find_groups(network, IMAGE)  # channels that can only be removed together
    before = count(network)
    with torch.no_grad():
        for group in groups:  # every second channel is made to add nothing; group lasso would find out which
            for slot in group.producers:
                network.get_parameter(slot.tensor)[::2] = 0
    images, _ = synthetic_images(4)
    expected = network.eval()(images)
    prune(network, groups)  # parameters, buffers and layer sizes shrink; the outputs stay
    widths = [width(network, group) for group in groups]
    same = torch.allclose(network(images), expected, atol=1e-5)
    print(f"pruned: {before} parameters to {count(network)}, widths {widths}, same outputs: {same}")

    network.requires_grad_(False)  # frozen, with its norms in evaluation mode
    network = attach_side_network(network, IMAGE)  # x = block(x) + side(x); side(x) is zero before training
    print("same outputs with the side network:", torch.allclose(network.eval()(images), expected, atol=1e-5))
    network.get_submodule("side").train()
    print(f"trains: {count(network, trained=True)} of {count(network)} parameters")

    losses = train(network, steps=80, lr=0.01)
    print(f"loss from {losses[0]:.2f} to {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
