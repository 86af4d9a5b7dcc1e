"""Lean operators on a device against torch's own on the processor."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.network import NetworkTrainer
from snugfit._upstream import to_channels_last
from snugfit.lean import CompressedActivations, StandardisedConv2d, store_int8, use_lean
from snugfit.lean.bfloat16_weights import store_bfloat16, use_float_gradients
from snugfit.lean.optimizer_state import RoundingRule
from snugfit.lean.update_rules import FusedAdamW, FusedSGD
from snugfit.memory.autocast import autocast

DTYPES = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Tolerances: two orders of summation round differently, the more so the longer the sums."""


def conv(*sizes, **settings):
    return nn.Conv2d(*sizes, **settings)


LAYERS = {
    "convolution": partial(conv, 4, 6, 3, padding=1),
    "strided": partial(conv, 4, 6, 3, stride=2),
    "dilated": partial(conv, 4, 6, 3, dilation=2),
    "grouped": partial(conv, 4, 8, 3, groups=2, padding=1),
    "depthwise": partial(conv, 4, 4, 3, groups=4, padding=1),
    "pointwise": partial(conv, 4, 6, 1, bias=False),
    "reflecting": partial(conv, 4, 6, 3, padding=1, padding_mode="reflect"),
    "small map": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(3), conv(4, 6, 3, padding=1)),
    "standardised": partial(StandardisedConv2d, 4, 6, 3, padding=1),
    "norm": partial(nn.BatchNorm2d, 4),
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "LeakyReLU": partial(nn.LeakyReLU, 0.1),
    "max pool": partial(nn.MaxPool2d, 3, 2, 1),
    "average pool": partial(nn.AvgPool2d, 2),
    "global pool": partial(nn.AdaptiveAvgPool2d, 1),
}


def pair(make, device, dtype, trained=True):
    """The same layer twice: torch's on the processor, and lean on the device."""
    torch.manual_seed(3)
    stock = nn.Sequential(make()).to(dtype)
    stock.requires_grad_(trained)
    lean = copy.deepcopy(stock).to(device)
    use_lean(lean)
    return stock, lean


def images(dtype, channels=4, size=9):
    values = torch.randn(5, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return values.contiguous(memory_format=torch.channels_last)


def gradients(module, values, device):
    values = values.to(device, copy=True).requires_grad_()
    output = module(values)
    weights = torch.arange(output.numel(), dtype=output.dtype).view(output.shape).cos().to(device)
    (output * weights).sum().backward()
    found = {name: each.grad for name, each in module.named_parameters()}
    return {"output": output.detach(), "input": values.grad, **found}


def assert_near(first, second, tolerance):
    assert first.keys() == second.keys()
    for name, expected in first.items():
        actual = second[name]
        assert (expected is None) == (actual is None), name
        if expected is not None:
            actual = actual.detach().to("cpu", expected.dtype)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_lean_layers_give_the_gradients_of_torch_on_the_processor(device, name, dtype, trained):
    stock, lean = pair(LAYERS[name], device, dtype, trained)
    mode = not (name == "norm" and not trained)  # a frozen norm is lean in evaluation
    stock.train(mode), lean.train(mode)
    expected = gradients(stock, images(dtype), "cpu")
    assert_near(expected, gradients(lean, images(dtype), device), DTYPES[dtype])


@pytest.mark.parametrize("rule", [partial(FusedSGD, 0.1, 0.9, 5e-4), partial(FusedAdamW, 0.01, 0.1)])
def test_fused_optimizers_take_the_same_steps(device, rule):
    torch.manual_seed(0)
    start, slopes = torch.randn(6, 4, 3, 3), [torch.randn(6, 4, 3, 3) for _ in range(3)]

    def stepped(where):
        parameter, own = nn.Parameter(start.to(where, copy=True)), rule()
        for slope in slopes:
            parameter.grad = slope.to(where, copy=True)
            own.step(parameter)
        return {"weight": parameter.detach(), **own.state}

    assert_near(stepped("cpu"), stepped(device), 1e-5)


def network():
    torch.manual_seed(5)
    body = nn.Sequential(
        conv(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)
    )
    return to_channels_last(nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 3)))


