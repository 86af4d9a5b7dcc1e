"""A launcher's variables count to strategies for several processes alone."""

import json
import os

import pytest

from snugfit._cli import train
from snugfit._cli.options import NO_FLAGS, SHOW_ALL
from snugfit._core.request import Request

SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_GTIDS": "0,1"}


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({"strategy": "tiled"}, True),
        ({"strategy": "auto", "devices": 2}, True),
        ({"strategy": "auto"}, False),
        ({"strategy": "backprop"}, False),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_task_of_srun_trains_alone_unless_several_can(options, together, resumed, tmp_path, monkeypatch):
    variables = dict(SRUN)
    monkeypatch.setattr(os, "environ", variables)
    request = Request.of(model="vgg8", data="digits", device="cpu", **options)
    if resumed:
        (tmp_path / "request.json").write_text(json.dumps(request.to_json()))
        monkeypatch.setattr(train, "run_job", lambda job: job)
        job = train._resumed(str(tmp_path), NO_FLAGS, SHOW_ALL)
        assert (job["resume"], job["device"]) == (str(tmp_path), "cpu")
    else:
        train._take_part(request)
    assert variables.get("WORLD_SIZE") == ("2" if together else None)
