"""The process that trains: its baseline, device and hardware."""

from __future__ import annotations

import os
import platform

import torch

from snugfit._core.hardware import Hardware, cores, processor
from snugfit._core.machine_memory import installed_bytes
from snugfit.errors import UsageError
from snugfit.memory import Baseline, limit
from snugfit.memory import prepare_process as take_baseline

_prepared: list[Baseline] = []


def prepare_process(threads: int | None = None, waiting: int | None = None) -> None:
    """Prepare this process and take the baseline that budgets count from; once, before model and data exist.

    Subnormal numbers count as zero from here on, in this thread and those that it starts. BatchNorm over a batch of two
    makes such gradients in a deep network, and processors take up to twenty times as long for them.

    Args:
        threads: compute threads; by default ``OMP_NUM_THREADS``, or all cores.
        waiting: id of a process that waits for this one; its memory counts to ``total_memory``.

    Raises:
        UsageError: ``threads`` is not a number of threads.

    >>> import snugfit
    >>> snugfit.prepare_process()
    """
    torch.set_flush_denormal(True)
    if threads is None and not os.environ.get("OMP_NUM_THREADS"):
        threads = cores()
    _prepared[:] = [take_baseline(threads, waiting)]


def baseline(threads: int | None = None) -> Baseline:
    """The baseline of a prepared process, or one taken now, which then includes model and data of the caller."""
    return _prepared[0] if _prepared else take_baseline(threads)


def choose_device(name: str | None) -> torch.device:
    """The device of that name; by default CUDA if there is one."""
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"'{name}' is not a device; use cpu or cuda[:N].") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"snugfit trains on cpu and cuda, not on '{name}'.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device; use --device cpu.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def describe_hardware(device: torch.device) -> Hardware:
    """The hardware that a profile is valid for."""
    if device.type == "cuda":
        name, memory_bytes = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory_bytes = processor(), installed_bytes()
    return Hardware(
        device=str(device),
        name=name,
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes,
        system=f"{platform.system()} {platform.machine()}",
        torch=str(torch.__version__),
        enforces=limit.can_enforce(device),
    )
