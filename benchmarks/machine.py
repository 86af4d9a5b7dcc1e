"""The machine and the source behind a result."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import snugfit
from benchmarks.common import ROOT
from snugfit._engine.process import choose_device, describe_hardware


def describe_machine(device: str | None) -> dict[str, Any]:
    """Hardware and versions behind a result."""
    hardware = describe_hardware(choose_device(device))
    return {
        "hardware": hardware.name,
        "device": hardware.device,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": hardware.memory_bytes,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": hardware.torch,
        "snugfit": snugfit.__version__,
    }


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Context of what is timed on a GPU: processes of other measurements wait, and prepare meanwhile."""
    if device.type == "cpu":
        yield
        return
    with (Path(tempfile.gettempdir()) / f"snugfit-{device.type}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def commit() -> str:
    """Short hash of the source that runs, with ``+`` after it where files under src differ from it."""
    try:
        head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "src"], cwd=ROOT, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def slug(machine: dict[str, Any]) -> str:
    """A machine's name for files, like ``amd-epyc-2-cores``."""
    cores = f"-{machine['cores']}-cores" if machine["device"] == "cpu" else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['hardware']}{cores}".lower()).strip("-")
