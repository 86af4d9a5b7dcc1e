"""Processes that other launchers than ours start meet, each as what its launcher calls it, and train a network."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

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
LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"),
    "mpirun.openmpi": ("mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n", "2"),
    "mpiexec.hydra": ("mpiexec.hydra", "-n", "2"),
    "srun": ("srun", "--immediate=20", "-n", "2"),
}
TRAINING = (
    *("--strategy", "tiled", "--model", "smallconv", "--data", "digits", "--image-size", "8", "--devices", "2"),
    *("--epochs", "1", "--max-train", "64", "--max-val", "32", "--threads", "1", "--out", "run"),
)
SNUGFIT = (sys.executable, "-m", "snugfit")


def require(launcher):
    """Skip if the launcher is not installed, or has no cluster."""
    if launcher == "torchrun":
        return
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    if launcher == "srun":
        found = subprocess.run(["sinfo", "-h", "-N", "-t", "idle"], capture_output=True, timeout=20, check=False)
        if found.returncode or not found.stdout:
            pytest.skip("no host of Slurm is idle")


def output(folder, launcher, *command):
    """What a command in a folder prints that a launcher starts; the processes meet at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    own = {"PET_MASTER_PORT" if launcher == "torchrun" else "MASTER_PORT": port}
    done = subprocess.run(
        [*LAUNCHERS.get(launcher, ()), *command],
        env={**os.environ, **root, **own}, cwd=folder, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_meet(launcher, tmp_path):
    require(launcher)
    printed = output(tmp_path, launcher, sys.executable, "-c", PROGRAM)
    assert sorted(re.findall("<(.*?)>", printed)) == ["0 of 2, here 0 of 2: 3", "1 of 2, here 1 of 2: 3"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights that two processes of torchrun have trained, when asked for."""
    folder = tmp_path_factory.mktemp("torchrun")

    def trained():
        if not (folder / "run").exists():
            output(folder, "torchrun", *SNUGFIT, "train", *TRAINING)
        return load_file(folder / "run" / "model.safetensors")

    return trained


def assert_same(folder, weights):
    found, expected = load_file(folder / "run" / "model.safetensors"), weights()
    assert found.keys() == expected.keys() and all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [each for each in LAUNCHERS if each != "torchrun"])
def test_a_run_ends_with_the_weights_of_torchrun(launcher, weights, tmp_path):
    require(launcher)
    output(tmp_path, launcher, *SNUGFIT, "train", *TRAINING)
    assert_same(tmp_path, weights)


@pytest.mark.slow
def test_the_printed_batch_script_trains(weights, tmp_path, monkeypatch):
    require("srun")
    (tmp_path / "snugfit").write_text(f'#!/bin/sh\nexec {" ".join(SNUGFIT)} "$@"\n')
    (tmp_path / "snugfit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Path(tmp_path, "job.sh").write_text(output(tmp_path, None, *SNUGFIT, "plan", *TRAINING, "--sbatch"))
    output(tmp_path, None, "sbatch", "--wait", "--output", "job.log", "job.sh")
    assert_same(tmp_path, weights)
