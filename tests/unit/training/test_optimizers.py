"""One optimizer per parameter: equal to the stock optimizers, exact to resume, and free of gradients after a step."""

import copy
import dataclasses
import math
import re

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn

from snugfit._core.workload import OptimizerSettings
from snugfit._training.optimizers import ParameterOptimizers, lr_factor
from snugfit.errors import CheckpointError, ModelError, UsageError

SETTINGS = [
    OptimizerSettings(name="sgd", lr=0.1, momentum=0.9, weight_decay=1e-2),
    OptimizerSettings(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0),
    OptimizerSettings(name="adamw", lr=0.01, weight_decay=1e-2),
    OptimizerSettings(name="schedulefree", lr=0.01, weight_decay=1e-2, schedule="constant"),
]
SMALL = [
    dataclasses.replace(settings, state=state)
    for settings in (SETTINGS[0], SETTINGS[2])
    for state in ("bfloat16", "int8")
]
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.name}-{s.momentum}-{s.weight_decay}")


def network(seed=0):
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 1),
        nn.Flatten(),
        nn.Linear(5 * 36, 3),
    )
    return layers.to(memory_format=torch.channels_last)


def stock(module, settings):
    if settings.name == "schedulefree":
        optimizer = AdamWScheduleFree(module.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        optimizer.train()
        return optimizer
    if settings.name == "adamw":
        return torch.optim.AdamW(
            module.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, foreach=False, fused=False
        )
    return torch.optim.SGD(
        module.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        foreach=False,
        fused=False,
    )


def loss_of(module, step):
    torch.manual_seed(100 + step)
    images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    return nn.functional.cross_entropy(module(images), torch.tensor([0, 1, 2, 1]))


@each_setting
@pytest.mark.parametrize("gradients", ["applied in backward", "held", "left"])
def test_equals_the_stock_optimizer(settings, gradients):
    mine, theirs = network(), network()
    optimizers, reference = ParameterOptimizers(mine.named_parameters(), settings), stock(theirs, settings)
    optimizers.train()
    if gradients == "applied in backward":
        optimizers.apply_in_backward()
    elif gradients == "held":
        optimizers.hold()
    for step in range(5):
        factor = 0.5 * (1 + math.cos(math.pi * step / 5))
        optimizers.set_lr_factor(factor)
        reference.param_groups[0]["lr"] = settings.lr * factor
        loss_of(mine, step).backward()
        optimizers.step()
        assert all(p.grad is None for p in mine.parameters())
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()
    for got, want in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [*SETTINGS, *SMALL], ids=lambda s: f"{s.name}-{s.momentum}-{s.state}")
@pytest.mark.parametrize("row_major", [False, True], ids=["as_saved", "row_major"])
def test_resumed_steps_are_the_same_to_the_bit(settings, row_major):
    module = network()
    optimizers = ParameterOptimizers(module.named_parameters(), settings)
    optimizers.apply_in_backward()
    optimizers.train()
    for step in range(3):
        loss_of(module, step).backward()
    resumed = copy.deepcopy(module)
    for parameter in resumed.parameters():
        parameter._post_accumulate_grad_hooks = None
    state = {name: value.clone(memory_format=torch.preserve_format) for name, value in optimizers.state().items()}
    if row_major:
        state = {name: value.contiguous() for name, value in state.items()}
    fresh = ParameterOptimizers(resumed.named_parameters(), settings)
    fresh.load_state(state)
    fresh.apply_in_backward()
    for step in range(3, 6):
        loss_of(module, step).backward()
        loss_of(resumed, step).backward()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), resumed.parameters(), strict=True))
    assert all(torch.equal(value, fresh.state()[name]) for name, value in optimizers.state().items())


def test_state_is_named_flat_and_live():
    module = network()
    for name, keys in (("sgd", {"momentum_buffer"}), ("adamw", {"step", "exp_avg", "exp_avg_sq"})):
        optimizers = ParameterOptimizers(module.named_parameters(), OptimizerSettings(name=name))
        assert optimizers.state() == {}
        loss_of(module, 0).backward()
        optimizers.step()
        parameters = [key for key, _ in module.named_parameters()]
        assert set(optimizers.state()) == {f"{parameter}/{key}" for parameter in parameters for key in keys}
        seen = optimizers.state()["5.weight/" + min(keys)]
        before = seen.clone()
        loss_of(module, 1).backward()
        optimizers.step()
        assert not torch.equal(seen, before)


def test_fitting_state_is_taken_over_without_a_copy():
    module = network()
    optimizers = ParameterOptimizers(module.named_parameters(), SETTINGS[0])
    given = {f"{name}/momentum_buffer": torch.zeros_like(p) for name, p in module.named_parameters()}
    optimizers.load_state(given)
    assert all(value.data_ptr() == given[name].data_ptr() for name, value in optimizers.state().items())


