"""A launcher's variables count to strategies for several processes alone."""

import json
import os
from dataclasses import fields

import pytest

from snugfit._cli.options import NO_FLAGS, RequestFlags
from snugfit._cli.train import _take_part
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
    request = Request.of(model="vgg8", data="digits", **options)
    flags = RequestFlags(**{each.name: getattr(request, each.name) for each in fields(RequestFlags)})
    if resumed:
        (tmp_path / "request.json").write_text(json.dumps(request.to_json()))
    _take_part(NO_FLAGS if resumed else flags, str(tmp_path) if resumed else None)
    assert variables.get("WORLD_SIZE") == ("2" if together else None)
