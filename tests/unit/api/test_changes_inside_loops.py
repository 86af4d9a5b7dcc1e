"""What a step of ``snugfit.fit`` would not follow is refused, and planning leaves the loss as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit.errors import UsageError

BATCH = torch.randn(8, 3, 10, 10), torch.randint(10, (8,))
OPTIONS = {"memory": "300MB", "batch_size": 8, "example": BATCH, "lr": 0.1}


def network():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    return nn.Sequential(block, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def test_layers_unfrozen_or_replaced_inside_are_refused():
    model = network()
    model[1].requires_grad_(False)
    with snugfit.fit(model, F.cross_entropy, **OPTIONS) as step:
        step(*BATCH)
        model[1].requires_grad_(True)
        with pytest.raises(UsageError, match=r"'1.weight' did not train when snugfit.fit began"):
            step(*BATCH)
        model[1].requires_grad_(False)
        head = model[4]
        model[4] = nn.Linear(288, 10)
        with pytest.raises(UsageError, match=r"'4.weight' did not train.* unfrozen or replaced"):
            step(*BATCH)
        model[4] = head
        model[0].requires_grad_(False)  # which a step follows
        before = model[0][0].weight.clone()
        step(*BATCH)
        assert torch.equal(model[0][0].weight, before)


def test_a_hook_that_no_unit_would_call_is_refused():
    model, seen = network(), []
    with snugfit.fit(model, F.cross_entropy, **OPTIONS) as step:
        model[1].register_forward_hook(lambda *_: seen.append(1))
        step(*BATCH)
        assert seen == [1]
        handle = model[0].register_forward_hook(lambda *_: seen.append(2))
        with pytest.raises(UsageError, match=r"a forward hook of '0' was registered after snugfit.fit had begun"):
            step(*BATCH)
        handle.remove()
        step(*BATCH)


class Centred(nn.Module):
    """A loss with a running mean of outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(10))
        self.calls, self.seen = 0, []

    def forward(self, outputs, targets):
        self.calls += 1
        self.seen.append(len(targets))
        self.center.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return F.cross_entropy(outputs, targets)


def test_planning_leaves_the_state_of_a_loss():
    loss = Centred()
    with snugfit.fit(network(), loss, **OPTIONS) as step:
        assert (loss.calls, loss.seen) == (0, []) and not loss.center.any()
        step(*BATCH)
        assert (loss.calls, loss.seen) == (1, [8]) and loss.center.any()


class Storing(nn.Module):
    """Stores a feature map in an attribute."""

    def __init__(self):
        super().__init__()
        self.conv, self.conv2, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(288, 10)

    def forward(self, x):
        self.feature = torch.relu(self.conv(x))
        return self.head(torch.relu(self.conv2(self.feature)).flatten(1))


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_loss_that_reads_what_the_forward_pass_stores_is_refused(evaluated):
    model = Storing()
    if evaluated:
        model(BATCH[0])
    stored = getattr(model, "feature", None)

    def penalised(outputs, targets):
        return F.cross_entropy(outputs, targets) + model.feature.square().mean()

    with pytest.raises(UsageError, match="the loss reads 'feature', which"), snugfit.fit(model, penalised, **OPTIONS):
        pytest.fail("planned")
    assert getattr(model, "feature", None) is stored
    with snugfit.fit(model, F.cross_entropy, **OPTIONS) as step:
        assert step(*BATCH) > 0


def test_a_loss_that_reads_another_attribute_is_told_so():
    with (
        pytest.raises(UsageError, match="has no attribute 'nothing'"),
        snugfit.fit(Storing(), lambda outputs, targets: outputs.nothing, **OPTIONS),
    ):
        pytest.fail("planned")
