"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when the parent is killed: an orphan must not write beside a resumed run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_agent() -> None:
    """The same where torchrun started this process: its agent's host may be started anew while this one lives on."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
