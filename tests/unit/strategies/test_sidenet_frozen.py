"""Analysis of a frozen network before it runs: its large feature maps, and widths that reduce them."""

import dataclasses

import pytest
import torch
from torch import nn

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.errors import ModelError
from snugfit.profiling.activation import analytic_activation_memory
from snugfit.strategies.sidenet.frozen import FrozenNetwork
from snugfit.surgery import narrowed_meta_copy, widths_for


class Residual(nn.Module):
    """An inverted residual, whose hidden channels nothing else knows."""

    def __init__(self, inputs, outputs, stride, expansion=4):
        super().__init__()
        hidden = inputs * expansion
        layers = [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden)]
        layers += [nn.ReLU6(inplace=True), nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.conv, self.adds = nn.Sequential(*layers), stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.conv(x) if self.adds else self.conv(x)


def network():
    features = [nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())]
    features += [Residual(8, 8, 1), Residual(8, 12, 2), Residual(12, 12, 1), Residual(12, 16, 2)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5)]
    return nn.Sequential(nn.Sequential(*features), *tail)


SHAPE = (3, 64, 64)


def frozen(prune="on", scheme="rep-net", width=1.0, build=network, shape=SHAPE):
    with torch.device("meta"):
        return FrozenNetwork(Chain.from_module(build(), shape), scheme, width, prune)


def test_computed_widths_are_those_of_the_slow_search():
    """The search that looks at the whole network again for every choice of widths finds the same."""
    found = frozen()
    slow = widths_for(found.backbone, SHAPE, found.memory, found.target_bytes)
    assert found.target_bytes >= found.unpruned.cumulative_bytes and found.widths == slow and len(slow) > 1
    narrowed = narrowed_meta_copy(found.backbone, found.groups, found.widths)
    memory = analytic_activation_memory(narrowed, SHAPE, found.classifier)
    assert max(block.temporary_bytes for block in memory.blocks) <= found.target_bytes


def test_the_target_is_one_that_can_be_reached():
    """The stem's output is read by a residual sum, so that it cannot shrink: no block needs to be smaller than it."""
    found = frozen()
    assert found.target_bytes == found.unpruned.blocks[0].temporary_bytes > found.unpruned.cumulative_bytes
    assert all(count >= found.channels[name] / 8 for name, count in found.widths.items())


def test_one_channel_more_would_be_too_many():
    found = frozen()
    for name, count in found.widths.items():
        narrowed = narrowed_meta_copy(found.backbone, found.groups, {**found.widths, name: count + 1})
        memory = analytic_activation_memory(narrowed, SHAPE, found.classifier)
        assert max(block.temporary_bytes for block in memory.blocks) > found.target_bytes


def test_a_ratio_is_for_every_block_with_large_maps():
    found, sensitive = frozen("0.25"), frozen().unpruned.sensitive()
    assert found.widths and set(found.widths) <= set(found.channels)
    assert all(found.widths[name] == round(0.75 * found.channels[name]) for name in found.widths)
    assert len(found.widths) >= len(sensitive) - 1


def test_a_ratio_that_would_empty_a_layer_names_it():
    with pytest.raises(ModelError, match="would empty layer"):
        _ = frozen("0.99").widths
    assert not frozen("0.99").can_prune and frozen("0.5").can_prune


def test_nothing_to_prune():
    found = frozen()
    found.__dict__["unpruned"] = dataclasses.replace(found.unpruned, cumulative_bytes=10**9)
    with pytest.raises(ModelError, match="nothing to prune"):
        _ = found.widths
    assert not found.can_prune and not found.per_sample_blocks


def test_blocks_by_sample_are_frozen_ones_with_large_maps():
    found = frozen()
    most = max(block.temporary_bytes for block in found.unpruned.blocks)
    assert found.per_sample_blocks and set(found.per_sample_blocks) <= set(found.unpruned.sensitive())
    assert all(found.unpruned.blocks[index].temporary_bytes * 8 > most for index in found.per_sample_blocks)
    head = frozen(scheme="head", width=0.0)
    assert len(head.unpruned.blocks) - 1 not in head.per_sample_blocks, "the classifier trains"


def test_looking_changes_nothing():
    found = frozen()
    before = {name: (tuple(p.shape), p.requires_grad) for name, p in found.chain.to_module().named_parameters()}
    _ = found.per_sample_blocks, found.widths
    after = {name: (tuple(p.shape), p.requires_grad) for name, p in found.chain.to_module().named_parameters()}
    assert after == before


def test_names_of_what_retraining_may_change():
    found = frozen()
    names = found.pruned_names(found.backbone)
    assert {f"{group.name}.weight" for group in found.pruned_groups} <= names
    assert not any(name.startswith("4.") for name in names), "the classifier"


@pytest.mark.slow
def test_the_papers_network():
    """MobileNetV2 at 224x224: 5,720,064 bytes at block 2; no block above the target with the computed widths."""

    def build():
        return models.build("mobilenet_v2", 10, 224, 3)

    found = frozen(build=build, shape=(3, 224, 224))
    assert (found.unpruned.peak_bytes, found.unpruned.peak_block) == (5_720_064, 2)
    narrowed = narrowed_meta_copy(found.backbone, found.groups, found.widths)
    assert (
        max(b.temporary_bytes for b in found.memory(narrowed).blocks)
        <= found.target_bytes
        == found.unpruned.cumulative_bytes
    )
