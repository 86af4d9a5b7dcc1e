"""First weights of units that were built on the meta device, and spilling of real models."""

import pytest
import torch
from chain_zoo import SHAPE, ZOO
from torch import nn

from snugfit._chain import Chain, UnitStore, initialise_by_reset, load_into, spill_module
from snugfit.errors import ModelError


def on_meta(make=ZOO["bottlenecks"]):
    with torch.device("meta"):
        return Chain.from_module(make(), SHAPE)


def weights(chain):
    return {k: v.clone() for unit in chain.all_units for k, v in unit.module.state_dict().items() if not v.is_meta}


def test_deterministic_and_independent_of_order_and_generator():
    first, second = on_meta(), on_meta()
    before = torch.get_rng_state()
    for unit in first.all_units:
        initialise_by_reset(unit, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    for unit in reversed(second.all_units):
        initialise_by_reset(unit, seed=5)
    one, two = weights(first), weights(second)
    assert one.keys() == two.keys() == set(first.to_module().state_dict())
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_seeds_and_units_differ():
    chain, other = on_meta(), on_meta()
    for unit, twin in zip(chain.all_units, other.all_units, strict=True):
        initialise_by_reset(unit, seed=5)
        initialise_by_reset(twin, seed=6)
    one, two = weights(chain), weights(other)
    assert not torch.equal(one["conv1.weight"], two["conv1.weight"])
    assert not torch.equal(one["layer1.1.conv2.weight"], one["layer1.0.conv2.weight"])


def test_values_are_torchs_own():
    chain = on_meta()
    initialise_by_reset(chain.units[0], seed=1)
    state = chain.units[0].module.state_dict()
    bound = 1 / 27**0.5
    assert state["conv1.weight"].abs().max() <= bound
    assert state["conv1.weight"].std() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert torch.equal(state["bn1.weight"], torch.ones(8))
    assert torch.equal(state["bn1.running_var"], torch.ones(8))
    assert not state["bn1.running_mean"].any()
    assert state["bn1.num_batches_tracked"] == 0
    assert all(tensor.is_meta for tensor in chain.units[1].module.state_dict().values())


def test_module_without_reset_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.gain = nn.Conv2d(4, 4, 1), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.conv(x) * self.gain

    chain = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), Scale(), nn.Conv2d(4, 5, 1)))
    with pytest.raises(ModelError, match=r"1 \(Module\) holds weights but has no reset_parameters"):
        initialise_by_reset(chain.units[1], seed=0)


def test_spilled_model_comes_back(tmp_path):
    torch.manual_seed(0)
    chain = Chain.from_module(ZOO["dense"]().eval(), SHAPE)
    x = torch.randn(2, *SHAPE)
    expected, store = chain(x), UnitStore(tmp_path)
    spill_module(chain.all_units, store)
    assert all(t.is_meta for unit in chain.all_units for t in unit.module.state_dict().values())
    assert all(store.path(index).is_file() for index in range(len(chain.all_units)))
    for index, unit in enumerate(chain.all_units):
        load_into(unit, store.load(index))
    assert torch.equal(chain(x), expected)
