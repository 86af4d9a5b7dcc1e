"""Norms and activations that work in the convolution's map: torch's numbers, in one map."""

import copy
import io
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_networks import nodes_of
from tensors import assert_same
from torch import fx, nn
from torch.nn import functional as F

from snugfit._chain import Chain, find_blocks
from snugfit.lean import (
    disable_inplace,
    enable_inplace,
    restore_float,
    run_per_sample,
    store_int8,
    use_lean,
    use_stock,
)
from snugfit.lean.saved_tensors import permissions_of
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.surgery import attach_side_network

ACTIVATIONS = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "leaky": lambda inplace: nn.LeakyReLU(0.1, inplace),
    "none": lambda inplace: None, "other": nn.Hardswish,
}  # fmt: skip
READ_AGAIN = ("nothing", "convolution", "norm", "activation", "input", "pooled", "viewed", "averaged", "averaged wide")


class Segment(nn.Module):
    """Convolution, norm and activation, one of whose maps may be read a second time."""

    def __init__(self, plan):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, plan["kernel"], plan["stride"], plan["kernel"] // 2, groups=plan["groups"])
        self.norm = nn.BatchNorm2d(4, affine=plan["affine"])
        self.activation = ACTIVATIONS[plan["activation"]](plan["inplace"])
        self.again = plan["again"]
        if self.again.startswith("averaged"):
            self.average = nn.AdaptiveAvgPool2d(1 if self.again == "averaged" else (2, 3))

    def forward(self, x):
        convolved = self.conv(x)
        normed = self.norm(convolved)
        y = normed if self.activation is None else self.activation(normed)
        if self.again == "pooled":
            return F.avg_pool2d(y, 3, 1, 1)
        if self.again.startswith("averaged"):
            return self.average(y)
        if self.again == "viewed":
            return y.flip(3).reshape(y.shape)
        other = {"convolution": convolved, "norm": normed, "activation": y, "input": x}.get(self.again)
        if other is None or (self.again == "input" and self.conv.stride != (1, 1)):
            return y
        return y + other if self.again != "activation" else y * 2 + other


class Net(nn.Module):
    def __init__(self, plans, linear):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.segments = nn.Sequential(*(Segment(plan) for plan in plans))
        self.ending = nn.Conv2d(4, 2, 3, padding=1)
        self.fc = nn.Linear(7, 3) if linear else nn.Identity()

    def forward(self, x):
        y = self.segments(self.stem(x))
        return self.fc(F.adaptive_avg_pool2d(self.ending(y), (5, 7)))


CHOICES = {
    "kernel": (1, 3), "stride": (1, 1, 2), "groups": (1, 2, 4), "affine": (False, True), "inplace": (False, True),
    "activation": tuple(ACTIVATIONS), "again": READ_AGAIN,
}  # fmt: skip
PLANS = st.lists(
    st.fixed_dictionaries({name: st.sampled_from(each) for name, each in CHOICES.items()}), min_size=1, max_size=4
)


