"""Processes that other launchers than ours start meet, each as what its launcher calls it."""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import os
from snugfit._core.launchers import name_process
name_process(os.environ)
import torch
from snugfit._training.launch import join, world
here = world()
with join(here):
    total = torch.tensor([here.rank + 1.0])
    torch.distributed.all_reduce(total)
print(f"<{here.rank} of {here.size}, here {here.local_rank} of {here.local_size}: {total.item():g}>", flush=True)
"""
PYTHON = (sys.executable, "-c", PROGRAM)
LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", *PYTHON),
    "mpirun.openmpi": ("mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n", "2", *PYTHON),
    "mpiexec.hydra": ("mpiexec.hydra", "-n", "2", *PYTHON),
    "srun": ("srun", "--immediate=20", "-n", "2", *PYTHON),
}


def require(launcher):
    """Skip if the launcher is not installed, or has no cluster."""
    if launcher == "torchrun":
        return
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    if launcher == "srun":
        found = subprocess.run(["sinfo", "-h", "-t", "idle"], capture_output=True, timeout=20, check=False)
        if found.returncode or not found.stdout:
            pytest.skip("no host of Slurm is idle")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_meet(launcher):
    require(launcher)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    own = {"PET_MASTER_PORT" if launcher == "torchrun" else "MASTER_PORT": port}
    environment = {**os.environ, **root, **own}
    done = subprocess.run(
        LAUNCHERS[launcher], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("<(.*?)>", done.stdout)) == ["0 of 2, here 0 of 2: 3", "1 of 2, here 1 of 2: 3"]
