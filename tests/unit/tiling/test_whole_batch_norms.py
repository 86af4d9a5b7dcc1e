"""Micro-batches with BatchNorm over the whole batch: outputs, gradients and running statistics of one whole step."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.tiling import Profile, TiledForward, find_tileable_prefix

BATCH = 64


def traced(name, side=32):
    torch.manual_seed(0)
    module = Chain.from_module(models.build(name, 10, side), (3, side, side), name).to_module().train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.2)
            nn.init.normal_(layer.bias, 0.0, 0.2)
    return module


def whole_batch(module, side, images):
    shape = (3, side, side)
    cuts = find_tileable_prefix(module, shape).layers.cuts
    return TiledForward(module, shape, (1, 1), Profile((cuts[0], cuts[-1])), images=images)


def step(forward, module, inputs, labels):
    """Loss, gradients and buffers after a step; dropout draws the same numbers for the same seed."""
    torch.manual_seed(1)
    module.zero_grad()
    loss = F.cross_entropy(forward(inputs), labels)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"loss": loss.detach(), **gradients, **dict(module.named_buffers())}


def error(mine, theirs):
    """Largest difference, relative to the tensor's norm."""
    return float((mine - theirs).double().norm() / theirs.double().norm().clamp_min(1e-30))


def batch(dtype, side=32, count=BATCH):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 3, side, side, generator=generator, dtype=torch.float64) + 0.5
    return inputs.to(dtype), torch.randint(0, 10, (count,), generator=generator)


def compare(module, images, dtype, side, tolerance, count=BATCH):
    """Relative errors; gradients that are zero in exact arithmetic, of biases in front of norms, are only small."""
    other = copy.deepcopy(module)
    inputs, labels = batch(dtype, side, count)
    mine = step(whole_batch(module, side, images), module, inputs, labels)
    theirs = step(other, other, inputs, labels)
    assert set(mine) == set(theirs)
    assert all(each.any() for name, each in mine.items() if name.endswith("running_mean"))
    for name, expected in theirs.items():
        if expected.double().norm() > tolerance:
            assert error(mine[name], expected) < tolerance, name
        assert mine[name].double().norm() < expected.double().norm() + tolerance, name


@pytest.mark.parametrize(("name", "side"), [("vgg11", 32), ("resnet20", 16), ("mobilenet_v2", 32)])
def test_a_step_in_micro_batches_is_that_of_the_whole_batch(name, side):
    compare(traced(name, side).double(), 2, torch.float64, side, 1e-10, count=7)


class Smooth(nn.Sequential):
    """A network without kinks, where float32 does not decide whether a gradient passes."""

    def __init__(self):
        layers, channels = [], 3
        for width, stride in ((8, 1), (16, 2), (16, 1), (32, 2)):
            conv = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
            layers, channels = [*layers, conv, nn.BatchNorm2d(width), nn.SiLU()], width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 10))


@pytest.mark.parametrize("images", [2, 24, 64])
@pytest.mark.parametrize("last", [False, True])
def test_float32_differs_by_rounding_alone(images, last):
    """Of the whole step: dropout behind the norms draws the whole batch's numbers, too."""
    torch.manual_seed(0)
    module = fx.symbolic_trace(Smooth())
    if last:
        module = module.to(memory_format=torch.channels_last)
    compare(module, images, torch.float32, 16, 1e-5)


def test_a_micro_batch_takes_the_memory_of_its_images():
    """Apart from what each norm reads, which is kept for the whole batch."""
    module, (inputs, labels) = traced("resnet20", 16), batch(torch.float32, 16)
    peaks = {}
    for images in (4, 16, 64):
        forward = whole_batch(module, 16, images)
        peaks[images] = tensor_peak_bytes(lambda forward=forward: step(forward, module, inputs, labels), [module])
    kept = tensor_peak_bytes(lambda: step(module, module, inputs, labels), [module])
    assert peaks[4] < peaks[16] < peaks[64] < kept
    assert peaks[4] < 0.8 * kept


def test_evaluation_runs_in_micro_batches():
    module = traced("resnet20", 16)
    forward, (inputs, _) = whole_batch(module.eval(), 16, 3), batch(torch.float32, 16, 7)
    with torch.no_grad():
        torch.testing.assert_close(forward(inputs), module(inputs))
        few = tensor_peak_bytes(lambda: forward(inputs.repeat(8, 1, 1, 1)), [module])
        assert few < 0.5 * tensor_peak_bytes(lambda: module(inputs.repeat(8, 1, 1, 1)), [module])
