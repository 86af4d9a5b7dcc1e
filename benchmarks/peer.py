"""A peer without snugfit's training: stock modules, a plain PyTorch loop, the largest micro-batch found by halving.

It is what a careful user would write. The network is a plain ``nn.Module`` in channels_last, trained by autograd and
``torch.optim.SGD`` with a warm-up and a cosine schedule; micro-batches are accumulated to the batch size. The weights
of the best epoch on validation images are saved to a file, and tested once the optimizer is gone. So they are in memory
twice only while nothing else is, which the steps' peak always covers. From snugfit it takes the
images, and the same memory limit with the same allocator settings, which only help it. Prints one JSON object.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import INFEASIBLE, program
from snugfit import _data as datasets
from snugfit import _models as models
from snugfit._core.amounts import parse_bytes
from snugfit._data import Batches, Splits, Transform
from snugfit._engine.process import choose_device
from snugfit._quantities import format_bytes
from snugfit.memory import (
    MemoryLimit,
    PeakMeter,
    is_out_of_memory,
    make_meter,
    prepare_process,
    release_memory,
)

app = program("peer")


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    model: str
    splits: Splits
    epochs: int
    batch_size: int
    lr: float
    warmup_epochs: float
    seed: int
    device: torch.device
    started: float


@app.default
def main(
    *,
    model: str = "vgg16",
    data: str = "cifar10",
    memory: str | None = None,
    max_train: int | None = None,
    max_val: int | None = None,
    epochs: int = 10,
    batch_size: int = 128,
    lr: float = 0.01,
    warmup_epochs: float = 0.0,
    seed: int = 0,
    device: str | None = None,
    threads: int | None = None,
) -> int:
    """Train with a plain PyTorch loop under a memory limit; exits 3 where not even single images fit.

    Args:
        model: name of the network.
        data: data set, from the folder SNUGFIT_DATA.
        memory: memory budget; unlimited by default.
        max_train: training images.
        max_val: validation (and test) images.
        epochs: epochs.
        batch_size: images per optimizer step.
        lr: peak learning rate.
        warmup_epochs: epochs in which it rises to its peak.
        seed: seed of initialisation, shuffling and augmentation.
        device: cpu or cuda[:N].
        threads: compute threads.
    """
    chosen, baseline = choose_device(device), prepare_process(threads)
    started, meter = time.perf_counter(), make_meter(baseline, chosen)
    with MemoryLimit(parse_bytes(memory) if memory else None, baseline, chosen) as limit:
        splits = datasets.load(data, max_train=max_train, max_val=max_val, seed=seed)
        job = Job(model, splits, epochs, batch_size, lr, warmup_epochs, seed, chosen, started)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "best.pt"
            outcome = largest_that_fits(lambda micro: train(job, micro, saved, meter, limit), batch_size)
    if outcome is None:
        budget = format_bytes(limit.budget_bytes or 0)
        message = f"{model} does not train in {budget} even image by image."
        print(json.dumps({"error": {"code": INFEASIBLE, "type": "InfeasibleBudgetError", "message": message}}))
        return INFEASIBLE
    outcome["budget"], outcome["enforced"] = {"memory_bytes": limit.budget_bytes}, limit.enforced
    outcome["measured"]["seconds"] = time.perf_counter() - started
    print(json.dumps(outcome))
    return 0


def largest_that_fits(attempt: Callable[[int], dict[str, Any]], batch_size: int) -> dict[str, Any] | None:
    """Outcome at the first of ``batch_size``, half of it, a quarter ... that is not refused memory; None of none."""
    micro = batch_size
    while micro:
        try:
            return attempt(micro)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return None  # BatchNorm cannot train on single values
        release_memory()
        micro //= 2
    return None


def train(job: Job, micro: int, saved: Path, meter: PeakMeter, limit: MemoryLimit) -> dict[str, Any]:
    """Train for all epochs at one micro-batch, and test the weights of the best, or a later one of equals.

    Raises:
        RuntimeError, MemoryError: memory was refused.
    """
    group = max(1, min(job.batch_size, len(job.splits.train)) // micro)
    meter.restart()
    network = _build(job)
    with limit.allow_kernels():
        _warm_up(job, network, micro)
    if limit.budget_bytes is not None and meter.mark() > limit.budget_bytes:
        raise MemoryError(f"micro-batch {micro} needs more than the budget")
    network = _build(job)
    transform = Transform(job.splits.mean, job.splits.std, job.splits.flip)
    source = Batches(job.splits.train, transform, seed=job.seed, augment=True)
    steps = max(1, source.steps(micro) // group)
    optimizer = torch.optim.SGD(network.parameters(), lr=job.lr, momentum=0.9, weight_decay=5e-4)
    schedule = schedule_of(optimizer, steps, job.epochs, job.warmup_epochs)
    best, curve = (0, -1.0), list[tuple[float, float]]()
    training_seconds = 0.0
    for epoch in range(job.epochs):
        network.train()
        began, batches = time.perf_counter(), source.epoch(epoch, micro)
        for _ in range(steps):
            for _ in range(group):
                images, labels = next(batches)
                _loss(network, images.to(job.device), labels.to(job.device), group).backward()  # type: ignore[no-untyped-call]
                meter.mark()
                limit.refresh()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        training_seconds += time.perf_counter() - began
        validation = accuracy(network, Batches(job.splits.val, transform).in_order(micro), job.device)
        if validation >= best[1]:
            best = epoch, validation
            torch.save(network.state_dict(), saved)
        curve.append((round(time.perf_counter() - job.started, 2), validation))
    del optimizer, schedule
    release_memory()
    network.load_state_dict(torch.load(saved, weights_only=True, map_location=job.device))
    test = None
    if job.splits.test is not None:
        test = accuracy(network, Batches(job.splits.test, transform).in_order(micro), job.device)
    meter.mark()
    return {
        "strategy": "stock",
        "model": job.model,
        "measured": {"peak_bytes": meter.peak_bytes, "peak_metric": meter.metric},
        "accuracy": {"val": best[1], "test": test},
        "kept": {"epoch": best[0], "val_accuracy": best[1]},
        "settings": {"micro_batch": micro, "micro_batches": group},
        "training_seconds": training_seconds,
        "curve": curve,
    }


def schedule_of(
    optimizer: torch.optim.Optimizer, steps: int, epochs: int, warmup_epochs: float
) -> torch.optim.lr_scheduler.LRScheduler:
    """A linear warm-up from the first step's share of the peak, then half a cosine over the other steps."""
    rise = round(warmup_epochs * steps)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs - rise)
    if not rise:
        return cosine
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / rise, total_iters=max(rise - 1, 1))
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, cosine], milestones=[rise])


def _build(job: Job) -> nn.Module:
    torch.manual_seed(job.seed)
    channels, size = job.splits.image_shape[0], job.splits.image_shape[-1]
    network = models.build(job.model, len(job.splits.class_names), size, channels)
    return network.to(device=job.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _loss(network: nn.Module, images: Tensor, labels: Tensor, group: int) -> Tensor:
    return nn.functional.cross_entropy(network(images), labels) / group


def _warm_up(job: Job, network: nn.Module, micro: int) -> None:
    """Two accumulated micro-batches and a step on made-up images, so that a size is refused before it is trained at."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)
    images = torch.randn(micro, *job.splits.image_shape, device=job.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(micro, dtype=torch.int64, device=job.device)
    for _ in range(2):
        _loss(network, images, labels, 2).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@torch.no_grad()
def accuracy(network: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """Share of images (B, C, H, W) whose label (B,) is the largest logit."""
    network.eval()
    correct = total = 0
    for images, labels in batches:
        correct += int((network(images.to(device)).argmax(1).cpu() == labels).sum())
        total += len(labels)
    return correct / max(total, 1)


if __name__ == "__main__":
    raise SystemExit(app())
