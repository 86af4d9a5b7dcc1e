"""The context in a loop with accelerate: budgets that hold, the weights of the whole batch, and one clear error."""

import sys

import pytest
from impossible_budgets import refusal

pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")


def trained(memory=None, network=False):
    """A network trained for two epochs of 2.5 batches, within a budget if there is one; and the record."""
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from snugfit.integrations.accelerate import MemoryBudget

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)).double()
    data = TensorDataset(torch.randn(80, 3, 32, 32).double(), torch.randint(10, (80,)))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

    def loss_of(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def loop(batches):
        torch.manual_seed(2)
        for _ in range(2):
            for batch in batches():
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(batch))
                    optimizer.step()
                    optimizer.zero_grad()

    if memory is None:
        prepared = accelerator.prepare(loader)
        loop(lambda: prepared)
        return net, None
    recomputed = net if network else None
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "network": recomputed}
    with MemoryBudget(accelerator, memory, loss_of, **parts) as budget:
        loop(lambda: budget.loader)
    assert accelerator.gradient_accumulation_steps == 1
    return net, budget.budget.record


def compared(memory, **options):
    """The record of a training in a budget, and how far its weights are from those of the plain loop."""
    (net, record), (other, _) = trained(memory, **options), trained(**options)
    pairs = zip(net.state_dict().values(), other.state_dict().values(), strict=True)
    return {**vars(record), "distance": max(float((each - expected).abs().max()) for each, expected in pairs)}


def fitted():
    import snugfit

    trained()  # what it imports is at rest
    snugfit.prepare_process(1)
    return [compared("1GB"), compared("35MB"), compared("35MB", network=True)]


def refused():
    trained()
    return refusal(lambda memory: vars(trained(memory)[1]))


def crowded():
    """A loop that keeps memory is refused it in one clear error."""
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import snugfit
    from snugfit.errors import BudgetExceededError
    from snugfit.integrations.accelerate import MemoryBudget

    snugfit.prepare_process(1)
    net, kept = nn.Linear(4, 4), []
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
    parts = {"model": net, "optimizer": torch.optim.SGD(net.parameters()), "loader": loader}
    try:
        with MemoryBudget(Accelerator(cpu=True), "60MB", lambda batch: net(batch[0]).mean(), **parts) as budget:
            for _ in budget.loader:
                kept.append(torch.ones(20_000_000, dtype=torch.uint8))
    except BudgetExceededError as error:
        return str(error)


def assert_bounded(record):
    assert record["enforced"] and record["steps"] == 6
    assert 0 < record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"], record


def test_a_budget_holds_and_weights_are_those_of_the_whole_batch(fresh_process):
    found = fresh_process(fitted, helpers=(trained, compared))["fitted"]
    for record in found:
        assert_bounded(record)
        assert record["distance"] < 1e-10
    whole, parts, recomputing = found
    assert whole["micro_batches"] == 1 < parts["micro_batches"]
    assert recomputing["micro_batches"] > 1 or recomputing["recomputation"]


def test_an_impossible_budget_says_what_is_needed(fresh_process):
    found = fresh_process(refused, helpers=(trained, refusal))["refused"]
    assert "Sequential does not fit memory=9.0 MB" in found["message"] and found["restored"]
    assert_bounded(found["record"])


def test_memory_that_the_loop_keeps_is_refused(fresh_process):
    found = fresh_process(crowded)["crowded"]
    assert "was refused memory within memory=60.0 MB" in found


def test_accumulation_of_ones_own_is_refused():
    import torch
    from accelerate import Accelerator
    from torch import nn

    from snugfit.errors import UsageError
    from snugfit.integrations.accelerate import MemoryBudget

    net = nn.Linear(4, 4)
    parts = {"model": net, "optimizer": torch.optim.SGD(net.parameters()), "loader": None}
    with pytest.raises(UsageError, match="sets gradient_accumulation_steps itself"):
        MemoryBudget(Accelerator(cpu=True, gradient_accumulation_steps=2), "1GB", lambda batch: 0, **parts)


def lowered():
    """Types in which convolutions of a prepared network run, and of its outputs: as it is, and recomputed."""
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from snugfit.integrations.accelerate import MemoryBudget

    seen = []

    class Seeing(nn.Conv2d):
        def forward(self, x):
            out = super().forward(x)
            seen.append(str(out.dtype))
            return out

    net = nn.Sequential(*[Seeing(3, 3, 3) for _ in range(4)], nn.Flatten(), nn.Linear(192, 10))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
    loader = DataLoader(TensorDataset(torch.randn(8, 3, 16, 16), torch.randint(10, (8,))), batch_size=8)
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "network": net}
    budget = MemoryBudget(accelerator, "1GB", lambda batch: F.cross_entropy(model(batch[0]), batch[1]), **parts)
    recomputation, found = budget._step().recomputation, []
    assert recomputation.schedules
    for schedule in ("", "(0-1) 2-4"):
        recomputation.use(schedule)
        seen.clear()
        outputs = model(torch.randn(2, 3, 16, 16))
        outputs.sum().backward()
        found.append((sorted(set(seen)), str(outputs.dtype), len(seen)))
    return found


def test_recomputation_stays_in_the_accelerators_precision(fresh_process):
    (*plain, calls), (*recomputed, more_calls) = fresh_process(lowered)["lowered"]
    assert plain == recomputed == [["torch.bfloat16"], "torch.float32"]
    assert calls == 4 < more_calls
