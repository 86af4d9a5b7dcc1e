"""Real processes of one small world, which a test may kill or stop."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

LOOP = """
import dataclasses, os, sys, time
import torch, torch.distributed as dist
from snugfit.errors import SnugfitError
from snugfit._training.launch import Commands, Heartbeat, join, naming_lost, world

limit, what = float(sys.argv[1]), sys.argv[2]
here = dataclasses.replace(world(), timeout_seconds=limit)
try:
    with (
        join(here) as group,
        Heartbeat(here) as heartbeat,
        naming_lost(heartbeat),
        Commands(heartbeat) as commands,
    ):
        print("joined", flush=True)
        for step in range(10**9):
            if what == "commands":
                if step == 3:
                    dist.barrier()
                    print("ready", flush=True)
                    time.sleep(600 if here.is_gateway else 0)
                if here.is_gateway:
                    commands.send(f"step {step}")
                else:
                    assert commands.receive() == f"step {step}"
            if what == "fault" and step == 5 and here.rank == 1:
                raise ValueError("a fault of rank 1's own")
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert total[0] == here.size
            if what != "commands" and step == 3:
                print("ready", flush=True)
            if what == "end" and step == 20:
                break
            time.sleep(0.01)
except SnugfitError as error:
    print("ERROR", type(error).__name__, error, flush=True)
    os._exit(error.exit_code)  # as the interpreter ends, torch's store may abort while it connects to who is lost
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Ranks:
    """Processes that add up tensors for ever; a context manager that kills what is left of them."""

    def __init__(self, folder: Path, limit: float, what: str = "sums", size: int = 3, started: int | None = None):
        script = folder / "loop.py"
        script.write_text(LOOP)
        port = free_port()
        self.all = []
        for rank in range(size if started is None else started):
            ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            named = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            environment = {**os.environ, **{key: str(value) for key, value in named.items()}}
            command = [sys.executable, str(script), str(limit), what]
            self.all.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.wait()
            process.stdout.close()

    def wait_until_ready(self):
        for process in self.all:
            while (line := process.stdout.readline().strip()) != "ready":
                assert line or process.poll() is None, "a process ended before it was ready"

    def signal(self, rank: int, number: signal.Signals) -> float:
        self.all[rank].send_signal(number)
        return time.monotonic()

    def end(self, rank: int, seconds: float) -> tuple[int, str]:
        """Exit code and last words of a process, which must come within so many seconds."""
        said, _ = self.all[rank].communicate(timeout=seconds)
        return self.all[rank].returncode, said[said.find("ERROR") :] if "ERROR" in said else said