@pytest.mark.parametrize("bits", [8, 4])
def test_feature_maps_in_few_bits_stay_as_near_as_on_the_processor(device, bits):
    def run(where):
        model = network().to(where)
        use_lean(model)
        with CompressedActivations(bits):
            output = model(images(torch.float32).to(where))
        output.square().sum().backward()
        return {name: each.grad for name, each in model.named_parameters()}

    torch.manual_seed(0)
    exact = {name: each.grad for name, each in _plain(network()).named_parameters()}
    for where in ("cpu", device):
        errors = [(run(where)[name].cpu() - each).norm() / each.norm() for name, each in exact.items()]
        assert max(errors) < (0.05 if bits == 8 else 0.6)


def _plain(model):
    model(images(torch.float32)).square().sum().backward()
    return model


def test_frozen_weights_in_8_bits_are_the_same(device):
    def run(where):
        model = network().to(where)
        model.requires_grad_(False)
        model[1].bias.requires_grad_()
        store_int8(model.eval())
        output = model(images(torch.float32).to(where))
        output.square().sum().backward()
        return {"output": output.detach(), "bias": model[1].bias.grad, "codes": model[0].weight_int8}

    assert_near(run("cpu"), run(device), 1e-4)


def test_weights_in_bfloat16_get_gradients_in_float32(device):
    def run(where):
        model = network()
        store_bfloat16(model)
        model = model.to(where)
        use_float_gradients(model)
        with autocast(torch.device(where).type):
            output = model(images(torch.float32).to(where))
        output.float().square().sum().backward()
        slopes = {name: each.grad for name, each in model.named_parameters()}
        assert {each.dtype for each in slopes.values()} == {torch.float32}
        return {"output": output.detach().float(), **slopes}

    assert_near(run("cpu"), run(device), 5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_full_precision_as_on_the_processor(device, dtype):
    def errors(where):
        model = network().to(where)
        use_lean(model)
        with autocast(torch.device(where).type, dtype):
            output = model(images(torch.float32).to(where))
        output.float().square().sum().backward()
        expected = {name: each.grad for name, each in _plain(network()).named_parameters()}
        found = {name: each.grad.float().cpu() for name, each in model.named_parameters()}
        return {name: (found[name] - each).norm() / each.norm() for name, each in expected.items()}

    least = errors("cpu")
    for name, error in errors(device).items():
        assert error < 2 * least[name] + 0.02, name


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaled_step_is_that_of_torch_and_skips_what_overflows(device, overflows):
    """The first layer's gradient comes last, after that of the others could have been applied."""
    inputs, labels = images(torch.float32).to(device), torch.arange(5, device=device) % 3
    mine, theirs = (network().to(device) for _ in range(2))
    for each in (mine, theirs) if overflows else ():
        each[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    before = copy.deepcopy(mine.state_dict())
    settings = OptimizerSettings("sgd", lr=0.1, momentum=0.9)
    work = Workload("net", "data", (4, 9, 9), 3, 5, 0, 0, optimizer=settings, precision="float16")
    made = NetworkTrainer(mine, mine, work)
    made.step(inputs, labels)
    scaler = torch.amp.GradScaler(device.type)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=settings.weight_decay)
    with torch.autocast(device.type, torch.float16):
        loss = nn.functional.cross_entropy(theirs(inputs), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert made.loss_scale.value == scaler.get_scale() == (32768 if overflows else 65536)
    for name, value in theirs.named_parameters():
        assert torch.equal(before[name], mine.state_dict()[name]) == overflows, name
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_optimizer_state_in_8_bits_stays_near(device, optimizer):
    rule = FusedSGD(0.1, 0.9) if optimizer == "sgd" else FusedAdamW(0.01)
    torch.manual_seed(0)
    start, slopes = torch.randn(64, 64), [torch.randn(64, 64) for _ in range(3)]
    small, parameter = RoundingRule(rule, "int8"), nn.Parameter(start.to(device, copy=True))
    exact, plain = (FusedSGD(0.1, 0.9) if optimizer == "sgd" else FusedAdamW(0.01)), nn.Parameter(start.clone())
    for slope in slopes:
        parameter.grad, plain.grad = slope.to(device), slope.clone()
        small.step(parameter), exact.step(plain)
    moved = (plain - start).norm()
    assert (parameter.detach().cpu() - plain.detach()).norm() < 0.05 * moved