def filled(model):
    """Statistics, scales and shifts that are not those of a fresh layer."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (*layer.parameters(), layer.running_var):
                nn.init.uniform_(tensor, 0.5, 2)
            nn.init.uniform_(layer.running_mean, -0.5, 0.5)
    return model


def network(plans, linear=False, dtype=torch.float64):
    torch.manual_seed(0)
    return fx.symbolic_trace(filled(Net(plans, linear)).to(dtype).eval().requires_grad_(False))


def segment(**changes):
    usual = {"kernel": 3, "stride": 1, "groups": 1, "affine": True, "inplace": False, "activation": "relu6"}
    return {**usual, "again": "nothing", **changes}


def images(batch=2, dtype=torch.float64, last=False, side=8):
    made = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return made.contiguous(memory_format=torch.channels_last) if last else made


def step(module, inputs, train_input=True, times=1):
    """Output, and gradients of inputs and parameters."""
    module.zero_grad()
    leaf = inputs.clone().requires_grad_(train_input)
    output = module(leaf)
    if output.requires_grad:
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        gradient = gradient.to(output.dtype)
        kept = gradient.clone()
        for _ in range(times):
            output.backward(gradient, retain_graph=times > 1)
        assert torch.equal(gradient, kept)
    return [output.detach().clone(), leaf.grad, *(each.grad for each in module.parameters())]


def overwriting(module):
    changed = copy.deepcopy(module)
    use_lean(changed)
    return changed, enable_inplace(changed)


@settings(deadline=None, max_examples=60)
@given(st.data(), PLANS, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_the_numbers_are_torchs_whatever_the_graph(data, plans, linear, train_input, last, batch):
    stock = network(plans, linear)
    for layer in stock.modules():
        if isinstance(layer, nn.BatchNorm2d):
            # torch refuses statistics of one value per channel, which one image of one pixel has
            layer.train(data.draw(st.sampled_from((False, False, batch > 1))))
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(data.draw(st.sampled_from((False, False, True))))
    changed, _ = overwriting(stock)
    inputs = images(batch, last=last, side=20)  # four strides of 2 leave statistics something to tell
    assert_same(step(changed, inputs, train_input), step(stock, inputs, train_input))
    with torch.no_grad():
        assert_same([changed(inputs)], [stock(inputs)])
    assert_same(list(changed.buffers()), list(stock.buffers()))


def test_an_empty_batch():
    stock = network([segment(), segment(again="input")])
    changed, _ = overwriting(stock)
    assert_same(step(changed, images(0)), step(stock, images(0)))


@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky", "none"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("train_input", [False, True])
def test_in_single_precision(activation, last, train_input):
    stock = network([segment(activation=activation), segment(activation=activation)], dtype=torch.float32)
    changed, names = overwriting(stock)
    inputs = images(dtype=torch.float32, last=last)
    assert len(names) == 2
    assert_same(step(changed, inputs, train_input), step(stock, inputs, train_input), 1e-5)


@pytest.mark.parametrize("last", [False, True])
def test_under_autocast_layers_do_as_before(last):
    stock = network([segment(), segment()], dtype=torch.float32)
    use_lean(stock)
    changed, _ = overwriting(stock)
    inputs = images(dtype=torch.float32, last=last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = step(changed, inputs), step(stock, inputs)
    assert_same(got, want, 0)


def test_a_second_backward_pass_adds_the_same_gradients():
    stock = network([segment(), segment(again="input"), segment(activation="leaky")])
    stock.get_submodule("stem").requires_grad_(True)
    changed, _ = overwriting(stock)
    assert_same(step(changed, images(), times=2), step(stock, images(), times=2))


def leaves(plans):
    """By layer, whether it may overwrite its input and its gradient."""
    changed, _ = overwriting(network(plans))
    found = {name: permissions_of(layer)[:2] for name, layer in changed.named_modules()}
    return {name.removeprefix("segments."): leave for name, leave in found.items() if any(leave)}


@pytest.mark.parametrize(
    ("again", "norm", "activation"),
    [
        ("nothing", (True, True), (True, True)), ("convolution", None, (True, False)),
        ("norm", (True, False), None), ("activation", (True, True), (True, False)),
        ("input", (True, True), (True, False)), ("pooled", (True, True), (True, False)),
        ("viewed", (True, True), (True, False)), ("averaged", (True, True), (True, True)),
        ("averaged wide", (True, True), (True, True)),
    ],
)  # fmt: skip
def test_what_else_reads_a_map_forbids_to_overwrite_it_or_its_gradient(again, norm, activation):
    found = leaves([segment(again=again)])
    if again == "convolution":
        activation, found["0.norm"] = (True, False), found.get("0.norm")
    assert found.get("0.norm") == norm and found.get("0.activation") == activation


def test_a_norm_without_activation():
    assert leaves([segment(activation="none")]) == {"0.norm": (True, True)}
    assert leaves([segment(activation="none", again="pooled")]) == {"0.norm": (True, False)}
    assert leaves([segment(activation="other")]) == {"0.norm": (True, False)}


class Twice(nn.Module):
    """A norm behind two convolutions, whose second output is read again; and one that a part calls unseen."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.norm, self.unseen, self.activation = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.ReLU()
        self.part = Part(self.unseen)

    def forward(self, x):
        y = self.two(self.activation(self.norm(self.one(x))))
        y = self.activation(self.norm(y)) + y
        return self.part(self.unseen(self.one(y)))