def test_gradient_in_another_layout_is_applied_where_it_belongs():
    parameter = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    gradient = torch.randn(4, 3, 2, 2)
    optimizers = ParameterOptimizers([("p", parameter)], OptimizerSettings(lr=1.0, weight_decay=0.0))
    parameter.grad = gradient.clone()
    assert parameter.grad.stride() != parameter.stride()
    optimizers.step()
    torch.testing.assert_close(parameter.detach(), -gradient)


def test_shared_parameter_is_stepped_once_with_the_whole_gradient():
    layer = nn.Linear(3, 3, bias=False)
    before = layer.weight.detach().clone()
    optimizers = ParameterOptimizers(
        layer.named_parameters(), OptimizerSettings(lr=1.0, momentum=0.0, weight_decay=0.0)
    )
    inputs = torch.randn(2, 3)
    expected = torch.autograd.grad(layer(layer(inputs)).sum(), layer.weight)[0]
    optimizers.apply_in_backward()
    layer(layer(inputs)).sum().backward()
    torch.testing.assert_close(layer.weight.detach(), before - expected)


def test_detached_hooks_leave_gradients_to_accumulate():
    layer = nn.Linear(2, 2)
    optimizers = ParameterOptimizers(layer.named_parameters(), SETTINGS[0])
    assert optimizers.apply_in_backward() == optimizers.apply_in_backward()
    optimizers.detach_hooks()
    before = layer.weight.detach().clone()
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight, before) and torch.equal(layer.weight.grad, torch.full((2, 2), 2.0))
    optimizers.zero_grad()
    assert layer.weight.grad is None


@pytest.mark.parametrize("view", [lambda x: x[::2], lambda x: x[:, :2], lambda x: x[:1].expand(4, 4)])
def test_parameters_with_gaps_or_overlaps_in_memory_are_refused(view):
    parameter = nn.Parameter(view(torch.randn(4, 4)))
    with pytest.raises(ModelError, match="'w' is a view with gaps or overlaps"):
        ParameterOptimizers([("w", parameter)], OptimizerSettings("sgd"))


@pytest.mark.parametrize("like", [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(4, 3).t()])
def test_parameters_of_any_dense_layout_are_stepped(like):
    parameter = nn.Parameter(like.clone())
    parameter.grad = torch.ones_like(parameter)
    optimizers = ParameterOptimizers(
        [("w", parameter)], OptimizerSettings("sgd", lr=0.5, momentum=0.0, weight_decay=0.0)
    )
    optimizers.step()
    assert torch.equal(parameter.detach(), like - 0.5)


def test_frozen_parameters_are_left_out_and_release_forgets():
    module = network()
    module[0].requires_grad_(False)
    optimizers = ParameterOptimizers(module.named_parameters(), SETTINGS[0])
    assert not any(name.startswith("0.") for name in optimizers.parameters)
    optimizers.apply_in_backward()
    loss_of(module, 0).backward()
    optimizers.release()
    assert optimizers.state() == {}
    loss_of(module, 0).backward()
    assert module[3].weight.grad is not None


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("other/momentum_buffer", (2, 2), "no parameter"),
        ("weight/momentum_buffer", (3,), "shape"),
        ("weight/momentum_buffer", (), "shape"),
        ("weight/momentum_buffer_scale", (2,), "shape"),
    ],
)
def test_mismatch_errors_is_refused(name, shape, message):
    optimizers = ParameterOptimizers(nn.Linear(2, 2).named_parameters(), SETTINGS[0])
    with pytest.raises(CheckpointError, match=message):
        optimizers.load_state({name: torch.zeros(shape)})


@pytest.mark.parametrize("settings", [SETTINGS[2], *SMALL], ids=lambda s: f"{s.name}-{s.state}")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda value: torch.zeros((), dtype=value.dtype), r"of shape \(\) instead of"),
        (lambda value: value.double(), "is float64 of shape .* instead of"),
        (lambda value: None, "is absent instead of"),
    ],
    ids=["small", "type", "absent"],
)
def test_a_state_that_a_kernel_would_misread_is_refused(settings, change, says):
    """A kernel that reads raw memory would read and write beyond a tensor of one value."""
    module = network()
    optimizers = ParameterOptimizers(module.named_parameters(), settings)
    loss_of(module, 0).backward()
    optimizers.step()
    for name in [each for each, value in optimizers.state().items() if value.dim()]:
        changed = {**optimizers.state(), name: change(optimizers.state()[name])}
        changed = {key: value for key, value in changed.items() if value is not None}
        with pytest.raises(CheckpointError, match=rf"'{re.escape(name)}' .*{says}"):
            optimizers.load_state(changed)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", [*SETTINGS[2:], *SMALL], ids=str)
