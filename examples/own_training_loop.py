"""Use the parts in a training loop of your own: a memory limit, lean convolutions, local losses.

None of the three needs the others, nor a plan, a run folder or the command line.
"""

import torch
from torch import nn

from snugfit.lean import use_lean_convolutions
from snugfit.local import AuxiliaryNetwork, NetworkFacts, UnitShape
from snugfit.memory import MemoryLimit, is_out_of_memory, make_meter, prepare_process, release_memory

CPU = torch.device("cpu")


def made_up_batch(batch: int, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (B, 3, side, side) and labels (B,) below 10."""
    return torch.randn(batch, 3, side, side), torch.randint(10, (batch,))


def train_within_a_limit(budget_bytes: int = 60_000_000) -> int:
    """Training steps inside an enforced budget, halving the batch when memory is refused; returns the last batch."""
    baseline = prepare_process()
    meter = make_meter(baseline, CPU)
    network = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    network(made_up_batch(1)[0])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    batch, steps = 512, 0
    with MemoryLimit(budget_bytes, baseline, CPU) as limit:
        while steps < 5:
            limit.refresh()  # the limit follows what is mapped and resident now
            try:
                images, labels = made_up_batch(batch)
                nn.functional.cross_entropy(network(images), labels).backward()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                batch //= 2
            else:
                optimizer.step()
                steps += 1
            images = labels = None
            optimizer.zero_grad()
            release_memory()
        peak = meter.mark()
    print(f"limit: batch {batch}, peak {peak / 1e6:.1f} of {budget_bytes / 1e6:.0f} MB, enforced: {limit.enforced}")
    return batch


def make_convolutions_lean() -> float:
    """Convolutions with the lean weight gradient; returns the largest difference from torch's own gradient."""
    images = torch.randn(16, 64, 2, 2)
    stock = nn.Conv2d(64, 64, 3, padding=1)
    lean = nn.Conv2d(64, 64, 3, padding=1)
    lean.load_state_dict(stock.state_dict())
    use_lean_convolutions(lean)
    for layer in (stock, lean):
        layer(images).square().sum().backward()
    difference = ((stock.weight.grad - lean.weight.grad).abs().max() / stock.weight.grad.abs().max()).item()
    print(f"lean: weight gradients differ by {difference:.1e} of the largest")
    return difference


def train_locally(steps: int = 5) -> list[float]:
    """Two units, each trained by a local loss on its own output; returns the last unit's losses."""
    network = NetworkFacts(narrowest=16, widest=32, classes=10)
    units = [
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
    ]
    losses = [
        AuxiliaryNetwork(UnitShape((16, 32, 32), initial=True), network, filters=8),
        AuxiliaryNetwork(UnitShape((32, 16, 16)), network, filters=16),
    ]
    optimizers = [
        torch.optim.SGD([*unit.parameters(), *loss.parameters()], lr=0.05)
        for unit, loss in zip(units, losses, strict=True)
    ]
    images, labels = made_up_batch(16)
    history = []
    for _ in range(steps):
        features = images
        for unit, local_loss, optimizer in zip(units, losses, optimizers, strict=True):
            features = unit(features.detach())  # no gradient crosses from unit to unit
            loss, _ = local_loss(features, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(loss.item())
    print(f"local: loss of the last exit from {history[0]:.2f} to {history[-1]:.2f}")
    return history


if __name__ == "__main__":
    torch.manual_seed(0)
    train_within_a_limit()
    make_convolutions_lean()
    train_locally()
