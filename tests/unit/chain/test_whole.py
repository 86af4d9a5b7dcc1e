"""Networks that cannot be divided: a chain without units whose head is the model itself."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from whole_nets import REASONS, DataShaped, OnData, Tied

from snugfit._chain import Chain, UnitStore, distinct_state, load_into, load_state, release
from snugfit.errors import ModelError
from snugfit.profiling import unit_stats

SHAPE = (1, 16, 16)


@pytest.mark.parametrize("make", REASONS)
def test_the_head_is_the_model_and_the_reason_is_kept(make):
    model = make()
    chain = Chain.from_any_module(model, SHAPE, "net")
    assert (chain.name, chain.units, chain.to_module()) == ("net", (), model)
    assert chain.undivided.startswith(REASONS[make]) and not chain.undivided.endswith(".")
    assert (chain.head.whole, chain.head.output_shape) == (True, (10,))
    assert chain.parameters == sum(each.numel() for each in model.parameters())
    images = torch.rand(2, *SHAPE)
    assert torch.equal(chain(images), model(images))


@pytest.mark.parametrize("make", REASONS)
def test_dividing_it_is_still_refused(make):
    with pytest.raises(ModelError) as caught:
        Chain.from_module(make(), SHAPE)
    assert str(caught.value).startswith(REASONS[make])


def test_what_can_be_divided_is():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(576, 10))
    chain = Chain.from_any_module(model, SHAPE)
    assert len(chain.units) == 2 and not chain.undivided and not chain.reasons_against_units()


class Masked(nn.Module):
    """Adds a part of a buffer, as timm's Swin does."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 14 * 14, 10)
        self.register_buffer("mask", torch.arange(14.0), persistent=False)

    def forward(self, x):
        return self.fc((self.conv(x) + self.mask.unsqueeze(0)).flatten(1))


def test_what_is_computed_of_buffers_is_part_of_the_graph():
    model, images = Masked(), torch.rand(2, *SHAPE)
    chain = Chain.from_any_module(model, SHAPE)
    expected = model(images)
    assert not chain.undivided and torch.equal(chain(images), expected)
    empty = Chain.from_any_module(Masked().to("meta"), SHAPE)
    filled = empty.to_module().to_empty(device="cpu")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        (filled.get_buffer if name == "mask" else filled.get_parameter)(name).data.copy_(tensor)
    assert torch.equal(filled(images), expected)


class Answers(nn.Module):
    """Branches on data, and returns what a test wants."""

    def __init__(self, answer):
        super().__init__()
        self.fc, self.answer = nn.Linear(256, 10), answer

    def forward(self, x):
        x = x.flatten(1)
        return self.answer(self, self.fc(x if x.sum() > 0 else -x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Answers(lambda module, x: (x, x)), r"^Answers returns tuple in training mode, and must return one tensor"),
        (Answers(lambda module, x: x if module.training else {"logits": x}), "returns dict in evaluation mode"),
        (Answers(lambda module, x: x @ torch.ones(3, 3)), "^Answers does not run on an input of shape 1x16x16: "),
        (
            Answers(torch.ones(3)),
            "^Answers has the tensor answer, which is neither a parameter nor a buffer",
        ),
        (nn.Flatten(), "^Flatten has no parameters: there is nothing to train"),
    ],
)
def test_what_cannot_be_trained_as_a_whole_either(model, message):
    with pytest.raises(ModelError, match=message):
        Chain.from_any_module(model, SHAPE)


def test_a_hook_of_a_parameter_is_lost_in_a_whole_network_too():
    model = OnData()
    model.fc.weight.register_hook(lambda gradient: gradient * 3)
    with pytest.raises(ModelError, match=r"a hook of parameter 'fc.weight' would be lost"):
        Chain.from_any_module(model, SHAPE)


def test_a_module_that_cannot_be_copied_is_refused():
    model = OnData()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match="OnData cannot be copied"):
        Chain.from_any_module(model, SHAPE)


def test_several_inputs_are_refused_as_before():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(256, 10)

        def forward(self, x, y):
            return self.fc((x + y).flatten(1))

    with pytest.raises(ModelError, match=r"takes more than one input \(y\)"):
        Chain.from_any_module(TwoInputs(), SHAPE)


@pytest.mark.parametrize("make", [OnData, DataShaped])
def test_a_network_without_weights_in_memory_can_be_looked_at(make):
    with torch.device("meta"):
        model = make()
    chain = Chain.from_any_module(model, SHAPE)
    assert chain.head.output_shape == (10,) and all(each.is_meta for each in model.parameters())
    (stats,) = unit_stats(chain)
    assert (stats.parameters, stats.trained, stats.tracks) == (chain.parameters, chain.parameters, True)


def test_looking_changes_nothing():
    model = OnData()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    Chain.from_any_module(model, SHAPE)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_shared_weights_are_stored_once_and_stay_shared(tmp_path):
    model = Tied()
    (unit,) = Chain.from_any_module(model, SHAPE).all_units
    store, values = UnitStore(tmp_path), model.conv.weight.detach().clone()
    store.save(0, unit)
    assert "again.weight" not in store.load(0)
    release(unit)
    assert model.conv.weight.is_meta and model.again.weight is model.conv.weight
    load_into(unit, store.load(0))
    assert torch.equal(model.conv.weight, values) and model.again.weight is model.conv.weight


def test_states_with_and_without_the_second_name_load():
    source = Tied()
    for state in (source.state_dict(), distinct_state(source)):
        for assign in (False, True):
            model = Tied()
            load_state(model, {name: tensor.clone() for name, tensor in state.items()}, assign=assign)
            assert torch.equal(model.again.weight, source.conv.weight) and model.again.weight is model.conv.weight


def test_buffers_outside_of_the_state_dict_are_stored_and_loaded(tmp_path):
    def make():
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(576, 10))
        model[0].register_buffer("scale", torch.full((3,), 7.0), persistent=False)
        return model

    unit, empty = Chain.from_module(make(), SHAPE).units[0], Chain.from_module(make().to("meta"), SHAPE).units[0]
    UnitStore(tmp_path).save(0, unit)
    load_into(empty, UnitStore(tmp_path).load(0))
    assert torch.equal(empty.module.get_submodule("0").scale, torch.full((3,), 7.0))
