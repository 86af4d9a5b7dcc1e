"""A training loop of your own in which frozen layers keep no activations: the same gradients in less memory."""

import copy

import torch
from torch import Tensor, nn

from snugfit.lean import use_lean, use_stock
from snugfit.memory import tensor_peak_bytes


def make_network() -> nn.Sequential:
    """Images (B, 3, 64, 64) to logits (B, 10)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train_biases_and_classifier(network: nn.Sequential) -> list[nn.Parameter]:
    """Freeze all but the biases and the classifier, so that gradients still pass through every layer."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("14"))
    for layer in network:
        layer.train(not isinstance(layer, nn.BatchNorm2d))  # norms keep to their statistics
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def train(network: nn.Sequential, images: Tensor, labels: Tensor, steps: int = 3) -> int:
    """Train on images (B, 3, 64, 64) and labels (B,); returns the peak bytes of live tensors."""
    optimizer = torch.optim.SGD(train_biases_and_classifier(network), lr=0.05)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return tensor_peak_bytes(step, [network, images, labels], repeats=steps)


def main() -> None:
    """Train the same network with torch's operators and with lean ones."""
    torch.manual_seed(0)
    stock = make_network()
    lean = copy.deepcopy(stock)
    use_lean(lean)  # in place; every call checks which weights train, so you may freeze others later
    images, labels = torch.randn(32, 3, 64, 64), torch.randint(10, (32,))

    before, after = train(stock, images, labels), train(lean, images, labels)
    print(f"peak of a step's tensors: {before / 1e6:.1f} MB with torch's layers, {after / 1e6:.1f} MB with lean ones")

    pairs = zip(stock.parameters(), lean.parameters(), strict=True)
    print("same weights after training:", all(torch.allclose(one, other, atol=1e-6) for one, other in pairs))
    use_stock(lean)  # a plain torch model again
    print("plain again:", [type(layer) for layer in lean] == [type(layer) for layer in stock])


if __name__ == "__main__":
    main()
