"""The profile of every operator and tensor: what is told of it, not how long it takes."""

import contextlib
import copy
import math
import time
from dataclasses import replace

import pytest
import torch
from small_networks import CLASSES, NETWORKS, NO_LIMIT, ResidualNet, TinyViT, probes_of, profile_of
from torch import nn

from snugfit import _stopwatch
from snugfit._chain import Chain
from snugfit._core.profile import TensorProfile
from snugfit._core.serial import from_data, to_data
from snugfit.errors import ModelError
from snugfit.memory import Baseline, MemoryLimit
from snugfit.profiling import TensorProbe, operator
from snugfit.profiling.operator import timed

BATCH = 4


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """One run of each operator: what is told does not depend on the number of runs."""
    monkeypatch.setattr(operator, "REPEATS", 0)


def small_vgg(bias=True):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3, padding=1, groups=2, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, CLASSES),
    )  # fmt: skip


SMALL = (3, 16, 16)


def small(lean=True, model=None):
    return profile_of(model or small_vgg(), BATCH, lean, shape=SMALL)


def by_name(profile):
    return {operator.name: operator for operator in profile.operators}


def saved_bytes(saved):
    """Bytes by map."""
    return {one.map: one.bytes for one in saved}


def test_operators_stand_in_order_of_execution_and_tell_where_they_read():
    found = small()
    assert [o.name for o in found.operators] == [str(i) for i in range(8)]
    kinds = [
        "LeanConv2d",
        "LeanBatchNorm2d",
        "LeanReLU",
        "LeanMaxPool2d",
        "LeanConv2d",
        "LeanReLU",
        "Flatten",
        "Linear",
    ]
    assert [o.kind for o in found.operators] == kinds
    assert [o.inputs for o in found.operators] == [(i - 1,) for i in range(8)]
    assert found.input_bytes == 3 * 256 * 4
    assert found.batch == BATCH


@pytest.mark.parametrize("name", NETWORKS)
def test_tensors_are_the_models_parameters(name):
    model = NETWORKS[name]()
    want = {n: p.numel() for n, p in model.named_parameters()}
    found = profile_of(model, BATCH)
    assert {t.name: t.parameters for t in found.tensors} == want
    assert len(found.tensors) == len(want)
    assert all(t.bytes == 4 * t.parameters for t in found.tensors)
    assert list(want)[-2:] == [t.name for t in found.operators[-1].tensors]


@pytest.mark.parametrize("name", NETWORKS)
def test_times_are_times(name):
    found = profile_of(NETWORKS[name](), BATCH)
    for one in found.operators:
        assert one.forward_seconds >= 0
        assert one.pass_seconds >= 0
    for tensor in found.tensors:
        assert tensor.seconds >= 0
        assert tensor.update_seconds >= 0


def test_a_profile_is_data(untimed):
    found = small()
    assert from_data(TensorProfile, to_data(found)) == found


def test_multiply_accumulates_are_those_of_the_layers():
    found = by_name(small())
    assert found["0"].macs == 256 * 27 * 8
    assert found["4"].macs == 64 * 9 * 4 * 4
    assert found["7"].macs == 256 * CLASSES
    assert [found[name].macs for name in "12356"] == [0] * 5
    for name in "047":
        assert [t.macs for t in found[name].tensors] == [found[name].macs, 0]
    assert [t.macs for t in found["1"].tensors] == [0, 0]


def test_in_place_and_views_give_the_map_that_they_read():
    found = by_name(small())
    assert found["2"].map == found["1"].map, "in place"
    assert found["5"].map != found["4"].map
    maps = [found[name].map for name in "013457"]
    assert len(set(maps)) == 6
    assert 0 not in maps
    assert [found[name].output_bytes for name in "0367"] == [8 * 1024, 8 * 256, 4 * 256, 4 * CLASSES]


def test_flatten_of_a_single_pixel_is_a_view_and_of_more_in_channels_last_is_not():
    assert by_name(small())["6"].map != by_name(small())["5"].map
    found = by_name(profile_of(ResidualNet(), BATCH))
    assert found["flatten"].map == found["avgpool"].map
    assert found["flatten"].handed == found["flatten"].inputs


