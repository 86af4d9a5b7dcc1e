"""Hidden channels: which block they belong to, and that its input and output stay when they go."""

import pytest
import torch
from surgery_zoo import NETWORKS, SHAPE, images, on_meta, traced

from snugfit._chain import find_blocks
from snugfit.errors import ModelError
from snugfit.surgery import blocks_of, copy_for_pruning, hidden_groups, narrowed_meta_copy, remove_channels, width


def widths(name, size):
    module = on_meta(name, size)
    found = hidden_groups(module, (3, size, size))
    return {block: [(group.name, width(module, group)) for group in groups] for block, groups in found.items()}


def test_mobilenet_blocks_hide_their_expansions_and_the_first_one_the_stems_output():
    found = widths("mobilenet_v2", 224)
    assert found[1] == [("features.0.0", 32)]
    assert [found[block][0][1] for block in range(2, 18)] == [96, 144, 144] + [192] * 3 + [384] * 4 + [576] * 3 + [
        960
    ] * 3
    assert all(found[block] == [(f"features.{block}.conv.0.0", found[block][0][1])] for block in range(2, 18))
    assert found[18] == [("features.17.conv.2", 320)], "the last convolution has no others"
    assert 0 not in found and 19 not in found


def test_a_bottleneck_hides_two_widths_and_a_basic_block_one():
    assert widths("resnet50", 64)[4] == [("layer2.0.conv1", 128), ("layer2.0.conv2", 128)]
    assert widths("resnet18", 32)[4] == [("layer2.1.conv1", 128)]
    assert all(not name.startswith("conv1") for found in widths("resnet18", 32).values() for name, _ in found)


def test_in_a_plain_stack_a_block_is_given_what_it_reads():
    found = widths("vgg16", 32)
    assert found[1] == [("features.0", 64)] and found[12] == [("features.37", 512)]
    assert 13 not in found, "what the classifier reads stays"
    assert widths("mobilenet_v1", 96)[2] == [("features.1.pointwise", 64)]


def test_every_group_stands_with_one_block_alone():
    for name in ("mobilenet_v2", "vgg16", "resnet50"):
        names = [group for found in widths(name, 64).values() for group, _ in found]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet50", "resnet18"])
def test_blocks_keep_their_inputs_and_outputs(name):
    module = on_meta(name, 64)
    found = hidden_groups(module, (3, 64, 64))
    before = find_blocks(module, (3, 64, 64))
    spans = blocks_of(module, (3, 64, 64), [group for groups in found.values() for group in groups])
    inner = [group for groups in found.values() for group in groups if spans[group.name][0] == spans[group.name][1]]
    assert inner
    remove_channels(module, inner, {group.name: [0] for group in inner})
    after = find_blocks(module, (3, 64, 64))
    assert [(b.input_shape, b.output_shape) for b in after] == [(b.input_shape, b.output_shape) for b in before]


def test_blocks_of_tells_where_channels_lie():
    module = on_meta("mobilenet_v2", 64)
    groups = [group for found in hidden_groups(module, (3, 64, 64)).values() for group in found]
    spans = blocks_of(module, (3, 64, 64), groups)
    assert spans["features.0.0"] == (0, 1) and spans["features.2.conv.0.0"] == (2, 2)


def test_a_transformer_is_one_block_and_hides_what_its_mlps_make():
    module, _ = traced(NETWORKS["transformer"]())
    found = hidden_groups(module, SHAPE)
    assert {group.name for groups in found.values() for group in groups} == {"mlps.0.0", "mlps.1.0"}


def test_an_image_that_the_network_cannot_take_is_an_error():
    with pytest.raises(ModelError):
        hidden_groups(on_meta("mobilenet_v2", 64), (4, 64, 64))


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
