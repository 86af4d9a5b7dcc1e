"""The steps of torch.optim's fused optimizers, bit for bit, without its objects."""

import pytest
import torch
from forked import run_copies
from torch import nn

from snugfit.lean.update_rules import FusedAdamW, FusedSGD

RULES = {
    "sgd": (lambda: FusedSGD(0.1), lambda p: torch.optim.SGD(p, 0.1, fused=True)),
    "momentum": (
        lambda: FusedSGD(0.1, 0.9, 1e-2),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2, fused=True),
    ),
    "adamw": (
        lambda: FusedAdamW(0.01, 1e-2),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=1e-2, fused=True),
    ),
    "adam": (lambda: FusedAdamW(0.01), lambda p: torch.optim.Adam(p, 0.01, fused=True)),
}
each_rule = pytest.mark.parametrize("name", RULES)


@each_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (6, 5, 3, 3)])
def test_steps_and_state_equal_torchs_bit_for_bit(name, dtype, shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if len(shape) == 4:
        start = start.contiguous(memory_format=torch.channels_last)
    mine, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    rule, stock = RULES[name][0](), RULES[name][1]([theirs])
    for step in range(4):
        rule.lr = stock.param_groups[0]["lr"] = 0.1 / (step + 1)
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        mine.grad = gradient.clone()  # row-major, for a channels-last parameter
        theirs.grad = torch.empty_like(theirs).copy_(gradient)
        rule.step(mine)
        stock.step()
    assert torch.equal(mine, theirs)
    state = {key: value for key, value in stock.state[theirs].items() if isinstance(value, torch.Tensor)}
    assert rule.state.keys() == state.keys()
    assert all(torch.equal(rule.state[key], state[key]) for key in state)


@each_rule
def test_a_step_copies_no_gradient_in_channels_last(name):
    parameter = nn.Parameter(torch.ones(64, 64, 3, 3).contiguous(memory_format=torch.channels_last))
    rule = RULES[name][0]()
    parameter.grad = torch.ones_like(parameter)
    rule.step(parameter)
    with torch.profiler.profile(profile_memory=True) as profiler:
        rule.step(parameter)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events())
    assert allocated < parameter.nbytes / 4


@pytest.mark.parametrize(("name", "count"), [("sgd", 0), ("momentum", 1), ("adamw", 2)])
def test_on_the_meta_device_a_step_makes_the_state(name, count):
    parameter = nn.Parameter(torch.empty(4, 3, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    rule = RULES[name][0]()
    rule.step(parameter)
    assert sum(value.shape == parameter.shape and value.is_meta for value in rule.state.values()) == count


def test_no_optimizer_imports_dynamo():
    """torch.optim's first object does, with inductor and sympy: 68 MiB."""
    first = """if True:
        import sys, torch
        from snugfit._core.workload import OptimizerSettings
        from snugfit._training.optimizers import ParameterOptimizers
    """
    step = """if True:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizers = ParameterOptimizers([("p", parameter)], OptimizerSettings(name, schedule="constant"))
        optimizers.train()
        parameter.grad = torch.ones(3)
        optimizers.step()
        optimizers.average()
        assert (parameter != 1).all()
        loaded = {"torch._dynamo", "torch._inductor", "sympy", "schedulefree"} & sys.modules.keys()
        assert loaded == ({"schedulefree"} if name == "schedulefree" else set()), loaded
    """
    found = run_copies(first, *(f"name = '{name}'\n{step}" for name in ("sgd", "adamw", "schedulefree")))
    assert [code for code, _ in found] == [0] * 3