def test_what_lean_operators_keep():
    found = by_name(small(lean=True))
    conv, norm, relu, pool, grouped, plain, flat, linear = (found[str(i)] for i in range(8))
    for one in (conv, norm, grouped, flat, linear):
        assert one.saved == (), one.name
    assert [s.bytes for s in relu.saved] == [8 * 256 / 8], "a bit per element"
    assert [s.bytes for s in pool.saved] == [8 * 64], "a byte per output"
    assert [s.bytes for s in plain.saved] == [4 * 64 / 8]
    assert saved_bytes(conv.tensors[0].saved) == {0: 3 * 1024}
    assert saved_bytes(norm.tensors[0].saved) == {conv.map: 8 * 1024}
    assert saved_bytes(grouped.tensors[0].saved) == {pool.map: 8 * 256}
    assert saved_bytes(linear.tensors[0].saved) == {flat.map: 4 * 256}
    assert [one.tensors[1].saved for one in (conv, norm, grouped, linear)] == [()] * 4


def test_what_stock_operators_keep():
    found = by_name(small(lean=False))
    conv, norm, relu, pool, grouped, plain = (found[str(i)] for i in range(6))
    assert [one.kind for one in (conv, norm, relu, pool)] == ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    assert saved_bytes(conv.saved) == {0: 3 * 1024}, "its input, though no weight trains"
    assert saved_bytes(norm.saved)[conv.map] == 8 * 1024
    assert saved_bytes(relu.saved) == {relu.map: 8 * 1024}, "the output, in floats"
    assert saved_bytes(pool.saved).items() >= {relu.map: 8 * 1024}.items()
    assert sorted(saved_bytes(pool.saved).values()) == [8 * 64 * 8, 8 * 1024], "eight bytes per output, and the input"
    assert saved_bytes(plain.saved) == {plain.map: 4 * 256}
    assert saved_bytes(grouped.tensors[1].saved) == {pool.map: 8 * 256}


def test_a_residual_network_has_branches_whose_sum_hands_its_gradient_to_both():
    found = profile_of(ResidualNet(), BATCH)
    operators, index = found.operators, {o.name: i for i, o in enumerate(found.operators)}
    added = operators[index["add"]]
    stem = index["relu"]
    assert set(added.inputs) == {index["layer1.0.bn2"], stem}
    assert set(added.handed) == set(added.inputs)
    assert len({added.map, *(operators[i].map for i in added.inputs)}) == 3
    assert operators[index["layer1.0.conv1"]].inputs == (stem,)
    assert operators[index["layer1.0.conv2"]].entry == stem, "the unit's input stays while it runs"
    shortcut = operators[index["layer2.0.downsample.0"]]
    assert shortcut.inputs == operators[index["layer2.0.conv1"]].inputs
    shared = {operators[index[n]].tensors[0].saved[0].map for n in ("layer2.0.downsample.0", "layer2.0.conv1")}
    assert len(shared) == 1, "both keep the same map"


def test_a_transformer():
    found = profile_of(TinyViT(width=32, heads=2, layers=1), BATCH)
    ops, tokens, width = {o.name: o for o in found.operators}, 65, 32
    assert [t.name for t in ops["linear"].tensors] == [f"layers.0.attention.in_proj_{k}" for k in ("weight", "bias")]
    assert [t.name for t in ops["expand"].tensors] == ["class_token"]
    assert [t.name for t in ops["add"].tensors] == ["pos_embedding"]
    assert ops["expand"].inputs == ()
    assert ops["linear"].macs == tokens * width * 3 * width
    assert ops["scaled_dot_product_attention"].macs == 2 * tokens * tokens * width
    assert ops["layers.0.mlp.0"].tensors[0].macs == tokens * width * 2 * width
    assert ops["layers.0.ln_1"].macs == 0
    views = ("chunk", "getitem_1", "unflatten_1", "transpose_3")
    assert {ops[name].map for name in views} == {ops["linear"].map}
    assert len(ops["scaled_dot_product_attention"].inputs) == 3
    norm = ops["layers.0.ln_1"]
    assert (
        saved_bytes(norm.saved).items() <= saved_bytes(norm.tensors[0].saved).items() | saved_bytes(norm.saved).items()
    )
    assert norm.saved == norm.tensors[0].saved, "the black box keeps the same whatever trains, once"
    assert found.operators[norm.inputs[0]].map in saved_bytes(norm.saved)


class WithAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)
        self.attention, self.fc = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.fc(x.mean(1))


def test_torchs_own_attention_is_one_operator():
    found = by_name(small(model=WithAttention()))["attention"]
    assert found.kind == "MultiheadAttention"
    macs = {tensor.name: tensor.macs for tensor in found.tensors}
    assert found.macs == 16 * 16 * (3 * 16 + 16) + 2 * 16 * 16 * 16
    assert macs == {
        "attention.in_proj_weight": 16 * 16 * 48, "attention.in_proj_bias": 0,
        "attention.out_proj.weight": 16 * 16 * 16, "attention.out_proj.bias": 0,
    }  # fmt: skip
    inside = saved_bytes(found.saved)
    alone = saved_bytes(found.tensors[2].saved)
    assert alone.items() <= inside.items(), "what is made inside bears one number, whoever keeps it"


