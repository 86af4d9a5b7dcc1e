"""Jobs of a plan: a batch script that bash runs, and manifests; memory is that of the plan."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import yaml

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.machine_memory import MachineMemory
from snugfit._core.plan import Candidate, Cost, Plan
from snugfit._core.run_memory import RunMemory
from snugfit._core.workload import Workload
from snugfit._report.cluster_jobs import kubernetes_manifest, sbatch_script
from snugfit.errors import UsageError

TRAIN = ("train", "--model", "vgg16", "--data", "folder:my photos")
ONE = Plan(
    Workload("torchvision:ResNet_18", "digits", (1, 32, 32), 10, 100, 10, 10),
    Budget("100MB"),
    Hardware("cpu", "a processor", 3, 8 * 2**30, "Linux x86_64", "2.13.0", True),
    (Candidate("backprop", True, {}, Cost(90_000_000, 100.0, 600.5)),),
    0,
    command=("snugfit", *TRAIN),
    memory=RunMemory(170_000_000, 30_000_000, MachineMemory(8 * 2**30), 7_000_000),
)
TILED = replace(
    ONE,
    candidates=(Candidate("tiled", True, {"processes": 4}, Cost(90_000_000, 100.0, 600.5)),),
    command=("snugfit", "cluster", "launch", "--processes", "4", "--", *TRAIN),
)
NEEDED = 170_000_000 + 30_000_000 + 100_000_000 + 7_000_000 + 24 * 2**20
CUDA = replace(ONE, memory=None, hardware=replace(ONE.hardware, device="cuda:0"))


def options(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))


def run(script, folder):
    """What the script calls, with programs of Slurm that print; as one dictionary."""
    for name, body in {
        "scontrol": 'printf "node3\\nnode4\\n"',
        "srun": 'env | grep -E "^(MASTER|SNUGFIT|OMP)_"; printf "arg=%s\\n" "$@"',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    slurm = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12345", "SLURM_CPUS_PER_TASK": "3",
             "SLURM_JOB_NODELIST": "node[3-4]"}  # fmt: skip
    done = subprocess.run(["bash", "-c", script], env=slurm, capture_output=True, text=True, check=True)
    assert not done.stderr
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    return {name: value for name, _, value in lines if name != "arg"}, [v for name, _, v in lines if name == "arg"]


bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@bash
def test_a_batch_script_starts_every_process_with_what_it_needs_to_meet(tmp_path):
    variables, arguments = run(sbatch_script(TILED), tmp_path)
    assert arguments == ["--cpus-per-task=3", "--kill-on-bad-exit=1", "snugfit", *TRAIN]
    secret = variables.pop("SNUGFIT_SECRET")
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert variables == {"MASTER_ADDR": "node3", "MASTER_PORT": "22345", "OMP_NUM_THREADS": "3"}
    assert run(sbatch_script(TILED), tmp_path)[0]["SNUGFIT_SECRET"] != secret


@bash
def test_one_process_meets_nobody(tmp_path):
    variables, arguments = run(sbatch_script(ONE), tmp_path)
    assert variables == {"OMP_NUM_THREADS": "3"} and arguments[2:] == ["snugfit", *TRAIN]


@pytest.mark.parametrize(("plan", "tasks"), [(ONE, "1"), (TILED, "4")])
def test_a_batch_script_asks_for_what_the_plan_needs(plan, tasks):
    found = options(sbatch_script(plan))
    asked = int(found["mem-per-cpu"].removesuffix("M")) * 3 * 2**20
    assert 0 <= asked - NEEDED < 3 * 2**20, "the least whole MiB per core"
    assert (found["ntasks"], found["cpus-per-task"], found["time"]) == (tasks, "3", str(10 + 21))
    assert found["job-name"] == "snugfit-torchvision-resnet-18"


def test_the_comment_adds_up():
    (line,) = (each for each in sbatch_script(ONE).splitlines() if "Memory of each process" in each)
    *parts, total = map(float, re.findall(r"([\d.]+) MB", line))
    assert len(parts) == 4 and abs(sum(parts) - total) < 0.3


def test_a_plan_without_a_budget_needs_its_peak():
    found = options(sbatch_script(replace(ONE, budget=Budget())))
    asked = int(found["mem-per-cpu"].removesuffix("M")) * 3 * 2**20
    assert 0 <= asked - (NEEDED - 10_000_000) < 3 * 2**20


def container_of(job_spec):
    (container,) = job_spec["template"]["spec"]["containers"]
    return container


def test_one_process_is_a_job():
    (job,) = yaml.safe_load_all(kubernetes_manifest(ONE, "me/snugfit:1"))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    container = container_of(job["spec"])
    assert container["command"] == ["snugfit", *TRAIN] and container["image"] == "me/snugfit:1"
    limits = container["resources"]["limits"]
    assert limits == container["resources"]["requests"] and limits["cpu"] == "3"
    assert 0 <= int(limits["memory"].removesuffix("Mi")) * 2**20 - NEEDED < 2**20
    assert job["spec"]["activeDeadlineSeconds"] == 31 * 60
    assert {each["name"]: each.get("value") for each in container["env"]}["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("argument", ["/photos", "folder:/photos/a\nb", "--data-dir=/photos"])
def test_paths_of_this_machine_are_named_in_a_comment(argument):
    manifest = kubernetes_manifest(replace(ONE, command=("snugfit", *TRAIN, argument)), "me/snugfit:1")
    (job,) = yaml.safe_load_all(manifest)
    assert container_of(job["spec"])["command"] == ["snugfit", *TRAIN, argument]
    (line,) = [line for line in manifest.splitlines() if "paths of this machine" in line]
    assert line.startswith("# ") and line.endswith(json.dumps(argument))
    assert "paths of this machine" not in kubernetes_manifest(ONE, "me/snugfit:1")


def test_several_processes_are_pods_of_kubeflow_trainer():
    runtime, job = yaml.safe_load_all(kubernetes_manifest(TILED, "me/snugfit:1"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"] == "TrainingRuntime"
    assert job["spec"]["trainer"] == {"numNodes": 4, "numProcPerNode": 1}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    container = container_of(replicated["template"]["spec"])
    (alone,) = yaml.safe_load_all(kubernetes_manifest(ONE, "me/snugfit:1"))
    assert container["resources"] == container_of(alone["spec"])["resources"], "one process per pod"
    secret = next(each for each in container["env"] if each["name"] == "SNUGFIT_SECRET")
    assert secret["valueFrom"]["secretKeyRef"] == {"name": "snugfit", "key": "secret"} and "value" not in secret
    assert container["command"] == ["snugfit", *TRAIN]


def test_on_cuda_a_job_asks_for_a_gpu_and_no_memory():
    script, manifest = sbatch_script(CUDA), kubernetes_manifest(CUDA, "me/snugfit:1")
    assert options(script)["gpus-per-task"] == "1" and "mem-per-cpu" not in options(script)
    assert "unknown on CUDA" in script and "unknown on CUDA" in manifest
    limits = container_of(yaml.safe_load(manifest)["spec"])["resources"]["limits"]
    assert limits == {"cpu": "3", "nvidia.com/gpu": "1"}


def test_a_long_name_is_cut_to_one_that_kubernetes_takes():
    plan = replace(ONE, workload=replace(ONE.workload, model="my_package.models:" + "X" * 80))
    name = yaml.safe_load(kubernetes_manifest(plan, "i"))["metadata"]["name"]
    assert re.fullmatch("[a-z]([a-z0-9-]{0,48}[a-z0-9])", name)


def test_a_plan_without_a_command_is_refused():
    with pytest.raises(UsageError, match="no command"):
        sbatch_script(replace(ONE, command=None))
