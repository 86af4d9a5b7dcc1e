"""Ray Train: each worker runs one process of a `tiled` run, with the memory that the plan says."""

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import ray.train.collective
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import snugfit

RUN = Path("runs/ray").absolute()
PROCESSES, THREADS = 2, 1


def train_func(config: dict[str, list[str]]) -> None:
    """Run the command as one process: Ray has set RANK, WORLD_SIZE, MASTER_ADDR and OMP_NUM_THREADS."""
    meeting = None
    if os.environ["RANK"] == "0":  # Ray's own processes meet on its MASTER_PORT
        with socket.socket() as free:
            free.bind((os.environ["MASTER_ADDR"], 0))
            meeting = {"MASTER_PORT": str(free.getsockname()[1]), "SNUGFIT_SECRET": secrets.token_hex(32)}
    meeting = ray.train.collective.broadcast_from_rank_zero(meeting)
    command = [sys.executable, "-m", "snugfit", *config["command"]]
    subprocess.run(command, env={**os.environ, **meeting}, check=True)


def main() -> None:
    """Plan, and train with as many workers, cores and bytes as the plan needs."""
    planned = snugfit.plan(
        "smallconv",
        "digits",
        strategy="tiled",
        devices=PROCESSES,
        threads=THREADS,
        memory="60MB",
        epochs=1,
        max_train=64,
        max_val=40,
        out=str(RUN),
    )
    plan = planned.plan
    assert plan.command is not None and plan.choice is not None and plan.total_bytes is not None
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"command": list(plan.command[plan.command.index("train") :])},
        scaling_config=ScalingConfig(
            num_workers=plan.choice.processes,
            resources_per_worker={"CPU": plan.hardware.threads, "memory": plan.total_bytes},
        ),
        run_config=RunConfig(storage_path=str(RUN.parent)),
    )
    trainer.fit()
    print(f"trained by {plan.choice.processes} workers: {(RUN / 'model.safetensors').exists()}")


if __name__ == "__main__":
    main()