class Part(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x) + x


def test_a_layer_that_is_called_twice_overwrites_what_it_may_overwrite_in_every_call():
    class Tracer(fx.Tracer):
        def is_leaf_module(self, layer, name):
            return isinstance(layer, Part) or super().is_leaf_module(layer, name)

    torch.manual_seed(0)
    model = filled(Twice()).double().eval().requires_grad_(False)
    stock = fx.GraphModule(model, Tracer().trace(model))
    changed, names = overwriting(stock)
    assert names == () and permissions_of(changed.get_submodule("activation")).input
    assert not permissions_of(changed.get_submodule("activation")).gradient
    assert_same(step(changed, images()), step(stock, images()))


@pytest.mark.parametrize("train_gamma", [False, True])
def test_what_trains_is_looked_at_in_every_call(train_gamma):
    stock = network([segment(), segment()])
    changed, _ = overwriting(stock)
    for module in (stock, changed):
        module.get_submodule("segments.0.norm").requires_grad_(train_gamma)
        module.get_submodule("segments.1.norm").bias.requires_grad_(True)
        module.get_submodule("segments.1.norm").train(not train_gamma)
    assert_same(step(changed, images()), step(stock, images()))


KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre")


@pytest.mark.parametrize("kind", KINDS)
def test_what_hooks_are_given_stays_as_it_is(kind):
    """They are registered on the copy, after the call, and every one keeps what it is given."""
    stock = network([segment(), segment(again="input"), segment(activation="none")])
    seen = {}
    changed, _ = overwriting(stock)
    for module in (stock, changed):
        kept = seen.setdefault(id(module), [])
        for layer in list(module.modules())[1:]:
            if not list(layer.children()):
                # a full backward hook forbids torch's own in-place activations; these are none
                getattr(layer, f"register_{kind}_hook")(
                    lambda _, *given, kept=kept: kept.extend(each for some in given for each in flat(some))
                )
    assert_same(step(changed, images()), step(stock, images()))
    assert seen[id(stock)]
    assert_same(seen[id(changed)], seen[id(stock)])


def flat(given):
    given = given if isinstance(given, tuple) else (given,)
    return [each for each in given if each is not None]


def test_a_hook_on_every_module():
    stock = network([segment(), segment()])
    changed, _ = overwriting(stock)
    kept = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda layer, given, output: kept.append((output, output.clone()))
    )
    try:
        changed(images())
    finally:
        handle.remove()
    assert kept and all(torch.equal(map_, before) for map_, before in kept)


def test_there_and_back_copies_and_state(tmp_path):
    stock = network([segment(), segment(again="input")])
    want = step(stock, images())
    changed, names = overwriting(stock)
    assert names == ("segments.0.norm", "segments.1.norm") == enable_inplace(changed)
    assert list(changed.state_dict()) == list(stock.state_dict())
    twin = copy.deepcopy(changed)
    assert permissions_of(twin.get_submodule("segments.0.norm"))[:2] == (True, True)
    twin.get_submodule("segments.0.conv").register_forward_hook(lambda *_: None)
    assert permissions_of(changed.get_submodule("segments.0.norm")).input
    assert not permissions_of(twin.get_submodule("segments.0.norm")).input
    assert_same(step(twin, images()), want)
    buffer = io.BytesIO()
    torch.save(changed, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert permissions_of(loaded.get_submodule("segments.0.norm")).gradient
    assert_same(step(loaded, images()), want)
    use_stock(changed)
    assert_same(step(changed, images()), want, 0)
    use_lean(changed)
    assert_same(step(changed, images()), want)
    disable_inplace(changed)
    assert not any(permissions_of(layer).input for layer in changed.modules())


def test_a_compiler_sees_torchs_own_operators():
    changed, _ = overwriting(network([segment()]))
    inputs = images()
    want = changed(inputs)
    compiled = torch.compile(changed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), want, rtol=1e-10, atol=1e-10)
    exported = torch.export.export(changed, (inputs,)).graph
    assert "native_batch_norm.out" not in str(exported)


