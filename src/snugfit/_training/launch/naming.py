"""Naming the lost process behind errors of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

import torch.distributed as dist

from snugfit._training.launch.heartbeat import Heartbeat
from snugfit.errors import WorkerLostError

_OF_PEERS = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|timed ?out|broken pipe|socket|recvvalue|store", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"timed ?out", re.IGNORECASE)
_POLL_SECONDS = 0.05


@contextlib.contextmanager
def naming_lost(heartbeat: Heartbeat, resume: str | None = None) -> Iterator[None]:
    """Convert errors of collectives, at most the heartbeat's limit later, to one that names the lost process.

    Args:
        heartbeat: knows who is silent.
        resume: run folder, which the message says how to resume.

    Raises:
        WorkerLostError: a process died, was stopped, or cannot be reached.
    """
    try:
        yield
    except RuntimeError as error:
        if not _of_peers(error):
            raise
        raise lost_error(heartbeat, resume, str(error)) from error


def lost_error(heartbeat: Heartbeat, resume: str | None = None, reason: str = "") -> WorkerLostError:
    """Wait until the heartbeat knows who is silent, and build the error.

    A failed collective is evidence too, so half the limit of silence is enough. A collective that already waited for
    the limit is not followed by another such wait.

    Args:
        heartbeat: knows who is silent.
        resume: run folder.
        reason: torch's message, shown if everyone seems to be alive.
    """
    patience = 2 * heartbeat.interval + (0.0 if _TIMED_OUT.search(reason) else heartbeat.limit)
    deadline = time.monotonic() + patience
    while not (ranks := heartbeat.lost(heartbeat.limit / 2)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if not ranks:
        first = (reason.strip() or "no reason was given").splitlines()[0][:200]
        what = f"the processes lost contact though each of them is alive: {first}"
    else:
        what = f"lost {' and '.join(heartbeat.describe(rank) for rank in ranks)}: it died, was stopped or was cut off."
    return WorkerLostError(f"{what}\n{_advice(heartbeat, resume)}")


def _advice(heartbeat: Heartbeat, resume: str | None) -> str:
    here = heartbeat.here
    if here.restarts < here.max_restarts:
        again = f"restart {here.restarts + 1} of {here.max_restarts}"
        return f"All processes are started again, and go on from the last checkpoint ({again})."
    return f"`snugfit train --resume {resume or 'RUN'}` goes on from the last checkpoint."


def _of_peers(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or _OF_PEERS.search(str(error)) is not None
