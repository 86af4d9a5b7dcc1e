"""A stretch of a network runs alone, with the network's own layers."""

import pytest
import torch
from chain_zoo import BottleneckNet

from snugfit import _models as models
from snugfit._chain import Chain, find_blocks
from snugfit._chain.subgraph import computed_nodes, subgraph_module


@pytest.mark.parametrize("name", ["mobilenet_v2", "vgg16", "bottlenecks", "vit_b_16"])
def test_blocks_one_after_another_are_the_network(name):
    torch.manual_seed(0)
    model = BottleneckNet() if name == "bottlenecks" else models.build(name, 5, 32)
    module = Chain.from_module(model, (3, 32, 32)).to_module().eval()
    x = images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for block in find_blocks(module, (3, 32, 32)):
            x = subgraph_module(module, block.nodes, block.entry)(x)
        assert torch.equal(x, module(images))


def test_a_part_shares_the_layers_and_their_names():
    module = Chain.from_module(BottleneckNet(), (3, 32, 32)).to_module()
    block = find_blocks(module, (3, 32, 32))[2]
    part = subgraph_module(module, block.nodes, block.entry)
    own = dict(part.named_parameters())
    assert own and all(parameter is module.get_parameter(name) for name, parameter in own.items())
    assert {name.rsplit(".", 2)[0] for name in own} == {block.name}
    assert [node.target for node in computed_nodes(part.graph)] == [node.target for node in block.nodes]


def test_no_second_value_may_enter():
    module = Chain.from_module(BottleneckNet(), (3, 32, 32)).to_module()
    block = find_blocks(module, (3, 32, 32))[2]
    with pytest.raises(KeyError):
        subgraph_module(module, block.nodes[1:], block.nodes[0])