def test_a_number_that_is_none_is_refused(settings, wrong):
    module = network()
    optimizers = ParameterOptimizers(module.named_parameters(), settings)
    optimizers.train()
    loss_of(module, 0).backward()
    optimizers.step()
    for name in [each for each, value in optimizers.state().items() if not value.dim()]:
        changed = {**optimizers.state(), name: torch.full_like(optimizers.state()[name], wrong)}
        with pytest.raises(CheckpointError, match=rf"'{re.escape(name)}' is {wrong}: it is damaged"):
            optimizers.load_state(changed)


COSINE, CONSTANT = OptimizerSettings(), OptimizerSettings(schedule="constant")


def test_schedules():
    assert [lr_factor(CONSTANT, step, 2, 3) for step in (0, 3, 6)] == [1, 1, 1]
    assert [lr_factor(COSINE, step, 2, 3) for step in (0, 3, 6, 12)] == pytest.approx([1, 0.5, 0, 0])
    assert lr_factor(COSINE, 2, 2, 3) == pytest.approx(0.5 * (1 + math.cos(math.pi / 3)))


def test_without_warm_up_the_schedule_is_that_of_the_share_of_steps():
    """Bit for bit, so that results do not depend on the option."""
    for step in range(7 * 13):
        progress = ((step // 7) * 7 + step % 7) / (13 * 7)
        assert lr_factor(COSINE, step, 7, 13) == 0.5 * (1.0 + math.cos(math.pi * progress))


@pytest.mark.parametrize(("epochs", "warm_up"), [(1, 7), (2, 14), (0.5, 4), (0.01, 0), (4.9, 34)])
def test_the_warm_up_rises_to_the_peak_and_the_schedule_takes_the_rest(epochs, warm_up):
    steps, total = 7, 35
    cosine = [(1 + math.cos(math.pi * step / (total - warm_up))) / 2 for step in range(total - warm_up)]
    rise = [(step + 1) / warm_up for step in range(warm_up)]
    for settings, rest in ((COSINE, cosine), (CONSTANT, [1.0] * (total - warm_up))):
        warmed = dataclasses.replace(settings, warmup_epochs=epochs)
        found = [lr_factor(warmed, step, steps, 5) for step in range(total)]
        assert found == pytest.approx(rise + rest)


@pytest.mark.parametrize(("epochs", "warm_up", "rise"), [(5, 4.9, [0.25, 0.5, 0.75, 1.0, 1.0]), (1, 0.9, [1.0])])
def test_the_warm_up_leaves_a_step(epochs, warm_up, rise):
    warmed = dataclasses.replace(COSINE, warmup_epochs=warm_up)
    assert [lr_factor(warmed, step, 1, epochs) for step in range(epochs)] == pytest.approx(rise)


@pytest.mark.parametrize(("steps", "epochs"), [(6, 5), (1, 10), (7, 1), (13, 3)])
def test_one_cycle_is_torchs_without_its_momentum(steps, epochs):
    total = steps * epochs
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=total, cycle_momentum=False)
    cycle = OptimizerSettings(lr=0.3, schedule="one-cycle")
    for step in range(total):
        want = optimizer.param_groups[0]["lr"]
        assert 0.3 * lr_factor(cycle, step, steps, epochs) == pytest.approx(want, rel=1e-9)
        optimizer.step()
        if step + 1 < total:
            schedule.step()


@pytest.mark.parametrize("total", [1, 2, 3])
def test_one_cycle_of_few_steps_never_rises_above_the_peak(total):
    cycle = OptimizerSettings(schedule="one-cycle")
    found = [lr_factor(cycle, step, total, 1) for step in range(total)]
    assert max(found) <= 1 and min(found) > 0 and found == sorted(found, reverse=True)


@pytest.mark.parametrize("warm_up", [0, 1])
def test_steps_are_torchs_at_half_and_three_quarters(warm_up):
    steps, epochs = 4, 5 if warm_up else 4
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 12])
    settings = OptimizerSettings(lr=0.3, schedule="step", warmup_epochs=warm_up)
    for step in range(16):
        want = optimizer.param_groups[0]["lr"]
        assert 0.3 * lr_factor(settings, step + steps * warm_up, steps, epochs) == pytest.approx(want, rel=1e-12)
        optimizer.step()
        schedule.step()


def test_one_cycle_has_a_warm_up_of_its_own():
    with pytest.raises(UsageError, match="--warmup-epochs 1 is not supported with --schedule one-cycle"):
        OptimizerSettings(schedule="one-cycle", warmup_epochs=1.0)


