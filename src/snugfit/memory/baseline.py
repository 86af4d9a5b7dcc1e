"""Bring the process to its resting state and read its memory baseline, before model and data exist."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass

import torch
from torch import nn

from snugfit._core.options import Workers, checked
from snugfit._upstream import to_channels_last
from snugfit.memory.status import read_status
from snugfit.memory.trim import release_memory, tighten_allocator

_THREAD_STACK_BYTES = 512 * 1024
_KERNELS_KEPT = 192
"""Number of generated kernels that oneDNN caches; with its default of 1024 their memory grows with every new shape."""


@dataclass(frozen=True)
class Baseline:
    """Memory of the resting process, in bytes.

    Attributes:
        anon: RssAnon; peaks are measured above it.
        data: VmData; ``RLIMIT_DATA`` is this plus the budget.
    """

    anon: int
    data: int


def prepare_process(threads: int | None = None) -> Baseline:
    """Start threads, warm up torch, set the allocator, and take the baseline.

    The warm-up runs one tiny forward, backward and optimizer step: the first ``torch.optim`` object lazily imports
    68 MiB, which belong to the library and not to the run.

    Args:
        threads: compute threads; torch's own choice by default.

    Raises:
        UsageError: ``threads`` is not a valid number of threads.
    """
    threads = checked("threads", Workers | None, threads)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KERNELS_KEPT))
    tighten_allocator()
    threading.stack_size(_THREAD_STACK_BYTES)
    if threads is not None:
        torch.set_num_threads(threads)
    _warm_up()
    release_memory()
    gc.freeze()  # what exists by now stays: collecting garbage need not look at it again, which took 150 ms each time
    status = read_status()
    return Baseline(anon=status.anon, data=status.data)


def _warm_up() -> None:
    """Use everything that training uses: threads, convolution, normalisation, pooling, loss, optimizers, autocast."""
    state = torch.get_rng_state()
    network: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )
    to_channels_last(network)
    for make in (_sgd, _adamw):
        optimizer = make(network)
        for precision in (torch.float32, torch.bfloat16):
            images = torch.randn(8, 3, 8, 8).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16):
                loss = nn.functional.cross_entropy(network(images), torch.zeros(8, dtype=torch.int64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.set_rng_state(state)


def _sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)


def _adamw(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
