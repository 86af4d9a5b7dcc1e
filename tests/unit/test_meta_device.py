"""What is remembered of operators on the meta device is what they would give."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from snugfit import _meta_device as meta
from snugfit._chain.propagation import node_shapes, run_on_meta
from snugfit.lean import use_lean
from snugfit.memory.tensors import tensor_peak_bytes


@pytest.fixture(autouse=True)
def nothing_known():
    meta.forget()
    yield
    meta.forget()


def tensors(value):
    return [each for each in tree_iter(value) if isinstance(each, Tensor)]


class Checking(TorchDispatchMode):
    """Holds what is remembered against what the operator gives."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.asked += 1
        found, given = meta.run(func, args, kwargs or {}), func(*args, **(kwargs or {}))
        inputs = tensors((args, kwargs))

        def facts(value):
            told = [
                (one.shape, one.stride(), one.dtype, one.device, one.storage_offset(), one.untyped_storage().nbytes())
                for one in tensors(value)
            ]
            shared = [[one is other for other in inputs] + [one._is_view()] for one in tensors(value)]
            stored = [
                [one.untyped_storage()._cdata == o.untyped_storage()._cdata for o in inputs] for one in tensors(value)
            ]
            return type(value), told, shared, stored

        assert facts(found) == facts(given), func
        return found


