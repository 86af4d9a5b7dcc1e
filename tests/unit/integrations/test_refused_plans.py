"""Plans of other libraries' loops that are refused: one clear error, which keeps no tensors alive."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")


def refused():
    """Whether the batch of a step that does not fit is alive in the handler; what a batch above the budget says."""
    import weakref

    import torch
    from torch import nn

    import snugfit
    from snugfit._engine.step_plan import LibraryStep
    from snugfit.errors import BudgetExceededError, InfeasibleBudgetError
    from snugfit.integrations._budget import LoopBudget
    from snugfit.integrations._recomputation import NoRecomputation

    snugfit.prepare_process(1)
    module, made = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(module.parameters())

    def make_step(images=8):
        batch = torch.ones(images, 4)
        made.append(weakref.ref(batch))

        def passes(count):
            module(batch[:count]).sum().backward()

        return LibraryStep(module, [optimizer], passes, NoRecomputation(), batch.nbytes)

    try:
        LoopBudget("2MB").plan(module, make_step, 8)
    except InfeasibleBudgetError:
        kept = [each() is not None for each in made]
    try:
        LoopBudget("20MB").plan(module, lambda: make_step(30_000_000), 30_000_000)
    except BudgetExceededError as error:
        return {"kept": kept, "message": str(error)}


def test_an_error_keeps_no_batch_alive_and_a_batch_above_the_budget_is_told(fresh_process):
    found = fresh_process(refused)["refused"]
    assert found["kept"] == [False]
    assert "an example of 30000000 images was refused memory within memory=20.0 MB." in found["message"]