class DirectParameters(nn.Module):
    """A layer that reads a parameter which is nobody's input."""

    def __init__(self):
        super().__init__()
        self.conv, self.prompt = nn.Conv2d(3, 4, 3), nn.Parameter(torch.zeros(1, 4))
        self.middle, self.fc = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)) + self.middle(self.prompt))


def test_a_parameter_that_a_layer_reads_as_its_input():
    found = by_name(small(model=DirectParameters()))
    assert {t.name for t in found["middle"].tensors} == {"prompt", "middle.weight", "middle.bias"}
    assert found["middle"].inputs == ()
    assert {t.name: t.macs for t in found["middle"].tensors} == {"prompt": 4, "middle.weight": 4, "middle.bias": 0}


def test_what_the_user_froze_is_left_out():
    model = small_vgg()
    for name in ("0.weight", "1.bias", "7.bias"):
        model.get_parameter(name).requires_grad_(False)
    found = by_name(small(model=model))
    assert [[t.name for t in found[n].tensors] for n in "0147"] == [
        ["0.bias"], ["1.weight"], ["4.weight", "4.bias"], ["7.weight"],
    ]  # fmt: skip


def test_the_chain_stays_as_it_was():
    model = small_vgg()
    model[0].bias.requires_grad_(False)
    chain = Chain.from_module(model, SMALL)
    before, kinds = copy.deepcopy(model.state_dict()), [type(layer) for layer in model]
    found = probe(chain).measure(NO_LIMIT)
    assert found is not None
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [type(layer) for layer in model] == kinds
    assert all(p.grad is None for p in model.parameters())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["0.bias"]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, CLASSES)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        x = self.conv(x) * self.scale
        return self.fc((x - x.mean() + self.scale).mean((2, 3)))


def test_a_parameter_that_two_operators_read_is_refused():
    with pytest.raises(ModelError) as error:
        small(model=Twice())
    assert str(error.value) == "scale is read by two operators, so its time cannot be measured. Use another strategy."
    frozen = Twice()
    frozen.scale.requires_grad_(False)
    assert "scale" not in {t.name for t in small(model=frozen).tensors}


class FailsAlone(nn.Conv2d):
    """Runs on the meta device only."""

    error = RuntimeError("not here.\nsecond line")

    def forward(self, x):
        if not x.is_meta:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize(
    "error", [RuntimeError("not here.\nsecond line"), TypeError("not here"), ValueError("not here")]
)
def test_an_operator_that_cannot_run_alone_is_named(error, monkeypatch):
    monkeypatch.setattr(FailsAlone, "error", error)
    with pytest.raises(ModelError) as raised:
        small(model=nn.Sequential(nn.Conv2d(3, 4, 3), FailsAlone(4, 4, 3), nn.Flatten(), nn.Linear(576, CLASSES)))
    want = "1 (FailsAlone) cannot be timed alone: not here. Train this model with another strategy."
    assert str(raised.value) == want


def probe(chain, batch_limit=8, **changes):
    settings = {
        "prepare": lambda module: module, "make_update": lambda parameter: lambda: None,
        "context": lambda value: contextlib.nullcontext(), "make_steps": lambda batch: [(int, int)] * 3,
    }  # fmt: skip
    return TensorProbe("probe", chain, "cpu", batch_limit=batch_limit, **{**settings, **changes})


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("not enough memory: you tried to allocate 9 bytes")])
def test_where_memory_is_refused_the_batch_is_halved(error):
    chain, batches = Chain.from_module(small_vgg(), SMALL), []

    def context(value):
        if batches[-1:] != [len(value)]:
            batches.append(len(value))
        if len(value) > 2:
            raise error
        return contextlib.nullcontext()

    found = probe(chain, 9, context=context).measure_operators(NO_LIMIT)
    assert batches == [9, 4, 2]
    assert found is not None
    assert found.batch == 2


def test_one_sample_that_is_too_much_gives_none():
    def refuse(value):
        raise MemoryError

    chain = Chain.from_module(small_vgg(), SMALL)
    assert probe(chain, context=refuse).measure_operators(NO_LIMIT) is None
    assert probe(chain, context=refuse).measure(NO_LIMIT) is None


