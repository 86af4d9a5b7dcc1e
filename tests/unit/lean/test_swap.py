"""Whole networks made lean and stock again: same numbers, same object in every other respect."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from snugfit import lean
from snugfit.lean import use_lean, use_lean_convolutions, use_stock
from snugfit.memory.tensors import saved_bytes


class Residual(nn.Module):
    """A stem and a residual block, with in-place neighbours."""

    def __init__(self, in_place=True):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(in_place), nn.MaxPool2d(2))
        self.first = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding="same", bias=False), nn.BatchNorm2d(8), nn.ReLU6(in_place)
        )
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8))
        self.activation = nn.LeakyReLU(0.1, in_place)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5), nn.BatchNorm1d(5))

    def forward(self, images):
        stem = self.stem(images)
        return self.head(self.activation(self.second(self.first(stem)) + stem))


def network(dtype=torch.float64):
    torch.manual_seed(0)
    model = Residual() if dtype == torch.float32 else Residual().to(dtype)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -0.5, 0.5)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return model.eval()


@settings(deadline=None, max_examples=20)
@given(st.data(), st.booleans(), st.booleans(), st.booleans())
def test_whatever_trains_the_numbers_are_torchs(assert_as_stock, data, train_input, training, last):
    model = network()
    for parameter in model.parameters():
        parameter.requires_grad_(data.draw(st.booleans()))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.train(training and data.draw(st.booleans()))
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    if last:
        model, images = (each.to(memory_format=torch.channels_last) for each in (model, images))
    changed = assert_as_stock(model, images, train_input=train_input, tolerance=1e-10)
    for mine, theirs in zip(changed.buffers(), model.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_traced_module_too(assert_as_stock):
    traced = fx.symbolic_trace(network().requires_grad_(False))
    changed = assert_as_stock(traced, torch.randn(2, 3, 8, 8, dtype=torch.float64), tolerance=1e-10)
    assert type(changed.get_submodule("stem.0")) is lean.LeanConv2d


def test_there_and_back():
    model = network()
    kinds, names, weights = [type(each) for each in model.modules()], list(model.state_dict()), list(model.parameters())
    use_lean(model)
    use_lean(model)
    swapped = {type(each) for each in model.modules()}
    assert swapped.isdisjoint(
        {nn.Conv2d, nn.BatchNorm2d, nn.BatchNorm1d, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.MaxPool2d}
    )
    assert list(model.state_dict()) == names and all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    network().load_state_dict(model.state_dict())
    use_stock(model)
    assert [type(each) for each in model.modules()] == kinds


def test_convolutions_alone():
    model = network()
    use_lean_convolutions(model)
    assert {type(each) for each in model.stem} == {lean.LeanConv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d}


def test_a_layer_that_is_the_module_itself_and_one_that_is_shared():
    layer = nn.ReLU()
    shared = nn.Sequential(layer, nn.Flatten(), layer)
    use_lean(shared)
    assert type(layer) is lean.LeanReLU
    use_stock(layer)
    assert type(layer) is nn.ReLU


def test_subclasses_are_left_alone():
    class Mine(nn.ReLU):
        def forward(self, input):
            return input + 1

    module = nn.Sequential(
        Mine(), nn.SyncBatchNorm(3), nn.ConvTranspose2d(3, 3, 1), nn.Hardswish(), nn.GELU(), nn.SiLU()
    )
    kinds = [type(each) for each in module]
    use_lean(module)
    assert [type(each) for each in module] == kinds


def test_copies_pickles_hooks_and_text(tmp_path):
    model = network()
    seen = []
    model.stem[0].register_forward_hook(lambda layer, *_: seen.append(type(layer)))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = model(images)
    use_lean(model)
    assert torch.equal(copy.deepcopy(model)(images), expected) and lean.LeanConv2d in seen
    assert "Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))" in repr(model)
    model.stem[0]._forward_hooks.clear()
    torch.save(model, tmp_path / "model.pth")
    loaded = torch.load(tmp_path / "model.pth", weights_only=False)
    assert torch.equal(loaded(images), expected) and type(loaded.stem[2]) is lean.LeanReLU


def functions_of(output):
    """Names of the autograd functions behind an output."""
    found, rest = set(), [output.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None and node not in found:
            found.add(node)
            rest.extend(parent for parent, _ in node.next_functions)
    return {type(node).__name__ for node in found}


OURS = {
    "_LeanConvolutionBackward", "_FrozenBatchNormBackward", "_ActivationBackward", "_LeanMaxPoolBackward",
    "_ShapeOnlyBackward",
}  # fmt: skip


def test_where_nothing_needs_a_gradient_torchs_own_operators_run(monkeypatch):
    model = network().requires_grad_(False)
    use_lean(model)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    assert functions_of(model(images)) >= OURS

    def fail(*_):
        raise AssertionError("an operator of ours ran")

    for function in torch.autograd.Function.__subclasses__():
        if function.__module__.startswith("snugfit.lean"):
            monkeypatch.setattr(function, "apply", fail)
    model(images.detach())
    with torch.no_grad():
        model(images)
    model.requires_grad_(True)
    with torch.inference_mode():
        model(images)


def test_where_all_trains_convolutions_and_norms_are_torchs_own():
    model = network().train()
    use_lean(model)
    found = functions_of(model(torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)))
    assert found.isdisjoint({"_LeanConvolutionBackward", "_FrozenBatchNormBackward"})


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_sees_torchs_own_operators():
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))
    model = nn.Sequential(*layers).double().eval().requires_grad_(False)
    model[-1].requires_grad_(True)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    results = []
    for compiled in (False, True):
        each = copy.deepcopy(model)
        use_lean(each)
        run = torch.compile(each, backend="aot_eager", fullgraph=True) if compiled else each
        leaf = images.clone().requires_grad_()
        run(leaf).square().sum().backward()
        results.append([leaf.grad, *(parameter.grad for parameter in each[-1].parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_without_values_shapes_and_saved_bytes_are_the_same(where):
    def step(model, images):
        saved = saved_bytes(lambda: model(images), [*model.parameters(), *model.buffers(), images])
        output = model(images)
        output.sum().backward()
        return saved, output.shape, images.grad.shape, images.grad.stride()

    def made(device):
        model = network(torch.float32).requires_grad_(False)
        if device == "meta":
            model = model.to(device)
        use_lean(model)
        return model, torch.zeros(2, 3, 16, 16, device=device).requires_grad_()

    expected = step(*made("cpu"))
    if where == "meta":
        assert step(*made("meta")) == expected
    else:
        with FakeTensorMode():
            assert step(*made("cpu")) == expected


@pytest.mark.parametrize("case", list(itertools.product((1, 2, 3), *[(False, True)] * 3)), ids=str)
def test_torchs_linear_is_lean_already(case):
    """The input for a weight that trains, and the weight, or its lowered copy, for an input that does."""
    dimensions, train_input, train_weight, autocast = case
    layer = nn.Linear(8, 5).requires_grad_(False)
    layer.weight.requires_grad_(train_weight)
    images = torch.randn((2, 3, 8)[-dimensions:], requires_grad=train_input)
    expected = images.numel() * train_weight + layer.weight.numel() * train_input * autocast
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert saved_bytes(lambda: layer(images), [layer.weight]) == expected * (2 if autocast else 4)
