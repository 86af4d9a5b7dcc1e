"""What a plan needs, as a job: a batch script for Slurm, or a manifest for Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from snugfit._core.launchers import JOB_VARIABLE
from snugfit._core.plan import Plan
from snugfit._quantities import format_bytes, format_seconds
from snugfit._version import __version__
from snugfit.errors import UsageError

MIB = 2**20
TIME_FACTOR, TIME_MINUTES = 2, 10
"""A job may take so many times the predicted seconds, for slower machines, and so many minutes to plan."""
LAUNCHER_BYTES = 24 * MIB
"""For shells and the launcher's own processes in the same control group, and for processes at rest that differ."""
FOLDER = "/snugfit"
"""Where a container has its volume."""
LONGEST_NAME = 40
"""Kubernetes appends to the name of a job, and a name has at most 63 characters."""
_ABSOLUTE = re.compile(r"(--[\w-]+=)?([a-z]+:)?/(?!snugfit(/|$))")
"""An argument that is an absolute path outside the volume, as ``/data``, ``folder:/data`` or ``--data-dir=/data``."""


def needed_bytes(plan: Plan) -> int | None:
    """Memory that a container of one process must allow; None if it is unknown, on CUDA.

    Containers count mapped files too. Those that every step reads stay in memory; the kernel drops the others.
    """
    if plan.memory is None or plan.total_bytes is None:
        return None
    return plan.total_bytes + plan.memory.mapped_bytes + LAUNCHER_BYTES


def sbatch_script(plan: Plan) -> str:
    """A batch script for Slurm that trains by a plan's choice; raises UsageError if the plan has no command."""
    processes, cores, needed = _processes(plan), plan.hardware.threads, needed_bytes(plan)
    options = {"job-name": _name(plan), "ntasks": processes, "cpus-per-task": cores}
    if needed is not None:
        options["mem-per-cpu"] = f"{-(-needed // (cores * MIB))}M"
    if plan.hardware.device.startswith("cuda"):
        options["gpus-per-task"] = 1
    options |= {"time": _minutes(plan), "signal": "TERM@60"}
    lines = ["#!/bin/bash", *(f"# {line}" for line in _explained(plan))]
    lines += [f"#SBATCH --{name}={value}" for name, value in options.items()]
    lines += ["", "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"]
    if processes > 1:
        lines += [
            "# Processes meet on the first host. The secret is new for each job, and on no command line.",
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
            "SNUGFIT_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            "export MASTER_ADDR MASTER_PORT SNUGFIT_SECRET",
        ]
    lines += ["", f"srun --cpus-per-task={cores} --kill-on-bad-exit=1 {shlex.join(_command(plan))}"]
    return "\n".join(lines)


def kubernetes_manifest(plan: Plan, image: str) -> str:
    """A manifest for Kubernetes that trains by a plan's choice in containers of an image.

    One process is a ``Job``. Several are a runtime and a job of Kubeflow Trainer, with one process per pod.

    Raises:
        UsageError: the plan has no command.
    """
    several = _processes(plan) > 1
    lines = [*_explained(plan), f"Data and runs are in {FOLDER}, a volume: the claim `snugfit` must exist."]
    if foreign := [json.dumps(each) for each in _command(plan) if _ABSOLUTE.match(each)]:
        lines.append(f"Change these paths of this machine in `command` to paths below {FOLDER}: {', '.join(foreign)}")
    if several:
        lines.append("So must a secret, which protects what processes tell each other; to create it:")
        lines.append(
            "head -c 32 /dev/urandom | base64 | kubectl create secret generic snugfit --from-file=secret=/dev/stdin"
        )
    objects = _kubeflow(plan, image) if several else [_job(plan, image)]
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + yaml.safe_dump_all(objects, sort_keys=False, width=10_000).rstrip("\n")


def _job(plan: Plan, image: str) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _name(plan)},
        "spec": _job_spec(plan, image, []),
    }


