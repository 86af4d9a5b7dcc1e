"""A plain training loop on a GPU with one setting changed: seconds of a step, and what the allocator reserves for it.

It tells which settings snugfit has a reason to change: memory format, TF32, cuDNN's benchmark mode, precision, and the
allocator's segments. Prints one JSON object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from benchmarks.common import program
from benchmarks.machine import alone_on

CASES: tuple[tuple[str, ...], ...] = (
    (),
    ("--expandable",),
    ("--contiguous",),
    ("--no-tf32",),
    ("--benchmark",),
    ("--benchmark", "--no-tf32"),
    ("--precision", "bfloat16"),
    ("--deterministic",),
)
"""The defaults of the loop, and changes to them."""
WARM_UP, STEPS = 5, 30

app = program("gpu_settings")


@app.default
def main(
    *,
    model: str = "resnet50",
    batch: int = 32,
    side: int = 224,
    contiguous: bool = False,
    no_tf32: bool = False,
    benchmark: bool = False,
    deterministic: bool = False,
    expandable: bool = False,
    precision: Literal["float32", "bfloat16"] = "float32",
    device: str = "cuda",
) -> int:
    """Train a network of torchvision on random images.

    Args:
        model: name in ``torchvision.models``.
        batch: images of a step.
        side: pixels of an image's side.
        contiguous: whether images and weights are contiguous instead of channels-last.
        no_tf32: whether convolutions may not round to TF32, as they may by torch's default.
        benchmark: cuDNN's benchmark mode.
        deterministic: whether cuDNN uses deterministic algorithms only.
        expandable: whether the allocator's segments grow.
        precision: of autocast.
        device: where it runs.
    """
    import torchvision

    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic
    torch.backends.cudnn.allow_tf32 = not no_tf32
    layout = torch.contiguous_format if contiguous else torch.channels_last
    network: nn.Module = getattr(torchvision.models, model)(num_classes=10).to(device).to(memory_format=layout)
    images = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=layout)
    labels = torch.randint(0, 10, (batch,), device=device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()

    with alone_on(torch.device(device)):
        _seconds_per_step(step, WARM_UP, kind)
        found = {"seconds_per_step": _seconds_per_step(step, STEPS, kind)}
    if kind == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated(device)
        found["reserved"] = torch.cuda.max_memory_reserved(device)
    print(json.dumps(found))
    return 0


def _seconds_per_step(step: Callable[[], None], steps: int, kind: str) -> float:
    """Mean seconds of a step on a device of this kind."""
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if kind == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


if __name__ == "__main__":
    raise SystemExit(app())
