"""The process that trains: its baseline, device and hardware."""

from __future__ import annotations

import os
import platform
from dataclasses import replace

import torch

from snugfit._core.hardware import Hardware, cores, processor
from snugfit._core.machine_memory import installed_bytes
from snugfit.errors import UsageError
from snugfit.memory import Baseline, limit, read_status, release_memory
from snugfit.memory import prepare_process as take_baseline
from snugfit.memory.device import device_at_rest, has_own_memory, is_at_rest

PROCESSOR = torch.device("cpu")
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


def baseline(threads: int | None = None, device: torch.device = PROCESSOR) -> Baseline:
    """The baseline of a prepared process, or one taken now, which then includes model and data of the caller.

    The context of a GPU takes memory of the process, too. It is made here, and belongs to the process at rest.
    """
    resting = _prepared[0] if _prepared else take_baseline(threads)
    if is_at_rest(device):
        return resting
    before = read_status()
    device_at_rest(device)
    release_memory()
    after = read_status()
    grown = {"anon": after.anon - before.anon, "data": after.data - before.data}
    resting = replace(resting, anon=resting.anon + grown["anon"], data=resting.data + grown["data"])
    if _prepared:
        _prepared[:] = [resting]
    return resting


def choose_device(name: str | None) -> torch.device:
    """The device of that name; by default CUDA if there is one.

    Without a number it is the current GPU: in a launch that of the local rank.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"'{name}' is not a device; use cpu or cuda[:N].") from error
    if device.type != "cpu" and not has_own_memory(device):
        raise UsageError(f"snugfit trains on cpu and cuda, not on '{name}'.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device; use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(f"this machine has {count} CUDA device{'s' * (count != 1)}, and no {name}; use cuda:0.")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    return torch.device(device.type, device.index or 0) if has_own_memory(device) else device


def describe_hardware(device: torch.device) -> Hardware:
    """The hardware that a profile is valid for."""
    if (found := device_at_rest(device)) is not None:
        name, memory_bytes = found.memory.name, found.memory.total
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
