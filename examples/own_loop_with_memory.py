"""A training loop of your own inside an enforced memory budget: what is refused is tried again in smaller parts."""

import torch
from torch import Tensor, nn

from snugfit.memory import MemoryLimit, is_out_of_memory, make_meter, prepare_process, release_memory

BUDGET_BYTES = 60_000_000
BATCH, STEPS = 256, 4
CPU = torch.device("cpu")


def make_network() -> nn.Module:
    """Images (B, 3, 32, 32) to logits (B, 10); its first feature map alone takes 32 kB per image."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def add_gradients(network: nn.Module, images: Tensor, labels: Tensor, micro_batch: int) -> None:
    """The gradients of the mean loss over the batch, from one part of it after the other."""
    for part, truth in zip(images.split(micro_batch), labels.split(micro_batch), strict=True):
        loss = nn.functional.cross_entropy(network(part), truth, reduction="sum") / len(labels)
        loss.backward()


def main() -> None:
    """Train a few steps."""
    torch.manual_seed(0)
    baseline = prepare_process()  # the budget counts from here: before model and data exist
    meter = make_meter(baseline, CPU)
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    micro_batch = BATCH
    with MemoryLimit(BUDGET_BYTES, baseline, CPU) as limit:
        step = 0
        while step < STEPS:
            limit.refresh()  # mapped memory changes with every step; the limit follows it
            try:
                add_gradients(network, images, labels, micro_batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or micro_batch == 1:
                    raise
                refused = True
            else:
                refused = False
            if refused:  # outside of the except clause, which keeps the error and all its tensors alive
                print(f"{micro_batch} images at once are refused")
                micro_batch //= 2
                optimizer.zero_grad()
                release_memory()
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        peak = meter.mark()
    print(f"trained {STEPS} steps of {BATCH} images, {micro_batch} at once; enforced: {limit.enforced}")
    print(f"peak {peak / 1e6:.1f} of {BUDGET_BYTES / 1e6:.0f} MB, within the budget: {peak <= BUDGET_BYTES}")


if __name__ == "__main__":
    main()
