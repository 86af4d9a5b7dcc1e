"""Copies of a network: on the meta device, or sharing what will not be pruned."""

import torch
from surgery_zoo import NETWORKS, SHAPE, images, traced

from snugfit.surgery import copy_for_pruning, hidden_groups, narrowed_meta_copy, remove_channels, width


def test_a_narrowed_copy_takes_no_memory_and_leaves_the_network():
    module, groups = traced(NETWORKS["mobilenet"]())
    module.get_parameter("classifier.weight").requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    twin = narrowed_meta_copy(module, groups, {groups[0].name: 3})
    assert {tensor.device.type for tensor in twin.state_dict().values()} == {"meta"}
    assert width(twin, groups[0]) == 3 and width(module, groups[0]) == 6
    flags = [(name, parameter.requires_grad) for name, parameter in module.named_parameters()]
    assert flags == [(name, parameter.requires_grad) for name, parameter in twin.named_parameters()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_twin_owns_the_blocks_to_prune_and_shares_the_rest():
    module, _ = traced(NETWORKS["mobilenet"]())
    module.eval()
    groups = hidden_groups(module, SHAPE)[2]
    twin = copy_for_pruning(module, SHAPE, groups)
    expected = module(images())
    assert torch.equal(twin(images()), expected)
    own = {name for name, parameter in twin.named_parameters() if parameter is not module.get_parameter(name)}
    assert own == {name for name, _ in twin.named_parameters() if name.startswith("features.2.")}
    remove_channels(twin, groups, {groups[0].name: [0, 1]})
    assert torch.equal(module(images()), expected)
    assert twin(images()).shape == expected.shape
