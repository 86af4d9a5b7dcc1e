"""``snugfit plan --sbatch`` and ``--kubernetes``: a job on stdout, and the plan on stderr."""

import pytest
import yaml

from snugfit._cli import plan as plan_module
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Cost, Plan
from snugfit._core.workload import Workload
from snugfit.errors import UsageError

HARDWARE = Hardware("cpu", "fake", 1, 10**9, "Linux", "none", True)
CHOICE = Candidate("backprop", True, {}, Cost(90, 1.0, 10.0))
PLAN = Plan(
    Workload("m", "d", (1, 8, 8), 10, 100, 10, 10), Budget("1MB"), HARDWARE, (CHOICE,), 0,
    command=("snugfit", "train", "--model", "m"),
)  # fmt: skip


@pytest.fixture
def planned(monkeypatch):
    answer = {"plan": PLAN.to_json(), "infeasible": None}
    monkeypatch.setattr(plan_module, "_cached_or_planned", lambda *_: answer)


def test_stdout_is_the_script(snugfit, planned):
    outcome = snugfit("plan", "--sbatch")
    assert outcome.code == 0 and outcome.out.startswith("#!/bin/bash\n")
    assert outcome.out.endswith("snugfit train --model m\n") and "Chosen: backprop" in outcome.err


def test_stdout_is_the_manifest(snugfit, planned):
    outcome = snugfit("plan", "--kubernetes", "registry.org:5000/me/snugfit@sha256:0a")
    (job,) = yaml.safe_load_all(outcome.out)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert outcome.code == 0 and container["image"] == "registry.org:5000/me/snugfit@sha256:0a"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--sbatch", "--json"), "--sbatch and --json both print on stdout"),
        (("--sbatch", "--kubernetes", "i"), "--sbatch and --kubernetes both"),
        (("--kubernetes", "an image"), "--kubernetes must be a container image like"),
        (("--kubernetes", ""), "--kubernetes must be"),
    ],
)
def test_one_result_at_a_time(snugfit, flags, words):
    outcome = snugfit("plan", "--model", "m", *flags)
    assert outcome.code == UsageError.exit_code and words in outcome.err


def test_nothing_that_fits_is_no_job(snugfit):
    outcome = snugfit("plan", "--memory", "1MB", "--model", "too-big", "--sbatch")
    assert outcome.code == 3 and not outcome.out


def test_a_launcher_with_several_hosts_needs_an_address(snugfit, monkeypatch):
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}.items():
        monkeypatch.setenv(name, value)
    outcome = snugfit("train", "--model", "vgg8", "--data", "digits", "--strategy", "tiled")
    assert outcome.code == UsageError.exit_code and "MASTER_ADDR is not set" in outcome.err
