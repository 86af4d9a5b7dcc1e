"""Launchers other than torchrun: what they call a process becomes the variables that torchrun sets."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from snugfit.errors import UsageError

LOOPBACK_ADDRESS = "127.0.0.1"
DEFAULT_PORT = "29400"
JOB_VARIABLE = "SNUGFIT_JOB"
"""Name of the job in which a launcher started this process: jobs that meet in one store by mistake stay apart."""


@dataclass(frozen=True)
class Launcher:
    """The variables by which one launcher tells a process what it is; empty for what it does not tell.

    Attributes:
        name: of the launcher.
        rank, size, local_rank, local_size: torchrun's ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``.
        local_ranks: lists the ranks on this host, with commas between them, where there is no ``local_size``.
        addr, port: where processes meet, on the host of rank 0.
        job: variables that identify the job.
        threads: cores of each process.
        advice: how to set ``MASTER_ADDR`` for several hosts.
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    local_ranks: str = ""
    addr: str = ""
    port: str = ""
    job: tuple[str, ...] = ()
    threads: str = ""
    advice: str = ""

    def started(self, variables: Mapping[str, str]) -> bool:
        """Whether it started a process. Slurm may set MPICH's rank and size, too, but not those on this host."""
        return all(variables.get(name) for name in (self.rank, self.size, self.local_size or self.rank))


LAUNCHERS = (
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
        advice="mpirun -x MASTER_ADDR=ADDRESS",
    ),
    Launcher(
        "MPICH",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        advice="mpirun -genv MASTER_ADDR ADDRESS",
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",  # set by srun alone, unlike SLURM_NTASKS, which a batch script has too
        "SLURM_LOCALID",
        local_ranks="SLURM_GTIDS",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        threads="SLURM_CPUS_PER_TASK",
        advice='export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    ),
    Launcher(
        "Kubeflow Trainer",
        "PET_NODE_RANK",
        "PET_NNODES",
        addr="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
        advice="a runtime with an mlPolicy of torch",
    ),
)
"""One launcher may start another, such as mpirun within srun: the inner one comes first."""


def name_process(variables: MutableMapping[str, str]) -> None:
    """Add the variables of torchrun to those of the launcher that started this process, if it started several.

    Variables that are set already stay. Nothing is added if ``RANK`` or ``WORLD_SIZE`` is set.

    Raises:
        UsageError: there are several hosts, and nothing names that of rank 0.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return
    launcher = next((each for each in LAUNCHERS if each.started(variables)), None)
    if launcher is None or variables[launcher.size] == "1":
        return
    size, local_size = variables[launcher.size], _local_size(launcher, variables)
    addr = variables.get("MASTER_ADDR") or variables.get(launcher.addr)
    if not addr and local_size != size:
        raise UsageError(
            f"{launcher.name} started {size} processes, {local_size} of them here, and MASTER_ADDR is not set.\n"
            f"Set it to the address of rank 0's host: {launcher.advice}."
        )
    given = {
        "RANK": variables[launcher.rank],
        "WORLD_SIZE": size,
        "LOCAL_RANK": variables.get(launcher.local_rank),
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": addr or LOOPBACK_ADDRESS,
        "MASTER_PORT": variables.get(launcher.port) or DEFAULT_PORT,
        "OMP_NUM_THREADS": variables.get(launcher.threads),
        JOB_VARIABLE: _job(launcher, variables),
    }
    for name, value in given.items():
        if value and not variables.get(name):
            variables[name] = value


def _local_size(launcher: Launcher, variables: MutableMapping[str, str]) -> str:
    """Processes on this host; 1 if the launcher does not tell."""
    if launcher.local_ranks:
        return str(len(variables.get(launcher.local_ranks, "").split(",")))
    return variables.get(launcher.local_size) or "1"


def _job(launcher: Launcher, variables: MutableMapping[str, str]) -> str:
    """Name of the job, like ``slurm-7-0``; empty if the launcher does not tell."""
    numbers = [variables[name] for name in launcher.job if name in variables]
    return "-".join([*launcher.name.lower().split(), *numbers]) if numbers else ""
