"""Activation memory by the paper's rule against its figures."""

import functools
import operator

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.profiling.activation import analytic_activation_memory, resident_bytes
from snugfit.surgery.sidenet import attach_side_network

MB = 10**6


def network(name, size, *, side=False, classes=10):
    """A traced network on the meta device."""
    with torch.device("meta"):
        model = models.build(name, classes, size) if isinstance(name, str) else name()
    module = Chain.from_module(model, (3, size, size)).to_module()
    return attach_side_network(module, (3, size, size)) if side else module


def chosen(module, what):
    """Names of what trains; batch statistics are frozen but in side modules."""
    layers = (str(node.target) for node in reversed(module.graph.nodes) if node.op == "call_module")
    last = next(name for name in layers if isinstance(module.get_submodule(name), nn.Linear))
    tests = {
        "sidenet": lambda name: name.startswith(("side.", last)),
        "head": lambda name: name.startswith(last),
        "bias": lambda name: name.startswith(last) or name.endswith("bias"),
        "full": lambda name: True,
    }
    module.train()
    for name, layer in module.named_modules():
        layer.train(name.startswith("side.") or not isinstance(layer, _BatchNorm))
    names = {name for name, _ in module.named_parameters() if tests[what](name)}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in names)
    return names


@functools.cache
def of_the_paper():
    """MobileNetV2 with a side network, which runs after its blocks or (True) ahead of them."""
    module = network("mobilenet_v2", 224, side=True)
    trains = chosen(module, "sidenet")
    return {
        first: analytic_activation_memory(module, (3, 224, 224), trains, batch=8, side_first=first)
        for first in (False, True)
    }


class TestThePapersRule:
    """Yoosefi et al., Figure 1, and the totals that Rep-Net's own profiler gives."""

    @pytest.fixture
    def found(self):
        return of_the_paper()

    def test_the_peak_is_the_papers_to_the_byte(self, found):
        assert (found[False].peak_bytes, found[False].peak_block) == (5_720_064, 2)
        assert found[False].blocks[2].temporary_bytes == (16 + 96) * 112**2 * 4

    def test_side_modules_ahead_of_their_blocks_give_the_published_codes_figures(self, found):
        assert found[True].peak_bytes / MB == pytest.approx(5.856, abs=5e-4)
        assert found[True].total_bytes / MB == pytest.approx(50.6, abs=0.05)

    def test_what_is_kept_and_stored_does_not_depend_on_the_order(self, found):
        assert found[False].cumulative_bytes == found[True].cumulative_bytes
        assert found[True].cumulative_bytes / MB == pytest.approx(1.53, abs=5e-3)
        assert found[True].parameter_bytes == 4 * (380_072 + 12_810) + 2_223_872

    def test_the_first_blocks_are_sensitive(self, found):
        assert found[False].sensitive() == (0, 1, 2, 3, 4), "the paper counts no stem, which is block 0 here"

    def test_every_layer_lies_in_a_block(self, found):
        names = [layer.name for block in found[False].blocks for layer in block.layers]
        assert len(set(names)) == len(names) - sum(name == str(operator.add) for name in names) + 1
        assert {"side.2.conv", "features.2.conv.0.0"} <= {layer.name for layer in found[False].blocks[2].layers}


def test_the_paper_counts_masks_only_where_a_gradient_passes_them():
    module = network("mobilenet_v2", 96)
    head = analytic_activation_memory(module, (3, 96, 96), chosen(module, "head"))
    assert head.cumulative_bytes == 4 * 1280
    biases = analytic_activation_memory(module, (3, 96, 96), chosen(module, "bias"))
    assert biases.cumulative_bytes > head.cumulative_bytes
    kept = {layer.name: layer.kept_bytes for block in biases.blocks for layer in block.layers}
    assert kept["features.1.conv.0.0"] == 0, "the input of a frozen convolution is not kept"
    assert kept["features.1.conv.0.2"] == 32 * 48 * 48 // 8


def test_the_paper_counts_the_input_of_a_residual_block_as_long_as_it_runs():
    module = network("mobilenet_v2", 96)
    blocks = analytic_activation_memory(module, (3, 96, 96), set()).blocks
    layers = {layer.name: layer.temporary_bytes for layer in blocks[3].layers}
    inside, outside = 4 * 24 * 24 * 24, 4 * 144 * 24 * 24
    assert layers["features.3.conv.1.1"] == outside + inside
    assert layers["features.3.conv.1.0"] == outside + outside // 144 + inside
    plain = {layer.name: layer.temporary_bytes for layer in blocks[2].layers}
    assert plain["features.2.conv.1.1"] == 4 * 96 * 24 * 24


@pytest.mark.parametrize(
    ("layer", "kept"),
    [(nn.GELU(), 4 * 512), (nn.Hardswish(), 4 * 512), (nn.LeakyReLU(), 512 // 8), (nn.MaxPool2d(1), 0)],
)
def test_smooth_activations_keep_their_input(layer, kept):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer, nn.Flatten(), nn.Linear(512, 10))
    module = Chain.from_module(net.to("meta"), (3, 8, 8)).to_module()
    found = analytic_activation_memory(module, (3, 8, 8), {name for name, _ in module.named_parameters()})
    assert found.cumulative_bytes == 4 * 3 * 64 + kept + 4 * 512


def test_weights_and_state_stay_for_the_whole_step():
    module = network("resnet18", 32)
    trains = chosen(module, "head")
    trained = 4 * (512 * 10 + 10)
    resident = resident_bytes(module, trains, state_copies=2)
    assert resident.optimizer == 2 * trained
    assert resident.weights == sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    assert resident_bytes(module, trains, state_copies=1).total == resident.weights + trained
    frozen = [p for n, p in module.named_parameters() if p.dim() > 1 and n not in trains]
    coded = resident_bytes(module, trains, state_copies=0, int8=True)
    assert coded.weights == resident.weights - sum(3 * p.numel() - 4 * len(p) for p in frozen)