def test_whole_steps_that_memory_refuses_are_left_out_or_smaller():
    def steps(batch):
        if batch > 4:
            raise MemoryError
        return [(int, int)] * 3

    chain = Chain.from_module(small_vgg(), SMALL)
    found = probe(chain, make_steps=steps).measure(NO_LIMIT)
    assert (found.batch, found.steps.batch) == (8, 4), "half the batch at least, or small steps stand for large ones"
    assert min(found.steps.stock, found.steps.full, found.steps.head, found.seconds) >= 0

    def refuse(batch):
        raise MemoryError

    assert probe(chain, make_steps=refuse).measure(NO_LIMIT).steps is None


def test_the_first_run_of_every_operator_has_room_for_kernels_and_timed_ones_have_not(monkeypatch):
    inside, timed = [], []

    @contextlib.contextmanager
    def kernels(limit):
        inside.append(True)
        yield
        inside.pop()
        entered.append(True)

    def watched(function, device):
        timed.append(bool(inside))
        return original(function, device)

    entered, original = [], operator.timed
    monkeypatch.setattr(MemoryLimit, "allow_kernels", kernels)
    monkeypatch.setattr(operator, "timed", watched)
    found = probe(Chain.from_module(small_vgg(), SMALL)).measure_operators(NO_LIMIT)
    assert len(entered) >= len(found.operators)
    assert timed and not any(timed)


def test_other_errors_are_not_taken_for_memory():
    def fail(value):
        raise RuntimeError("shape '[2]' is invalid")

    with pytest.raises(RuntimeError, match="invalid"):
        probe(Chain.from_module(small_vgg(), SMALL), context=fail).measure_operators(NO_LIMIT)


def test_the_first_batch_keeps_maps_small():
    chain = Chain.from_module(small_vgg(), SMALL)
    assert probe(chain, 8)._first_batch() == 8
    assert probe(chain, 10**6)._first_batch() == 32_000_000 // (4 * 8 * 256)
    on_gpu = replace(probe(chain, 10**6), device="cuda:0")
    assert on_gpu._first_batch() == 512_000_000 // (4 * 8 * 256), "few images would measure the host"


def test_more_runs_are_timed_where_they_are_short(monkeypatch):
    monkeypatch.setattr(operator, "REPEATS", 5)
    assert [operator.enough([9.0, *[1e-3] * n]) for n in (4, 5)] == [False, True]
    assert [operator.enough([9.0, *[0.5] * n]) for n in (1, 2)] == [False, True]
    assert operator.typical([9.0, 1.0, 3.0, 2.0]) == 2.0
    assert operator.typical([9.0]) == 9.0
    assert math.isclose(operator.typical([9.0, 1.0, 2.0]), 1.5)


def test_the_strategys_probe_measures_whole_steps_too():
    found = (
        probes_of(small_vgg(), 2, shape=SMALL)
        .tensors(2)
        .measure(MemoryLimit(None, Baseline(0, 0), torch.device("cpu")))
    )
    assert found.steps.batch == found.batch == 2
    assert min(found.steps.stock, found.steps.full, found.steps.head) > 0


def test_one_thread_counts_the_seconds_that_it_works_and_several_those_that_pass(monkeypatch):
    def sleep():
        time.sleep(0.1)

    monkeypatch.setattr(_stopwatch, "_reading", lambda: None)  # what others add is left out: test_delays.py
    for threads, low, high in ((1, 0.0, 0.05), (2, 0.1, 10.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert low <= timed(sleep, torch.device("cpu"))[1] <= high
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    started, seconds = time.process_time(), 0.0
    while time.process_time() - started < 0.1:
        seconds += timed(lambda: torch.randn(300, 300) @ torch.randn(300, 300), torch.device("cpu"))[1]
    assert seconds == pytest.approx(time.process_time() - started, rel=0.3), "and all of them"


def test_operators_of_the_same_computation_are_timed_once(monkeypatch):
    """The second of two equal convolutions has the seconds of the first; one with another stride is timed again."""
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, stride, padding=1) for stride in (1, 1, 2)), nn.Flatten())
    timings = []
    monkeypatch.setattr(operator.Operator, "_seconds", lambda *case: timings.append(case) or (0.0, len(timings)))
    first, second, other = small(model=nn.Sequential(model, nn.Linear(3 * 64, CLASSES))).operators[:3]
    assert [t.seconds for t in first.tensors] == [t.seconds for t in second.tensors]
    assert (first.pass_seconds, first.forward_seconds) == (second.pass_seconds, second.forward_seconds)
    assert other.pass_seconds != first.pass_seconds
    assert len(timings) == 4 + 4 + 1 + 4  # two convolutions, a view, a layer: for inputs, weight, bias, and all three
