"""Vision transformers as chains: encoder layers as units, and tensors that belong to no layer."""

import copy

import pytest
import torch
from chain_zoo import assert_chain_is_model
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain, UnitStore, initialise_by_reset, load_into, release, spill_module
from snugfit._models import build
from snugfit._models.vit import VisionTransformer

SHAPE = (3, 32, 32)
LAYERS = [f"encoder.layers.encoder_layer_{index}" for index in range(3)]


def vit():
    return VisionTransformer(5, 32, 3, layers=3, heads=2, width=8, hidden=16)


def on_meta():
    with torch.device("meta"):
        return Chain.from_module(vit(), SHAPE)


def test_chain_equals_its_model_in_every_batch_size():
    torch.manual_seed(0)
    chain = assert_chain_is_model(vit(), SHAPE)
    x = torch.randn(4, *SHAPE)
    whole = chain(x)
    for count in (1, 3):
        torch.testing.assert_close(chain(x[:count]), whole[:count])


def test_units_are_encoder_layers_and_tokens_join_the_first():
    chain = on_meta()
    assert [unit.name for unit in chain.all_units] == ["conv_proj", *LAYERS, "heads"]
    assert [unit.output_shape for unit in chain.all_units] == [(5, 8)] * 4 + [(5,)]
    first, last = chain.units[0].module.state_dict(), chain.units[-1].module.state_dict()
    assert set(first) == {"class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding"}
    assert {name for name in last if not name.startswith(LAYERS[2])} == {"encoder.ln.weight", "encoder.ln.bias"}


def test_units_of_vit_b_16():
    with torch.device("meta"):
        model = build("vit_b_16", 10, 224)
        chain = Chain.from_module(model, (3, 224, 224))
    assert len(chain.units) == 13 and {unit.output_shape for unit in chain.units} == {(197, 768)}
    assert set(chain.to_module().state_dict()) == set(model.state_dict())


def test_torch_layers_are_leaves_of_the_units():
    kinds = [type(module) for module in on_meta().units[1].module.modules()]
    assert sum(issubclass(kind, nn.Linear) for kind in kinds) == 3
    assert kinds.count(nn.LayerNorm) == 2 and nn.MultiheadAttention not in kinds


def test_an_encoder_layer_around_torchs_attention_stays_whole():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.mlp = nn.Linear(4, 4)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return x + self.mlp(x)

    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(2), Turn(), Layer(), Layer(), Turn(), nn.Linear(16, 5))
    assert [unit.name for unit in Chain.from_module(model, SHAPE).units][-2:] == ["3", "4"]


class Turn(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def test_a_stack_of_layers_with_one_attention_is_still_cut():
    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Linear(32, 32) for _ in range(9)]
            self.layers, self.attention = nn.Sequential(*layers), Attention()

        def forward(self, x):
            return self.layers(self.attention(x))

    assert len(Chain.from_module(nn.Sequential(Stack(), nn.Flatten(), nn.Linear(3072, 5)), SHAPE).units) == 9


def test_first_weights_are_those_of_the_model_and_do_not_depend_on_the_order():
    one, two = on_meta(), on_meta()
    for unit in one.all_units:
        initialise_by_reset(unit, seed=5)
    torch.manual_seed(7)
    for unit in reversed(two.all_units):
        initialise_by_reset(unit, seed=5)
    first, second = one.to_module().state_dict(), two.to_module().state_dict()
    assert all(torch.equal(first[name], second[name]) and torch.isfinite(first[name]).all() for name in first)
    torch.manual_seed(0)
    for name, tensor in vit().state_dict().items():
        same = first[name].std(correction=0), tensor.std(correction=0)
        assert same[0] == pytest.approx(float(same[1]), rel=0.6, abs=3e-6), name
    assert not first["class_token"].any() and first["encoder.pos_embedding"].any()
    assert not torch.equal(first[f"{LAYERS[0]}.self_attention.in_proj_weight"],
                           first[f"{LAYERS[1]}.self_attention.in_proj_weight"])  # fmt: skip


def test_an_owner_resets_only_what_the_unit_holds():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 1), nn.Linear(4096, 5)
            self.before, self.after = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

        def reset_parameters(self):
            nn.init.constant_(self.before, 2.0)
            nn.init.constant_(self.after, 3.0)

        def forward(self, x):
            return self.fc((self.conv(x) * self.before).flatten(1)) * self.after

    with torch.device("meta"):
        chain = Chain.from_module(Scaled(), SHAPE)
    initialise_by_reset(chain.head, seed=0)
    assert chain.head.module.state_dict()["after"] == 3
    assert chain.units[0].module.state_dict()["before"].is_meta
    initialise_by_reset(chain.units[0], seed=0)
    assert chain.units[0].module.state_dict()["before"] == 2


def test_weights_spill_and_load(tmp_path):
    torch.manual_seed(0)
    model, x, store = vit().eval(), torch.randn(2, *SHAPE), UnitStore(tmp_path)
    expected = model(x)
    chain = Chain.from_module(model, SHAPE)
    spill_module(chain.all_units, store)
    assert all(t.is_meta for unit in chain.all_units for t in unit.module.state_dict().values())
    for index, unit in enumerate(chain.all_units):
        load_into(unit, store.load(index))
    assert torch.equal(chain(x), expected)
    fresh = vit().eval()
    fresh.load_state_dict(chain.to_module().state_dict())
    assert torch.equal(fresh(x), expected)


def test_emptying_and_filling_the_whole_does_so_in_the_units():
    chain = on_meta()
    whole = chain.to_module().to_empty(device="cpu")
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.02)
    x = torch.randn(2, *SHAPE)
    assert torch.equal(chain(x), whole(x))
    own = dict(whole.named_parameters())
    assert all(p is own[name] for unit in chain.all_units for name, p in unit.module.named_parameters())
    for unit in chain.all_units:
        release(unit)
    assert all(parameter.is_meta for parameter in whole.parameters())
    copied = copy.deepcopy(chain)
    copied.to_module().to_empty(device="cpu")
    assert all(p.is_meta is (owner is chain) for owner in (chain, copied) for p in owner.to_module().parameters())


def test_released_weights_are_not_kept_by_their_owners():
    chain = Chain.from_module(vit(), SHAPE)
    for unit in chain.all_units:
        release(unit)
        assert all(tensor.is_meta for owner in unit.owners.values() for tensor in owner.parameters())
