"""Starts the processes of a tiled benchmark, on this machine or in a small network, and reads what they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.netns import Host

Job = dict[str, Any]


def run_jobs(
    jobs: Sequence[Job], processes: int, hosts: Sequence[Host] = (), timeout: float = 3600
) -> list[dict[str, Any]]:
    """What rank 0 measured in each job.

    Args:
        jobs: what :mod:`benchmarks.tiled_rank` does.
        processes: how many.
        hosts: one per process; all on this machine where there are none.
        timeout: seconds for all of it.
    """
    address, port = (hosts[0].address, 29400) if hosts else ("127.0.0.1", _free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo"}
    started = []
    for rank in range(processes):
        words = [
            sys.executable,
            "-m",
            "benchmarks.tiled_rank",
            str(rank),
            str(processes),
            address,
            str(port),
            json.dumps(jobs),
        ]
        command = hosts[rank].command(*words) if hosts else words
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        out, _ = started[0].communicate(timeout=timeout)
        codes = [process.wait(60) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise RuntimeError(f"processes ended with {codes}")
    return [json.loads(line) for line in out.splitlines()]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
