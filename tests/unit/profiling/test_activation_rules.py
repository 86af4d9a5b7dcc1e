"""Activation memory by the paper's rule against its figures, and by the true rule against steps that really run."""

import functools
import operator
from functools import partial

import pytest
import torch
from small_networks import ResidualNet, vgg_like
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit import _models as models
from snugfit._chain import Chain, find_blocks
from snugfit._core.workload import OptimizerSettings
from snugfit._training.optimizers import ParameterOptimizers
from snugfit.lean import run_per_sample, store_int8, use_lean
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling.activation import analytic_activation_memory, liveness_activation_memory, resident_bytes
from snugfit.profiling.liveness import StepOptions
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


class Branches(nn.Module):
    """A map that is split, read twice and joined again, with a weight that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        a, b = torch.chunk(self.stem(x), 2, 1)
        x = torch.cat([self.left(a) + a, F.gelu(self.right(b))], 1) * self.scale
        return self.fc(x.mean((2, 3)))


def step_peak(module, size, batch, *, state=False, steps=1, prepare=lambda module: None):
    """Peak tensor bytes of a real step on the processor."""
    module.to_empty(device="cpu").to(memory_format=torch.channels_last)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    for name, buffer in module.named_buffers():
        buffer.fill_(1 if name.endswith("var") else 0)
    prepare(module)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.int64)
    optimizers = ParameterOptimizers(module.named_parameters(), OptimizerSettings("adamw", lr=1e-3))
    if state:
        optimizers.apply_in_backward()
    else:
        for parameter in optimizers.parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step():
        F.cross_entropy(module(images), labels).backward()

    return tensor_peak_bytes(step, [module, images, labels], repeats=steps)


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


CASES = [
    ("mobilenet_v2", 64, "sidenet", True, True),
    ("mobilenet_v2", 64, "bias", True, False),
    ("resnet18", 32, "full", True, False),
    ("resnet18", 32, "full", False, False),
    ("vgg16", 32, "head", True, False),
    (partial(vgg_like, 8), 32, "full", True, False),
    (Branches, 16, "full", True, False),
]


@pytest.mark.parametrize(("name", "size", "what", "lean", "side"), CASES)
def test_the_true_rule_is_what_a_step_takes(name, size, what, lean, side):
    module = network(name, size, side=side)
    if lean:
        use_lean(module)
    trains = chosen(module, what)
    found = liveness_activation_memory(module, (3, size, size), trains, StepOptions(batch=4, state_copies=0))
    peak = step_peak(module, size, 4)
    assert 0.999 * peak <= found.total_bytes <= 1.04 * peak


@pytest.mark.parametrize(("sampled", "int8"), [((0, 1, 2, 3, 4), False), ((5, 8, 12), True), ((), True)])
def test_memory_options_take_what_the_true_rule_says(sampled, int8):
    module, shape = network("mobilenet_v2", 64, side=True), (3, 64, 64)
    use_lean(module)
    trains = chosen(module, "sidenet")
    found = liveness_activation_memory(
        module, shape, trains, StepOptions(batch=4, state_copies=0, by_sample=set(sampled), int8=int8)
    )
    plain = liveness_activation_memory(module, shape, trains, StepOptions(batch=4, state_copies=0))
    assert found != plain
    blocks = find_blocks(network("mobilenet_v2", 64), shape)

    def with_options(real):
        if int8:
            store_int8(real)
        run_per_sample(real, {blocks[number].name: blocks[number].nodes for number in sampled})

    peak = step_peak(module, 64, 4, prepare=with_options)
    assert found.total_bytes == pytest.approx(peak, rel=1e-3)


def test_sampled_blocks_keep_as_much_and_take_less():
    module, shape = network("mobilenet_v2", 64, side=True), (3, 64, 64)
    use_lean(module)
    trains = chosen(module, "sidenet")
    whole, sampled = (
        liveness_activation_memory(module, shape, trains, StepOptions(batch=8, by_sample=numbers))
        for numbers in (set(), {2, 3})
    )
    assert whole.cumulative_bytes < sampled.cumulative_bytes < 1.02 * whole.cumulative_bytes, "each has its own scales"
    for number in (2, 3):
        assert sampled.blocks[number].temporary_bytes < whole.blocks[number].temporary_bytes / 2


def test_one_image_is_a_whole_batch():
    module, shape = network("mobilenet_v2", 64), (3, 64, 64)
    trains = chosen(module, "head")
    single = liveness_activation_memory(module, shape, trains, StepOptions(batch=1, by_sample={2, 3}))
    assert single == liveness_activation_memory(module, shape, trains, StepOptions(batch=1))


def test_batch_statistics_of_a_single_value_are_refused_as_in_a_step():
    module = network("mobilenet_v2", 64, side=True)
    trains = chosen(module, "sidenet")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        liveness_activation_memory(module, (3, 64, 64), trains, StepOptions(batch=1))


def test_gradients_and_state_are_resident_where_they_are():
    module = network("resnet18", 32)
    trains = chosen(module, "head")
    trained = 4 * (512 * 10 + 10)
    resident = resident_bytes(module, trains, state_copies=2, holds_gradients=True)
    assert (resident.gradients, resident.optimizer) == (trained, 2 * trained)
    assert resident.weights == sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    assert resident_bytes(module, trains, state_copies=1).total == resident.weights + trained
    frozen = [p for n, p in module.named_parameters() if p.dim() > 1 and n not in trains]
    coded = resident_bytes(module, trains, state_copies=0, int8=True)
    assert coded.weights == resident.weights - sum(3 * p.numel() - 4 * len(p) for p in frozen)
    shape = (3, 32, 32)
    held = liveness_activation_memory(module, shape, trains, StepOptions(batch=2, holds_gradients=True))
    assert (
        held.total_bytes
        == liveness_activation_memory(module, shape, trains, StepOptions(batch=2)).total_bytes + trained
    )


def test_optimizer_state_is_there_from_the_second_step_on():
    module = network("resnet18", 32)
    use_lean(module)
    trains = chosen(module, "full")
    found = liveness_activation_memory(module, (3, 32, 32), trains, StepOptions(batch=2))
    assert found.total_bytes == pytest.approx(step_peak(module, 32, 2, state=True, steps=2), rel=0.03)


def test_looking_changes_nothing_and_works_on_real_weights():
    with torch.device("cpu"):
        model = ResidualNet(8)
    module = Chain.from_module(model, (3, 16, 16)).to_module()
    use_lean(module)
    trains = chosen(module, "full")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    real = liveness_activation_memory(module, (3, 16, 16), trains, StepOptions(batch=2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert real == liveness_activation_memory(module.to("meta"), (3, 16, 16), trains, StepOptions(batch=2))
