"""Processes of a launch that work for its gateway."""

from types import SimpleNamespace

import torch

from snugfit._engine import distributed


def test_the_device_is_that_of_the_gateway(monkeypatch):
    """It alone has the folder of a run that is resumed."""
    asked = []
    monkeypatch.setattr(distributed, "gateway_device", lambda here: "cuda:3", raising=False)
    monkeypatch.setattr(distributed, "choose_device", lambda name: asked.append(name) or torch.device("cpu"))
    here = SimpleNamespace(rank=1)
    commands = SimpleNamespace(heartbeat=SimpleNamespace(here=here), receive=lambda: "{}")
    assert distributed.serve(commands) == {"rank": 1, "peak_bytes": 0}
    assert asked == ["cuda:3"]
