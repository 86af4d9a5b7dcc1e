"""Where a run computes and where it reads its data, in a process with as many threads as cores."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
os.environ["OMP_PROC_BIND"] = "true"
import snugfit, torch
from torch import nn

computing, reading, own = [], set(), {name} == "fit"

def loss(outputs, targets):
    computing.append((torch.is_grad_enabled(), len(os.sched_getaffinity(0))))
    return nn.functional.cross_entropy(outputs, targets)

class Cores:
    def update(self, outputs, targets):
        computing.append((False, len(os.sched_getaffinity(0))))
    def compute(self):
        return 0.0
    def reset(self):
        pass

class Images:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        reading.add(len(os.sched_getaffinity(0)))
        return torch.rand(3, 8, 8), index % 2

snugfit.prepare_process()
assert len(os.sched_getaffinity(0)) > 1
network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
if own:
    images = torch.rand(16, 3, 8, 8), torch.arange(16) % 2
    with snugfit.fit(network, loss, memory="60MB", batch_size=16, example=images) as step:
        computing.clear()
        step(*images)
else:
    data = snugfit.from_dataset(Images(), val=Images())
    plan = snugfit.plan(network, data, memory="60MB", epochs=1, batch_size=16, loss=loss, metrics={"cores": Cores()})
    computing.clear()
    plan.run(out="run")
    assert reading == {len(os.sched_getaffinity(0))}, reading
assert (True, 1) in computing, computing
assert own or {cores for trains, cores in computing if not trains} == {1}, computing
assert len(os.sched_getaffinity(0)) > 1
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores on Linux"
)
@pytest.mark.parametrize("name", ["plan", "fit"])
def test_steps_compute_on_a_core_of_their_own_and_data_is_read_on_all(tmp_path, name):
    variables = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "OMP_PROC_BIND")}
    script = SCRIPT.replace("{name}", repr(name))
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