class Inverted(nn.Module):
    """An inverted residual whose expanded map has 16 times the channels of what it reads."""

    def __init__(self, stride=2):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6(),
            nn.Conv2d(64, 64, 3, stride, 1, groups=64, bias=False), nn.BatchNorm2d(64), nn.ReLU6(),
            nn.Conv2d(64, 4, 1, bias=False), nn.BatchNorm2d(4),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


class Residuals(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Inverted(), Inverted())
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def residuals(dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    module = Chain.from_module(filled(Residuals()).to(dtype).eval(), (3, 32, 32)).to_module().to(device)
    blocks = find_blocks(module, (3, 32, 32))
    return module.requires_grad_(False), [block for block in blocks if block.name.startswith("blocks.")]


@pytest.mark.parametrize("first", ["overwrite", "sample"])
@pytest.mark.parametrize("int8", [False, True])
def test_by_sample_and_in_8_bits(first, int8):
    changed, blocks = residuals()
    if int8:
        store_int8(changed)
    stock = copy.deepcopy(changed)
    restore_float(stock)
    use_lean(changed)
    inputs = images(4, side=32)
    want = step(stock, inputs)[:2]
    calls = {
        "overwrite": lambda: enable_inplace(changed),
        "sample": lambda: run_per_sample(changed, nodes_of(blocks[:1])),
    }
    for name in (first, *(set(calls) - {first})):
        calls[name]()
    assert all(permissions_of(changed.get_submodule(f"blocks.{block}.layers.1")).gradient for block in (0, 1))
    assert_same(step(changed, inputs)[:2], want)
    with torch.no_grad():
        assert_same([changed(inputs)], want[:1])
    run_per_sample(changed, {})
    restore_float(changed)
    assert_same(step(changed, inputs)[:2], want)


def test_a_side_network_takes_no_leave_over_from_the_backbone():
    """It adds to maps, and an addition hands its gradient to both sides."""
    torch.manual_seed(0)
    backbone = Chain.from_module(filled(Residuals()).double().eval(), (3, 64, 64)).to_module().requires_grad_(False)
    use_lean(backbone)
    assert enable_inplace(backbone)
    attached = attach_side_network(backbone, (3, 64, 64))
    assert not any(permissions_of(layer).input for layer in attached.modules())
    stock = copy.deepcopy(attached)
    use_stock(stock)
    assert enable_inplace(attached)
    assert_same(step(attached, images(side=64)), step(stock, images(side=64)))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("device", "gradients"), [("cpu", (False, True)), ("meta", (False,))]
)  # bits come whole on meta
def test_one_expanded_map_is_alive_where_two_were(device, gradients, last):
    """Peak tensor bytes; on the meta device bits are packed in one go, which takes room."""
    expanded, depthwise = 8 * 64 * 32 * 32 * 4, 8 * 64 * 16 * 16 * 4
    peaks = {}
    for gradient in gradients:
        for overwrite in (False, True):
            module, _ = residuals(torch.float32, device)
            use_lean(module)
            assert not overwrite or len(enable_inplace(module)) == 6
            inputs = torch.randn(8, 3, 32, 32, device=device).requires_grad_(gradient)
            if last:
                inputs = inputs.detach().contiguous(memory_format=torch.channels_last).requires_grad_(gradient)
            peaks[gradient, overwrite] = tensor_peak_bytes(partial(run, module, inputs), [module, inputs])
    scratch = depthwise  # stem's output, packed bits and parameters are less than another map of a quarter's size
    for gradient in gradients:
        assert 2 * expanded <= peaks[gradient, False]
        assert expanded + depthwise <= peaks[gradient, True] < expanded + depthwise + scratch


def run(module, inputs):
    output = module(inputs)
    if output.requires_grad:
        output.sum().backward()
