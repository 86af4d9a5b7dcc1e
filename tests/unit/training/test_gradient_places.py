"""Small gradients have memory of their own from the beginning."""

import copy

import pytest
import torch
from torch import nn

from snugfit._training.gradient_places import PLACED_VALUES, place_small_gradients
from snugfit.lean.bfloat16_weights import use_float_gradients


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, PLACED_VALUES), nn.Linear(4, 2))  # the last one is not used


def backward(module, seed):
    images = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    module[1](module[0](images)).square().sum().backward()


def test_gradients_lie_where_they_were_placed_and_add_up():
    module, plain = network(), network()
    handles = place_small_gradients(module.parameters())
    first = []
    for step in range(2):
        for micro_batch in range(3):
            backward(module, 3 * step + micro_batch)
            backward(plain, 3 * step + micro_batch)
        small = [module[0].weight, module[0].bias, module[1].bias]
        first.append([each.grad.data_ptr() for each in small])
        for name, parameter in plain.named_parameters():
            mine = module.get_parameter(name).grad
            assert (mine is None) == (parameter.grad is None) == name.startswith("2.")
            assert mine is None or torch.equal(mine, parameter.grad)
        for parameter in (*module.parameters(), *plain.parameters()):
            parameter.grad = None
    assert first[0] == first[1]
    assert len(handles) == 5, "the weight of three times the most values is not moved"
    for handle in handles:
        handle.remove()
    backward(module, 0)
    assert [each.grad.data_ptr() for each in small] != first[0]


def test_a_copy_of_a_network_has_places_of_its_own():
    module = network()
    place_small_gradients(module.parameters())
    other = copy.deepcopy(module)
    backward(module, 0)
    before = module[0].weight.grad.clone()
    backward(other, 1)
    assert torch.equal(module[0].weight.grad, before)


def test_gradients_of_another_type_than_the_weights_keep_it():
    module, plain = network().to(torch.bfloat16), network().to(torch.bfloat16)
    for each in (module, plain):
        use_float_gradients(each)
    place_small_gradients(module.parameters())
    for each in (module, plain):
        each[0](torch.ones(2, 4, dtype=torch.bfloat16)).float().square().sum().backward()
    assert module[0].weight.grad.dtype == torch.float32
    assert torch.equal(module[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_stay(sparse):
    module = nn.Embedding(5, 3, sparse=sparse)
    place_small_gradients(module.parameters())
    for _ in range(2):
        module(torch.tensor([1, 1, 2])).sum().backward()
    assert module.weight.grad.is_sparse == sparse
    assert torch.equal(module.weight.grad.to_dense(), torch.tensor([0.0, 4.0, 2.0, 0.0, 0.0])[:, None].expand(5, 3))
