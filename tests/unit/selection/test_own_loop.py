"""Selection in a loop of one's own: what trains, what is left alone, and updates against torch's own optimizers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit.errors import InfeasibleTimeError, UsageError
from snugfit.profiling import time_tensors
from snugfit.selection import TensorSelection
from snugfit.selection.own_loop import trial_update

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    )


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 1, 8, 8, generator=generator), torch.randint(5, (6,), generator=generator)


def train_step(model, optimizer):
    images, labels = batch()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def make(kind="sgd", ratio=1.0, frozen=(), **options):
    model = make_model()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = OPTIMIZERS[kind](model.parameters())
    chain = Chain.from_module(model, (1, 8, 8))
    return model, optimizer, TensorSelection(chain, time_tensors(chain, optimizer, 4), optimizer, ratio, **options)


def copies(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), [layer.training for layer in model.modules()]))


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
    torch.testing.assert_close(one[1]["state"], other[1]["state"], rtol=0, atol=0)
    assert one[2] == other[2]


def test_it_selects_at_the_first_step_and_every_so_many_after_it(steady_times):
    _, _, selection = make(every=3)
    assert selection.selected == ()
    assert [selection.step(*batch()) for _ in range(7)] == [True, False, False, True, False, False, True]


def test_only_what_is_selected_trains_within_the_ratio_and_the_classifier_always_does(steady_times):
    model, optimizer, selection = make(ratio=0.7)
    before = copy.deepcopy(dict(model.named_parameters()))
    selection.step(*batch())
    assert {"6.weight", "6.bias"} < set(selection.selected) < set(before)
    assert selection.predicted_ratio <= 0.7
    train_step(model, optimizer)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(selection.selected)
    assert set(optimizer.state) == {model.get_parameter(name) for name in changed}


def test_all_that_lowers_the_loss_trains_where_time_is_not_short(steady_times):
    _, _, selection = make()
    selection.step(*batch())
    useful = {name for name, value in selection.importance.items() if value > 0}
    assert set(selection.selected) == useful | {"6.weight", "6.bias"}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranking_and_timing_leave_everything_as_it_is(steady_times, kind):
    model, optimizer, selection = make(kind)
    train_step(model, optimizer)
    model[1].eval()
    before = copies(model, optimizer)
    time_tensors(selection.chain, optimizer, 4)
    selection.select(*batch())
    dropped = set(dict(model.named_parameters())) - set(selection.selected)
    for name in dropped:  # whose state goes
        index = [each for each, _ in model.named_parameters()].index(name)
        before[1]["state"].pop(index, None)
    assert_same(before, copies(model, optimizer))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_trial_update_is_the_optimizers_own(kind):
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train_step(model, optimizer)
    images, labels = batch()
    F.cross_entropy(model(images), labels).backward()
    twin = copy.deepcopy(model)
    own = OPTIMIZERS[kind](twin.parameters())
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = one.grad.clone()
    own.step()
    state = copy.deepcopy(optimizer.state_dict())
    update = trial_update(optimizer)
    for name, parameter in model.named_parameters():
        update(name, parameter)
        torch.testing.assert_close(parameter, twin.get_parameter(name))
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)


def test_the_most_important_tensor_is_the_one_whose_update_lowers_the_loss_most(steady_times):
    model, _, selection = make()
    model.eval()
    images, labels = batch()
    selection.select(images, labels)
    told = selection.importance
    lowered = {}
    with torch.no_grad():
        start = F.cross_entropy(model(images), labels)
    for name in told:
        twin = copy.deepcopy(model).requires_grad_(False)
        parameter = twin.get_parameter(name).requires_grad_(True)
        F.cross_entropy(twin(images), labels).backward()
        OPTIMIZERS["sgd"]([parameter]).step()
        with torch.no_grad():
            lowered[name] = float(start - F.cross_entropy(twin(images), labels))
    assert max(told, key=told.get) == max(lowered, key=lowered.get)


def test_what_you_froze_stays_frozen(steady_times):
    model, _, selection = make(frozen=["0.weight", "0.bias"])
    selection.step(*batch())
    selection.stop()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.weight", "0.bias"]
    assert selection.selected == ()


def test_too_short_a_time_is_refused_with_the_smallest_that_would_do(steady_times):
    with pytest.raises(InfeasibleTimeError) as refused:
        make(ratio=0.01)
    _, _, selection = make(ratio=refused.value.smallest_ratio)
    assert selection.times.smallest_ratio <= refused.value.smallest_ratio


@pytest.mark.parametrize("options", [{"ratio": 0}, {"ratio": 1.5}, {"every": 0}, {"chunk": 0}])
def test_wrong_numbers_are_refused(steady_times, options):
    with pytest.raises(UsageError):
        make(**options)


def test_tensors_are_timed_in_order_with_whole_steps_beside_them():
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model[3].bias.requires_grad_(False)
    before = copies(model, optimizer)
    found = time_tensors(Chain.from_module(model, (1, 8, 8)), optimizer, 4)
    assert [tensor.name for tensor in found.tensors] == [n for n, p in model.named_parameters() if p.requires_grad]
    assert found.batch == 4 and found.steps.head > 0 and found.steps.full > 0
    assert_same(before, copies(model, optimizer))
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())