class Net(nn.Module):
    """Branches, views, in-place operators, several outputs of one operator, attention and dropout."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Dropout(0.1))
        self.norm, self.mix = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, images):
        maps = self.stem(images)
        maps = maps + self.branch(maps)
        one, two = torch.cat([maps, maps * 2.0], dim=1).chunk(2, dim=1)
        tokens = self.norm((one - two).flatten(2).transpose(1, 2))
        return self.head(self.mix(tokens, tokens, tokens)[0].mean(dim=1))


def a_step(network, batch, make=torch.optim.AdamW):
    optimizer = make(network.parameters(), lr=0.1)

    def step():
        labels = torch.empty(batch, dtype=torch.long, device="meta")
        nn.functional.cross_entropy(network(torch.empty(batch, 3, 8, 8, device="meta")), labels).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("lean", [False, True])
def test_every_operator_of_a_step_gives_what_it_gave(lean, monkeypatch):
    called = []
    original = meta._call
    monkeypatch.setattr(meta, "_call", lambda *all: (called.append(all[0]), original(*all))[1])
    network = Net().to("meta")
    if lean:
        use_lean(network)
    with Checking() as checking:
        for batch in (4, 4, 3, 4):
            a_step(network, batch)()
    assert len(called) == len(set(called)), "an operator is called for the first time once"
    assert len(called) < checking.asked / 2


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_peaks_are_the_same(optimizer, monkeypatch):
    def peak():
        network = Net().to("meta")
        return [tensor_peak_bytes(a_step(network, batch, optimizer), [network], repeats=2) for batch in (2, 5, 2)]

    remembered = peak()
    monkeypatch.setattr(meta, "run", lambda func, args, kwargs: func(*args, **kwargs))
    assert remembered == peak()


def test_numbers_of_other_types_are_other_arguments():
    def run(value):
        return meta.run(torch.ops.aten.add.Tensor, (torch.empty(2, dtype=torch.int64, device="meta"), value), {}).dtype

    assert [run(1), run(1.0), run(1), run(1.0)] == [torch.int64, torch.float32, torch.int64, torch.float32]


def test_real_tensors_are_computed_with():
    ones = torch.ones(3)
    for _ in range(2):
        assert meta.run(torch.ops.aten.add.Tensor, (ones, 2.0), {}).tolist() == [3, 3, 3]
    assert not meta._known


def test_what_changes_shapes_or_storages_is_called_each_time():
    aten = torch.ops.aten
    for _ in range(2):
        tensor, other = torch.empty(2, 3, device="meta"), torch.empty(7, device="meta")
        meta.run(aten.t_.default, (tensor,), {})
        assert tensor.shape == (3, 2)
        meta.run(aten.resize_.default, (tensor, [9]), {})
        assert tensor.shape == (9,)
        meta.run(aten.set_.source_Tensor, (tensor, other), {})
        assert tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def test_no_more_is_remembered_than_so_much(monkeypatch):
    monkeypatch.setattr(meta, "MOST", 5)
    for size in range(20):
        meta.run(torch.ops.aten.relu.default, (torch.empty(size, device="meta"),), {})
        assert len(meta._known) <= 5


def test_shapes_and_changes_of_the_input_are_the_same_from_the_cache():
    changing, keeping = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(3, 4, 3))
    for _ in range(2):
        assert [run_on_meta(each, (3, 8, 8), training=False)[1] for each in (changing, keeping)] == [True, False]
    traced = fx.symbolic_trace(Net().eval())
    fresh = node_shapes(traced, (3, 8, 8))
    before = len(meta._known)
    assert node_shapes(traced, (3, 8, 8)) == fresh and len(meta._known) == before > 0
    real = {node.name: shape for node, shape in fresh.items()}
    record = ShapeProp(traced)
    record.propagate(torch.randn(2, 3, 8, 8))
    for node in traced.graph.nodes:
        known = node.meta.get("tensor_meta")
        if hasattr(known, "shape"):
            assert real[node.name] == tuple(known.shape), node


ATEN = torch.ops.aten
MASKS = [list(mask) for mask in product((True, False), repeat=3)]


def on_meta(*shape, dtype=torch.float32, memory_format=torch.contiguous_format):
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)


def norms(images, dtype, *, affine=True, stats=True, training=True):
    """A batch norm as an operator and its arguments, then its backward passes."""
    channels = images.shape[1]
    weight, bias = (on_meta(channels, dtype=dtype) if affine else None for _ in range(2))
    kept = [on_meta(channels) if stats else None for _ in range(2)]
    forward = (images, weight, bias, *kept, training, 0.1, 1e-5)
    yield ATEN.native_batch_norm.default, forward
    if stats:
        yield ATEN._native_batch_norm_legit.default, forward
    for mask in MASKS:
        saved = on_meta(channels), on_meta(channels)
        arguments = (torch.empty_like(images), images, weight, *kept, *saved, training, 1e-5, mask)
        yield ATEN.native_batch_norm_backward.default, arguments


def told(outputs):
    return [
        one if one is None else (one.shape, one.stride(), one.dtype, one.device, one.untyped_storage().nbytes())
        for one in outputs
    ]


SHAPES = {
    "usual": (2, 3, 4, 5), "one pixel": (2, 3, 1, 1), "one row": (2, 3, 1, 4), "one image": (1, 3, 4, 4),
    "one channel": (2, 1, 4, 4),
}  # fmt: skip


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_batch_norm_gives_what_torch_gives(shape, memory_format, dtype):
    images = on_meta(*shape, dtype=dtype, memory_format=memory_format)
    cases = [
        {"dtype": kind, "affine": affine, "stats": stats, "training": training}
        for kind, affine in ((torch.float32, True), (dtype, True), (dtype, False))
        for stats, training in ((True, True), (True, False), (False, True))
    ]
    for case in cases:
        for func, arguments in norms(images, **case):
            found = meta._batch_norm(func, arguments, {})
            assert found is not None and told(found) == told(func(*arguments)), (func, case)


UNUSUAL = {
    "one value": on_meta(1, 3, 1, 1),
    "rows": on_meta(2, 3, 4),
    "double": on_meta(2, 3, 4, 4, dtype=torch.float64),
    "transposed": on_meta(2, 3, 4, 5).transpose(2, 3),
    "gaps": on_meta(2, 3, 8, 8)[:, :, ::2],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_torch_computes_an_unusual_batch_norm(name):
    for func, arguments in norms(UNUSUAL[name], torch.float32):
        assert meta._batch_norm(func, arguments, {}) is None, func


def test_torch_refuses_a_batch_norm_that_does_not_fit():
    images, three, two = on_meta(2, 3, 4, 4), on_meta(3), on_meta(2)
    forward, backward = ATEN.native_batch_norm.default, ATEN.native_batch_norm_backward.default
    last = (three, three, three, three, three, True, 1e-5, [True] * 3)
    for func, arguments in (
        (forward, (images, three, three, two, two, True, 0.1, 1e-5)),
        (forward, (images, two, three, three, three, True, 0.1, 1e-5)),
        (forward, (images, three, three, None, None, False, 0.1, 1e-5)),
        (backward, (on_meta(2, 3, 5, 5), images, *last)),
    ):
        with pytest.raises((RuntimeError, AssertionError)):
            meta.run(func, arguments, {})


def test_a_gradient_of_another_layout_is_left_to_torch():
    grad, images = on_meta(2, 3, 4, 4, memory_format=torch.channels_last), on_meta(2, 3, 4, 4)
    arguments = (grad, images, *[on_meta(3)] * 5, True, 1e-5, [True] * 3)
    assert meta._batch_norm(ATEN.native_batch_norm_backward.default, arguments, {}) is None


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_activation_gives_what_torch_gives(shape, memory_format, dtype):
    maps, gradient = (on_meta(*shape, dtype=dtype, memory_format=memory_format) for _ in range(2))
    assert meta._activation(ATEN.hardtanh_.default, (maps, 0.0, 6.0), {}) is maps
    assert ATEN.hardtanh_.default(maps, 0.0, 6.0) is maps
    for func, settings in ((ATEN.hardtanh_backward.default, (0.0, 6.0)), (ATEN.threshold_backward.default, (0,))):
        arguments = (gradient, maps, *settings)
        found = meta._activation(func, arguments, {})
        assert found is not None and told([found]) == told([func(*arguments)]), func


@pytest.mark.parametrize("name", UNUSUAL)
def test_torch_computes_an_unusual_activation(name):
    maps = UNUSUAL[name]
    assert meta._activation(ATEN.hardtanh_.default, (maps, 0.0, 6.0), {}) is None
    assert meta._activation(ATEN.hardtanh_backward.default, (torch.empty_like(maps), maps, 0.0, 6.0), {}) is None


def test_a_product_is_added_in_place_where_its_matrices_fit():
    total, left, right = on_meta(4, 9, 5)[:, 2], on_meta(4, 7), on_meta(7, 5)
    func = ATEN.addmm_.default
    assert meta._product(func, (total, left, right), {}) is total is func(total, left, right)
    for arguments in (
        (on_meta(4, 6), left, right),
        (total, left, on_meta(8, 5)),
        (total, left[0], right),
    ):
        assert meta._product(func, arguments, {}) is None
        with pytest.raises(RuntimeError):
            meta.run(func, arguments, {})
    assert meta._product(func, (total, left, right), {"beta": 0}) is None
    assert meta._product(func, (total, left, right.bfloat16()), {}) is None
