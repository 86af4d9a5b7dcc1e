"""The device of a process among those that it sees, which a fake counts."""

from __future__ import annotations

import pytest
import torch

from snugfit._training.launch import group
from snugfit.errors import UsageError


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [
        pytest.param(1, 1, 0, id="Slurm shows each task only its own device"),
        pytest.param(0, 1, 0, id="one process with one device"),
        pytest.param(3, 4, 3, id="torchrun shows each process all devices"),
    ],
)
def test_process_uses_a_device_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: int, expected: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    group._use_device(local_rank)
    assert chosen == [expected]


def test_a_machine_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="this machine has none; use --device cpu"):
        group._use_device(0)