@pytest.mark.parametrize("warm_up", [1, 3])
def test_the_warm_up_is_torchs(warm_up):
    """Its linear schedule counts its first step as a share, too, and its cosine starts at the milestone."""
    steps, epochs, count = 6, 5, 6 * warm_up
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / count, total_iters=count - 1)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs - count)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[count])
    warmed = dataclasses.replace(COSINE, warmup_epochs=warm_up)
    for step in range(steps * epochs):
        want = optimizer.param_groups[0]["lr"]
        assert 0.3 * lr_factor(warmed, step, steps, epochs) == pytest.approx(want, rel=1e-9)
        optimizer.step()
        schedule.step()


SCHEDULEFREE = SETTINGS[3]


def trained(settings=SCHEDULEFREE, steps=4):
    module = network()
    optimizers = ParameterOptimizers(module.named_parameters(), settings)
    optimizers.apply_in_backward()
    optimizers.train()
    for step in range(steps):
        loss_of(module, step).backward()
    return module, optimizers


def test_one_optimizer_per_parameter_is_one_per_unit_in_both_modes():
    mine, optimizers = trained()
    theirs = network()
    reference = stock(theirs, SCHEDULEFREE)
    for step in range(4):
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()
    for switch in (lambda: None, lambda: (optimizers.average(), reference.eval())):
        switch()
        for got, want in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_saved_average_is_what_evaluation_would_see_and_saving_changes_nothing():
    module, optimizers = trained()
    before = [p.detach().clone() for p in module.parameters()]
    saved = {name: item.make() for name, item in optimizers.averaged().items()}
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    optimizers.average()
    assert optimizers.averaged() == {}
    for name, parameter in module.named_parameters():
        assert torch.equal(saved[name], parameter), name
        assert saved[name].is_contiguous(memory_format=torch.channels_last) or parameter.dim() < 4
    assert any(not torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


def test_a_state_taken_while_averaged_goes_on_as_the_run_would():
    module, optimizers = trained()
    optimizers.average()
    resumed = network()
    resumed.load_state_dict(module.state_dict())
    fresh = ParameterOptimizers(resumed.named_parameters(), SCHEDULEFREE)
    fresh.load_state({name: value.clone() for name, value in optimizers.state().items()})
    fresh.apply_in_backward()
    for each, of in ((module, optimizers), (resumed, fresh)):
        of.train()
        loss_of(each, 9).backward()
        of.average()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), resumed.parameters(), strict=True))


def test_schedulefree_has_no_schedule():
    with pytest.raises(UsageError, match="leave out --schedule"):
        OptimizerSettings("schedulefree", schedule="cosine")


def test_other_optimizers_average_nothing():
    module = network()
    optimizers = ParameterOptimizers(module.named_parameters(), SETTINGS[0])
    before = [p.detach().clone() for p in module.parameters()]
    optimizers.train()
    assert optimizers.averaged() == {}
    optimizers.average()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("settings", SMALL, ids=lambda s: f"{s.name}-{s.state}")
def test_small_state_is_stored_in_its_type_and_trains_like_float_state(settings):
    modules = [network(), network()]
    made = [
        ParameterOptimizers(module.named_parameters(), each)
        for module, each in zip(modules, (settings, dataclasses.replace(settings, state="float32")), strict=True)
    ]
    for step in range(5):
        for module, optimizers in zip(modules, made, strict=True):
            loss_of(module, step).backward()
            optimizers.step()
    small, full = made[0].state(), made[1].state()
    kept = {name: value for name, value in small.items() if value.dim() and not name.endswith("_scale")}
    assert kept.keys() == {name for name, value in full.items() if value.dim()}
    types = {torch.bfloat16} if settings.state == "bfloat16" else {torch.int8, torch.uint8}
    assert {value.dtype for value in kept.values()} <= types
    start = network().state_dict()
    for name, parameter in modules[1].named_parameters():
        moved = (parameter - start[name]).norm()
        assert 0 < (dict(modules[0].named_parameters())[name] - parameter).norm() < 0.05 * moved, name


def test_sgd_without_momentum_has_no_state_to_store():
    optimizers = ParameterOptimizers(network().named_parameters(), dataclasses.replace(SETTINGS[1], state="int8"))
    optimizers.step()
    assert optimizers.state() == {} and dataclasses.replace(SETTINGS[1], state="int8").state_per_parameter == 0


def test_schedulefree_refuses_small_state():
    with pytest.raises(UsageError, match=r"--optimizer-state int8 .* sgd or adamw"):
        dataclasses.replace(SCHEDULEFREE, state="int8")
