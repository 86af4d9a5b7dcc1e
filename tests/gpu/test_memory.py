"""What a budget promises on a device: a run that would exceed it is refused, recovers, and stays within it."""

import pytest
import torch

import snugfit
from snugfit.errors import InfeasibleBudgetError
from snugfit.memory import Baseline, MemoryLimit, is_out_of_memory, make_meter, release_memory
from snugfit.memory.device import device_at_rest
from snugfit.memory.process import read_status

MB = 10**6
OF_HEAP = 2000 * MB
"""More than other tests can have left free in the heap, which a limit would not refuse, and less than a machine has."""
SMALL = {"image_size": 16, "max_train": 64, "max_val": 32, "batch_size": 32, "epochs": 1, "seed": 3}


def at_rest(device):
    """Bytes that the device holds of a process at rest; 0 on the processor."""
    found = device_at_rest(device)
    return 0 if found is None else found.context_bytes


def test_what_exceeds_a_budget_is_refused_and_the_rest_goes_on(device):
    found = device_at_rest(device)
    status, kept = read_status(), []
    baseline = Baseline(status.anon, status.data)
    if found is not None:
        release_memory()
        assert found.memory.read().reserved < 32 * MB, "cuBLAS has its workspace, and nothing else is left"
    meter, budget = make_meter(baseline, device), at_rest(device) + 96 * MB
    with MemoryLimit(budget, baseline, device) as limit:
        kept.append(torch.ones(20 * MB, dtype=torch.uint8, device=device))
        with pytest.raises((RuntimeError, MemoryError)) as refused:
            torch.ones(200 * MB if found else OF_HEAP, dtype=torch.uint8, device=device)
        assert is_out_of_memory(refused.value)
        del refused
        release_memory()
        limit.refresh()
        kept.append(torch.ones(20 * MB, dtype=torch.uint8, device=device))
        peak = meter.mark()
        assert peak <= budget
        if found is not None:  # on the processor, other tests leave pages of the heap free in this process
            assert at_rest(device) + 40 * MB <= peak
    with MemoryLimit(None, baseline, device):
        assert torch.ones(200 * MB, dtype=torch.uint8, device=device).sum() == 200 * MB


def test_a_budget_below_the_context_names_the_smallest_that_would_do(device, tmp_path):
    """The smallest budget works, and counts the context."""
    small = {**SMALL, "device": str(device), "strategy": "backprop"}
    with pytest.raises(InfeasibleBudgetError, match="Smallest budget that would do") as refused:
        snugfit.plan("smallconv", "digits", memory=at_rest(device) + 2 * MB, **small).run((), out=tmp_path / "none")
    smallest = refused.value.smallest_bytes
    assert smallest > at_rest(device)
    record = snugfit.plan("smallconv", "digits", memory=smallest, **small).run((), out=tmp_path / "run")
    assert record.enforced and record.measured["peak_bytes"] <= record.predicted["peak_bytes"] <= smallest


def test_a_plan_says_what_the_device_holds(device):
    plan = snugfit.plan("smallconv", "digits", strategy="backprop", device=str(device), **SMALL).plan
    found = plan.to_json()["device_memory"]
    if device_at_rest(device) is None:
        assert found is None
        return
    assert found["context_bytes"] > 0 and found["tensor_bytes"] > 0 and found["fragmentation_bytes"] >= 0
    parts = found["context_bytes"] + found["tensor_bytes"] + found["fragmentation_bytes"]
    assert parts == int(plan.choice.predicted.peak_bytes)
