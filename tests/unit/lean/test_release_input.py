"""A batch of images that a network frees behind its last reader: same numbers, less memory, nothing lost elsewhere."""

import copy

import torch
from small_networks import nodes_of
from torch import fx, nn
from torch.nn import functional as F

from snugfit._chain import find_blocks
from snugfit.lean import enable_inplace, release_images, retain_images, run_per_sample, use_lean
from snugfit.memory.tensors import LiveBytes

SHAPE = (3, 16, 16)


def network(trained=("8",)):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    module = fx.symbolic_trace(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4)))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in trained)
    module.train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    return module


def images(batch=4):
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(1))


def gradients(module, given):
    module.zero_grad()
    output = module(given)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def test_the_numbers_stay_and_the_images_are_gone():
    plain, given = network(), images()
    changed = copy.deepcopy(plain)
    assert release_images(changed)
    for got, want in zip(gradients(changed, given), gradients(plain, images()), strict=True):
        assert torch.equal(got, want)
    assert given.numel() == 0
    assert changed.state_dict().keys() == plain.state_dict().keys()


def test_they_are_freed_before_the_step_ends_although_the_caller_holds_them():
    module, given, seen = network(), images(), []
    module.get_submodule("3").register_forward_hook(lambda *_: seen.append(meter.live))
    live = {}
    for kept in (True, False):
        if not kept:
            release_images(module)
        meter, given = LiveBytes(), images()
        meter.add(given)
        size = given.nbytes
        with meter:
            module(given)
        live[kept] = seen.pop()
    assert live[True] - live[False] == size


def test_they_stay_in_evaluation_mode_and_where_somebody_else_reads_them():
    module, given = network(), images()
    release_images(module)
    module.eval()(given)
    assert given.shape == (4, *SHAPE)
    module.train()
    needed = given.clone().requires_grad_(True)
    module(needed).sum().backward()
    assert needed.grad.abs().sum() > 0
    whole = images(8)
    module(whole[:4])
    assert torch.equal(whole, images(8))


def test_a_layer_that_reads_images_and_trains_keeps_them():
    module, given = network(trained=("0", "8")), images()
    assert not release_images(module)
    gradients(module, given)
    assert given.shape == (4, *SHAPE)


class Twice(nn.Module):
    """Reads its images a second time, late."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.last(F.relu(self.first(x)) + x).mean((2, 3))


def test_behind_the_last_reader():
    module, given = fx.symbolic_trace(Twice()), images()
    for parameter in module.first.parameters():
        parameter.requires_grad_(False)
    plain = copy.deepcopy(module)
    assert release_images(module)
    for got, want in zip(gradients(module, given), gradients(plain, images()), strict=True):
        assert torch.equal(got, want)
    assert given.numel() == 0


def test_beside_the_other_options_in_either_copy_and_undone():
    module = network()
    plain = copy.deepcopy(module)
    run_per_sample(module, nodes_of(find_blocks(module, SHAPE)[:1]))
    use_lean(module)
    enable_inplace(module)
    assert release_images(module) and release_images(module)
    for each in (copy.deepcopy(module), module):
        given = images()
        for got, want in zip(gradients(each, given), gradients(plain, images()), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert given.numel() == 0
    retain_images(module)
    run_per_sample(module, {})
    given = images()
    gradients(module, given)
    assert given.shape == (4, *SHAPE)
