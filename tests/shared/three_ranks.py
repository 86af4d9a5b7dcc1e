"""Real processes of one small world, which a test may kill or stop."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from processes import forking, free_port

from snugfit._training.launch import Commands, Heartbeat, join, naming_lost, world
from snugfit.errors import SnugfitError


def add_up(limit: float, what: str) -> None:
    """Add up tensors over all ranks for ever."""
    here = dataclasses.replace(world(), timeout_seconds=limit)
    with (
        join(here),
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


def run_rank(said: str, environment: dict[str, str], limit: float, what: str) -> None:
    """One rank, whose output goes to a file."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1), os.dup2(out, 2)
    os.environ.update(environment)
    try:
        add_up(limit, what)
    except SnugfitError as error:
        print("ERROR", type(error).__name__, error, flush=True)
        os._exit(error.exit_code)  # as the interpreter ends, torch's store may abort while it connects to who is lost


class Ranks:
    """Three processes that add up tensors for ever; a context manager that kills what is left of them."""

    def __init__(self, folder: Path, limit: float, what: str = "sums"):
        context, port = forking(), free_port()
        self.said = [folder / f"rank{rank}.txt" for rank in range(3)]
        self.all = []
        for rank, said in enumerate(self.said):
            ranks = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3}
            named = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {key: str(value) for key, value in named.items()}
            self.all.append(context.Process(target=run_rank, args=(str(said), environment, limit, what), daemon=True))
        for process in self.all:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.join()

    def wait_until_ready(self):
        for process, said in zip(self.all, self.said, strict=True):
            while not said.exists() or "ready\n" not in said.read_text():
                assert process.is_alive(), "a process ended before it was ready"
                time.sleep(0.01)

    def signal(self, rank: int, number: signal.Signals) -> float:
        os.kill(self.all[rank].pid, number)
        return time.monotonic()

    def end(self, rank: int, seconds: float) -> tuple[int, str]:
        """Exit code and last words of a process, which must come within so many seconds."""
        self.all[rank].join(seconds)
        assert self.all[rank].exitcode is not None, f"rank {rank} goes on after {seconds} s"
        said = self.said[rank].read_text()
        return self.all[rank].exitcode, said[said.find("ERROR") :] if "ERROR" in said else said
