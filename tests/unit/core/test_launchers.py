"""Variables of srun, mpirun and Kubeflow Trainer, as the real ones set them, become those of torchrun."""

import pytest

from snugfit._core.launchers import DEFAULT_PORT, name_process
from snugfit._training.launch import world
from snugfit.errors import UsageError

SRUN = {  # Slurm 22.05: the second of two tasks on the first of two hosts
    "SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "1", "SLURM_GTIDS": "0,1",
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "4",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "444071937",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KUBEFLOW = {
    "PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip


def named(**given):
    name_process(given)
    return given


@pytest.mark.parametrize(
    ("given", "local", "job"),
    [
        (SRUN, (1, 2), "slurm-7-0"),
        (OPEN_MPI, (1, 2), "open-mpi-444071937"),
        (MPICH, (1, 2), ""),
        (KUBEFLOW, (0, 1), ""),
    ],
)
def test_a_process_of_a_launcher(given, local, job):
    here = world(named(**given, MASTER_ADDR="10.0.0.1"))
    assert (here.rank, here.size, here.local_rank, here.local_size) == (1, 3, *local)
    assert (here.addr, here.run_id) == ("10.0.0.1", job)
    assert here.port == int(given.get("PET_MASTER_PORT", DEFAULT_PORT))
    assert here.threads == (4 if given is SRUN else None)


def test_slurm_may_set_the_variables_of_mpich():
    here = world(named(**SRUN, PMI_RANK="1", PMI_SIZE="3", MASTER_ADDR="10.0.0.1"))
    assert (here.local_rank, here.local_size, here.run_id) == (1, 2, "slurm-7-0")


def test_kubeflow_names_the_first_pod():
    assert world(named(**KUBEFLOW)).addr == "job-node-0-0.job"


@pytest.mark.parametrize("given", [SRUN, OPEN_MPI, MPICH])
def test_several_hosts_need_an_address(given):
    with pytest.raises(UsageError, match="started 3 processes, 2 of them here, and MASTER_ADDR is not set") as caught:
        named(**given)
    assert "MASTER_ADDR" in str(caught.value).splitlines()[1], "how this launcher passes it"


def test_processes_of_one_host_meet_on_its_loopback():
    one_host = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "2"}
    assert world(named(**one_host)).addr == "127.0.0.1"


def test_what_is_set_stays():
    found = named(**SRUN, MASTER_ADDR="a", MASTER_PORT="5", OMP_NUM_THREADS="1", SNUGFIT_JOB="mine")
    assert [found[name] for name in ("MASTER_PORT", "OMP_NUM_THREADS", "SNUGFIT_JOB")] == ["5", "1", "mine"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in SRUN.items() if "STEP" not in name},  # a batch script outside srun
        {**SRUN, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun within srun
        {**MPICH, "WORLD_SIZE": ""},
    ],
)
def test_other_processes_are_left_alone(given):
    assert named(**given) == given


def test_the_inner_launcher_counts():
    """mpirun within srun: the variables of srun are those of its daemon."""
    found = named(**{**SRUN, "SLURM_PROCID": "0"}, **OPEN_MPI, MASTER_ADDR="a")
    assert (found["RANK"], found["SNUGFIT_JOB"]) == ("1", "open-mpi-444071937")


def test_a_number_that_is_none_is_refused_with_its_value():
    with pytest.raises(UsageError, match="WORLD_SIZE is '1:4'"):
        world(named(**{**KUBEFLOW, "PET_NNODES": "1:4"}))
