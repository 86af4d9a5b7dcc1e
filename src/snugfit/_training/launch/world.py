"""The identity of this process among those that torchrun, or another launcher, started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from snugfit._core.amounts import parse_seconds
from snugfit._core.hardware import cores
from snugfit._core.launchers import JOB_VARIABLE
from snugfit.errors import UsageError

GATEWAY = 0
"""Rank of the process that reads data, writes the run folder and sends commands to the others."""
TIMEOUT_VARIABLE = "SNUGFIT_TIMEOUT"
DEFAULT_TIMEOUT = "10s"
JOIN_VARIABLE = "SNUGFIT_JOIN_TIMEOUT"
DEFAULT_JOIN = "60s"
SECRET_VARIABLE = "SNUGFIT_SECRET"
"""Set by the agent, which receives the secret from the launcher over ssh; no command line shows it."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """One process of several.

    Attributes:
        local_rank, local_size: among the processes of this host.
        restarts: round of the launch: how often all processes were restarted, the same on every host.
        addr, port: of the gateway's store.
        run_id: name of the launch.
        timeout_seconds: timeout of a collective, and longest silence of a process: `--timeout` of the launch.
        join_seconds: how long processes wait for each other at the start: `--join-timeout` of the launch.
        threads: compute threads of this process from ``OMP_NUM_THREADS``; None if it is not set.
        secret: of the launch, which authenticates messages in the store; empty under plain torchrun.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int
    addr: str
    port: int
    max_restarts: int = 0
    run_id: str = ""
    timeout_seconds: float = 10.0
    join_seconds: float = 60.0
    threads: int | None = None
    secret: str = field(default="", repr=False)

    @property
    def is_gateway(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == GATEWAY


def world(given: Mapping[str, str] = os.environ) -> World | None:
    """The identity of this process, from the variables that torchrun sets; None if it has none.

    Raises:
        UsageError: variables are missing, are not numbers, or contradict each other.
    """
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    missing = [name for name in _NEEDED if not given.get(name)]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set, though RANK or WORLD_SIZE is: this looks like half a torchrun.\n"
            "Start processes with `snugfit cluster launch` or torchrun, or unset RANK and WORLD_SIZE."
        )
    found = World(
        rank=_number(given, "RANK"),
        size=_number(given, "WORLD_SIZE"),
        local_rank=_number(given, "LOCAL_RANK"),
        local_size=_number(given, "LOCAL_WORLD_SIZE", 1),
        restarts=_number(given, "TORCHELASTIC_RESTART_COUNT"),
        addr=given["MASTER_ADDR"],
        port=_number(given, "MASTER_PORT"),
        max_restarts=_number(given, "TORCHELASTIC_MAX_RESTARTS"),
        run_id=given.get("TORCHELASTIC_RUN_ID") or given.get(JOB_VARIABLE, ""),
        timeout_seconds=parse_seconds(given.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT)),
        join_seconds=parse_seconds(given.get(JOIN_VARIABLE, DEFAULT_JOIN)),
        threads=_threads(given),
        secret=given.get(SECRET_VARIABLE, ""),
    )
    _check(found)
    return found


def _number(given: Mapping[str, str], name: str, default: int = 0) -> int:
    text = given.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(
            f"{name} is '{text}', which is no whole number; start processes with `snugfit cluster launch`."
        )
    return int(text)


def _check(found: World) -> None:
    if found.rank >= found.size or found.local_rank >= found.local_size or found.local_size > found.size:
        raise UsageError(
            f"rank {found.rank} of {found.size}, local rank {found.local_rank} of {found.local_size}: "
            "ranks count from 0 and stay below the number of processes.\n"
            "Start processes with `snugfit cluster launch`."
        )
    if not 0 < found.port < 2**16:
        raise UsageError(f"MASTER_PORT is {found.port}; a port is between 1 and 65535.")


def _threads(given: Mapping[str, str]) -> int | None:
    """The first level of ``OMP_NUM_THREADS``, which may have several, like ``4,2``.

    torchrun writes 1 for several processes of a host if the user set nothing. A launch of snugfit, recognised by its
    secret, writes each process's share instead; so a 1 there is the user's own.
    """
    text = given.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    by_torchrun = text == "1" and "TORCHELASTIC_RUN_ID" in given and not given.get(SECRET_VARIABLE)
    return int(text) if text.isdecimal() and int(text) and not by_torchrun else None


def share_of_threads(here: World | None, asked: int | None = None) -> int | None:
    """Compute threads of this process: ``--threads``, else its share of the host's cores; None if it is alone."""
    if asked is not None or here is None:
        return asked
    return here.threads or max(1, cores() // here.local_size)