def _kubeflow(plan: Plan, image: str) -> list[dict[str, Any]]:
    """A runtime, with one process per pod, and the job that uses it."""
    name, api = _name(plan), "trainer.kubeflow.org/v1alpha1"
    secret = {"name": "SNUGFIT_SECRET", "valueFrom": {"secretKeyRef": {"name": "snugfit", "key": "secret"}}}
    own = {JOB_VARIABLE: name, "SNUGFIT_JOIN_TIMEOUT": "10min"}
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": _job_spec(plan, image, [*_variables(own), secret]),
    }
    jobs = {"replicatedJobs": [{"name": "node", "template": template}], "failurePolicy": {"maxRestarts": 3}}
    runtime = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {"mlPolicy": {"numNodes": _processes(plan), "torch": {}}, "template": {"spec": jobs}},
    }
    reference = {"apiGroup": api.partition("/")[0], "kind": "TrainingRuntime", "name": name}
    job = {
        "apiVersion": api,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": _processes(plan), "numProcPerNode": 1}},
    }
    return [runtime, job]


def _job_spec(plan: Plan, image: str, variables: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``batch/v1`` calls the specification of a job, with one container."""
    needed = needed_bytes(plan)
    amounts = {"cpu": str(plan.hardware.threads)}
    if needed is not None:
        amounts["memory"] = f"{-(-needed // MIB)}Mi"
    if plan.hardware.device.startswith("cuda"):
        amounts["nvidia.com/gpu"] = "1"
    own = {"OMP_NUM_THREADS": str(plan.hardware.threads), "SNUGFIT_DATA": f"{FOLDER}/data"}
    container = {
        "name": "node",
        "image": image,
        "command": list(_command(plan)),
        "workingDir": FOLDER,
        "env": [*_variables(own), *variables],
        "resources": {"requests": dict(amounts), "limits": amounts},
        "volumeMounts": [{"name": "snugfit", "mountPath": FOLDER}],
    }
    volume = {"name": "snugfit", "persistentVolumeClaim": {"claimName": "snugfit"}}
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": [volume]}
    return {"backoffLimit": 0, "activeDeadlineSeconds": _minutes(plan) * 60, "template": {"spec": pod}}


def _variables(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _explained(plan: Plan) -> Iterator[str]:
    """The plan's figures as comments."""
    choice, memory, needed = plan.choice, plan.memory, needed_bytes(plan)
    assert choice is not None and choice.predicted is not None
    count = f"{choice.processes} processes" if choice.processes > 1 else "1 process"
    seconds = format_seconds(choice.predicted.seconds)
    yield f"snugfit {__version__}: {plan.workload.model} by {choice.strategy}, {count}."
    if memory is None or plan.growth_bytes is None or needed is None:
        yield "Memory of the host is unknown on CUDA: add a limit if the cluster requires one."
    else:
        kind = "peak" if plan.budget.memory_bytes is None else "budget"
        rest, growth, mapped, launcher, total = map(
            format_bytes, (memory.rest_bytes, plan.growth_bytes, memory.mapped_bytes, LAUNCHER_BYTES, needed)
        )
        parts = f"{rest} at rest + {kind} {growth} + mapped files {mapped} + launcher {launcher}"
        yield f"Memory of each process: {parts} = {total}."
    yield f"Time: predicted {seconds} where it was planned, times {TIME_FACTOR}, and {TIME_MINUTES} minutes."


def _command(plan: Plan) -> tuple[str, ...]:
    """The command of one process."""
    if plan.command is None:
        raise UsageError("this plan has no command that could be a job; see what is chosen, and why.")
    return ("snugfit", *plan.command[plan.command.index("train") :])


def _processes(plan: Plan) -> int:
    return 1 if plan.choice is None else plan.choice.processes


def _minutes(plan: Plan) -> int:
    """What the job may take."""
    assert plan.choice is not None and plan.choice.predicted is not None
    return int(-(-plan.choice.predicted.seconds * TIME_FACTOR // 60)) + TIME_MINUTES


def _name(plan: Plan) -> str:
    """A name for the job by the rules of Kubernetes: lower case, digits and hyphens."""
    plain = re.sub("[^a-z0-9]+", "-", f"snugfit-{plan.workload.model}".lower())
    return plain[:LONGEST_NAME].strip("-")
