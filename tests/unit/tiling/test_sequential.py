"""Tile after tile on one device: outputs and every gradient are the untiled network's, in any grid and grouping."""

import copy
import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import assert_same
from tiled_nets import LAYERS, gradients, images, network, untiled
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.errors import ModelError, OutOfStorageError
from snugfit.memory.scratch import MappedScratch
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.tiling.candidates import scratch_bytes
from snugfit.tiling.grouping import Profile, every_cut, one_group
from snugfit.tiling.sequential import TiledForward
from snugfit.tiling.tileable_prefix import find_tileable_prefix

FLAGS = (True, False)


@pytest.fixture(autouse=True)
def leave_out_convolutions_of_any_size(monkeypatch):
    monkeypatch.setattr("snugfit.tiling.operators._LEAST_MACS", 0)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)
        assert list(Path(made).iterdir()) == []


@settings(max_examples=80)
@given(st.data(), st.lists(LAYERS, max_size=5), st.integers(8, 21), st.integers(8, 21), st.booleans(), st.booleans())
def test_a_tiled_step_is_the_untiled_one(folder, data, plans, height, width, last, mapped):
    module = network(plans)
    try:
        size = find_tileable_prefix(module, (3, height, width)).layers.maps[-1]
    except (ModelError, RuntimeError):  # a map became too small
        return
    grid = (data.draw(st.integers(1, min(4, size.height))), data.draw(st.integers(1, min(6, size.width))))
    cuts = find_tileable_prefix(module, (3, height, width)).layers.cuts
    inner = data.draw(st.lists(st.sampled_from(cuts[1:-1]), unique=True)) if len(cuts) > 2 else []
    scratch = MappedScratch(folder) if mapped else None
    tiled = TiledForward(module, (3, height, width), grid, Profile((cuts[0], *sorted(inner), cuts[-1])), scratch)
    given = images(height, width)
    if last:
        given = given.contiguous(memory_format=torch.channels_last)
    other = untiled(module)
    assert_same(gradients(tiled, module, given), gradients(other, other, given))


@settings(max_examples=80)
@given(st.data(), st.lists(LAYERS, max_size=4), st.integers(8, 17), st.integers(8, 17), st.booleans())
def test_norms_that_normalise_by_their_batch(folder, data, plans, height, width, mapped):
    """Wherever they stand, within residual blocks too; what they track is what the untiled step leaves."""
    module = network(plans)
    for layer in list(module.modules()):
        if isinstance(layer, nn.Conv2d) and data.draw(st.booleans()):
            owner, _, name = next(key for key, each in module.named_modules() if each is layer).rpartition(".")
            affine, tracks, momentum = (data.draw(st.sampled_from(each)) for each in (FLAGS, FLAGS, (0.1, None)))
            norm = nn.BatchNorm2d(layer.out_channels, momentum=momentum, affine=affine, track_running_stats=tracks)
            norm = norm.double()
            norm.train(data.draw(st.booleans()))
            setattr(module.get_submodule(owner), name, nn.Sequential(layer, norm))
    other, module = untiled(module), fx.symbolic_trace(module)
    try:
        size = find_tileable_prefix(module, (3, height, width)).layers.maps[-1]
    except (ModelError, RuntimeError):
        return
    grid = (data.draw(st.integers(1, min(3, size.height))), data.draw(st.integers(1, min(3, size.width))))
    profile = data.draw(st.sampled_from((one_group, every_cut)))(
        find_tileable_prefix(module, (3, height, width)).layers.cuts
    )
    few = data.draw(st.sampled_from((None, 1, 2, 3)))
    tiled = TiledForward(module, (3, height, width), grid, profile, MappedScratch(folder) if mapped else None, few)
    given = images(height, width, 3)
    assert_same(gradients(tiled, module, given), gradients(other, other, given))
    for mine, theirs in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_every_norm_in_tiles_is_told_with_the_pixels_that_it_reads(name):
    module = Chain.from_module(models.build(name, 10, 32), (3, 32, 32), name).to_module()
    norms, read = find_tileable_prefix(module, (3, 32, 32)).norms(), {}
    for norm in norms:
        norm.register_forward_pre_hook(lambda norm, given: read.update({norm: given[0][0, 0].numel()}))
    module(torch.zeros(2, 3, 32, 32))
    assert len(read) > 10 and read == norms


@pytest.mark.parametrize(
    ("name", "training", "profile", "mapped"),
    [
        ("resnet18", True, one_group, True),
        pytest.param("resnet18", False, every_cut, False, marks=pytest.mark.slow),
        pytest.param("mobilenet_v2", False, one_group, True, marks=pytest.mark.slow),
        ("mobilenet_v2", True, every_cut, False),
    ],
)
def test_models_by_name(name, training, profile, mapped, folder):
    """The stem ends where a pool reads the whole map; what is behind it runs as it is."""
    torch.manual_seed(0)
    chain = Chain.from_module(models.build(name, 5, 40), (3, 40, 40), name)
    module = chain.to_module().double().train(training)
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.eval()
    other = copy.deepcopy(module)
    cuts = find_tileable_prefix(module, (3, 40, 40)).layers.cuts
    assert find_tileable_prefix(module, (3, 40, 40)).layers.maps[-1].channels >= 512
    tiled = TiledForward(module, (3, 40, 40), (2, 2), profile(cuts), MappedScratch(folder) if mapped else None)
    given = images(40, 40)
    assert_same(gradients(tiled, module, given), gradients(other, other, given))
    for mine, theirs in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def plain(channels=8, depth=4):
    layers = [
        layer
        for index in range(depth)
        for layer in (nn.Conv2d(3 if not index else channels, channels, 3, 1, 1), nn.ReLU())
    ]
    return fx.symbolic_trace(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)))


@pytest.mark.parametrize("affine", FLAGS)
@pytest.mark.parametrize("tracks", FLAGS)
def test_norms_without_scale_and_shift_or_running_statistics(affine, tracks):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, affine=affine, track_running_stats=tracks)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    other = copy.deepcopy(module)
    for each in (TiledForward(fx.symbolic_trace(module), (3, 12, 12), (2, 2)), other):
        each(images(12, 12)).square().sum().backward()
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_ten_steps_of_training_stay_together():
    torch.manual_seed(0)
    trained = plain().double()
    other = copy.deepcopy(trained)
    tiled = TiledForward(trained, (3, 16, 16), (3, 2))
    labels = torch.tensor([0, 2])
    for module, forward in ((trained, tiled), (other, other)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            F.cross_entropy(forward(images(16, 16)), labels).backward()
            optimizer.step()
    for mine, theirs in zip(trained.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_activations_of_one_tile_are_alive_at_a_time():
    """A single group keeps no map at all: what a step takes beside input and output shrinks with the tiles."""
    module = plain(16, 6)
    given = torch.randn(1, 3, 96, 96)
    peaks = []
    for grid in (1, 4):
        tiled = TiledForward(
            module, (3, 96, 96), (grid, grid), one_group(find_tileable_prefix(module, (3, 96, 96)).layers.cuts)
        )
        peaks.append(tensor_peak_bytes(lambda tiled=tiled: tiled(given).sum().backward(), [module, given]))
    untiled = tensor_peak_bytes(lambda: module(given).sum().backward(), [module, given])
    assert peaks[1] < peaks[0] / 3 and peaks[1] < untiled / 3


def normed(channels=16, depth=4):
    layers = [
        layer
        for index in range(depth)
        for layer in (
            nn.Conv2d(3 if not index else channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.1),
        )
    ]
    return fx.symbolic_trace(nn.Sequential(*layers))


def test_with_scratch_nothing_of_a_whole_map_is_in_memory_beside_input_and_output(folder):
    """Batch statistics: the untiled step keeps eleven maps, in memory tiles keep four and gradients of two."""
    module, given = normed(), torch.randn(1, 3, 96, 96).to(memory_format=torch.channels_last)
    whole = 4 * 16 * 96 * 96
    peaks = {}
    for name, grid, scratch in (("memory", 4, None), (2, 2, MappedScratch(folder)), (4, 4, MappedScratch(folder))):
        tiled = TiledForward(module, (3, 96, 96), (grid, grid), one_group((0, 12)), scratch)
        peaks[name] = tensor_peak_bytes(lambda tiled=tiled: tiled(given).sum().backward(), [module, given])
        module.zero_grad()
    untiled = tensor_peak_bytes(lambda: module(given).sum().backward(), [module, given])
    assert peaks[4] < untiled / 5 and peaks[4] < peaks["memory"] / 2.5 and peaks[4] < 2 * whole
    assert peaks[4] - whole < (peaks[2] - whole) / 2


def test_steps_use_the_same_scratch_again_whatever_the_batch(folder):
    sizes = []
    scratch = MappedScratch(folder, grown=sizes.append)
    module = normed(4, 3)
    tiled = TiledForward(module, (3, 12, 12), (2, 2), scratch=scratch)
    for batch in (4, 4, 4, 2, 4):
        tiled(torch.randn(batch, 3, 12, 12)).sum().backward()
        module.eval()
        with torch.no_grad():
            tiled(torch.randn(batch, 3, 12, 12))
        module.train()
        assert scratch.bytes <= max(sizes)
    assert scratch.bytes == max(sizes)


@pytest.mark.parametrize(
    ("name", "groups"),
    [("resnet18", one_group), ("resnet18", every_cut), ("mobilenet_v2", every_cut), ("vgg16", one_group)],
)
def test_the_bytes_of_scratch_are_known_before(name, groups, folder):
    """To the byte, in a training step, whatever follows it: a smaller batch, or a pass without gradients."""
    chain = Chain.from_module(models.build(name, 5, 32), (3, 32, 32), name)
    module = chain.to_module().train()
    layers = find_tileable_prefix(module, (3, 32, 32)).layers
    scratch = MappedScratch(folder)
    tiled = TiledForward(module, (3, 32, 32), (1, 1), groups(layers.cuts), scratch)
    predicted = scratch_bytes(layers, groups(layers.cuts))
    for batch in (3, 3, 2):
        tiled(torch.randn(batch, 3, 32, 32)).sum().backward()
        assert scratch.bytes == 3 * predicted
    with torch.no_grad():
        tiled(torch.randn(3, 3, 32, 32))
    assert scratch.bytes == 3 * predicted


def test_a_disk_that_is_full_in_the_middle_of_a_step_is_one_error_and_harms_nothing(folder, monkeypatch):
    module = normed(4, 3).double()
    other = copy.deepcopy(module)
    tiled = TiledForward(module, (3, 12, 12), (2, 2), scratch=MappedScratch(folder))
    made = tiled(images(12, 12))

    def full(descriptor, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OutOfStorageError, match="no space left"):
        patch.setattr(os, "posix_fallocate", full)
        made.sum().backward()
    module.zero_grad()
    module.load_state_dict(other.state_dict())
    assert_same(gradients(tiled, module, images(12, 12)), gradients(other, other, images(12, 12)))


def test_frozen_layers_get_no_gradient_and_images_none_that_is_not_asked_for():
    module = plain().double()
    for parameter in list(module.parameters())[:4]:
        parameter.requires_grad_(False)
    TiledForward(module, (3, 16, 16), (2, 2))(images(16, 16)).sum().backward()
    assert [parameter.grad is not None for parameter in module.parameters()] == [False] * 4 + [True] * 6
    with torch.no_grad():
        assert not TiledForward(module, (3, 16, 16), (2, 2))(images(16, 16)).requires_grad


@pytest.mark.parametrize("affine", FLAGS)
@pytest.mark.parametrize("profile", [one_group, every_cut])
@pytest.mark.parametrize("network", [plain, normed])
def test_in_bfloat16_a_tiled_step_is_as_exact_as_the_untiled_one(folder, network, profile, affine):
    """Both against float64: the distance of the tiled step is at most one and a half times the untiled one's."""
    torch.manual_seed(0)
    untiled_module, given = network(), images(16, 16, batch=4)
    for layer in untiled_module.modules():
        if isinstance(layer, nn.BatchNorm2d) and not affine:
            layer.weight = layer.bias = None
    module, exact = copy.deepcopy(untiled_module), copy.deepcopy(untiled_module).double()
    cuts = find_tileable_prefix(module, (3, 16, 16)).layers.cuts
    tiled = TiledForward(module, (3, 16, 16), (2, 2), profile(cuts), MappedScratch(folder))

    def in_bfloat16(forward):
        def run(values):
            with torch.autocast("cpu", torch.bfloat16):
                return forward(values.float())

        return run

    found = gradients(in_bfloat16(tiled), module, given)
    reference = gradients(in_bfloat16(untiled_module), untiled_module, given)
    for mine, theirs, true in zip(found, reference, gradients(exact, exact, given), strict=True):
        distance, allowed = ((each.double() - true).norm() for each in (mine, theirs))
        assert distance <= 1.5 * allowed + 0.001 * true.norm()
    for name, value in untiled_module.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), value, rtol=0.01, atol=0.001)


def test_what_ends_the_stem():
    prefix = find_tileable_prefix(plain(depth=2), (3, 16, 16))
    assert [each.layer.name for each in prefix.operators] == ["0", "1", "2", "3"]
    dropped = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 4, 3)))
    assert len(find_tileable_prefix(dropped, (3, 16, 16)).operators) == 1


def test_only_norms_that_normalise_by_their_batch_wait_for_sums():
    module = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    sums = {mode: find_tileable_prefix(module.train(mode), (3, 8, 8)).layers.layers[1].sums for mode in (False, True)}
    assert sums == {False: 0, True: 4}


def test_a_norm_may_change_its_mode_between_two_steps():
    module = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).double()
    other = copy.deepcopy(module)
    tiled = TiledForward(module, (3, 12, 12), (2, 2))
    for mode in (True, False, True):
        module.train(mode)
        other.train(mode)
        assert_same(gradients(tiled, module, images(12, 12)), gradients(other, other, images(12, 12)))


def test_errors():
    with pytest.raises(ModelError, match="must begin with convolutions or pools"):
        find_tileable_prefix(fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))), (3, 2, 2))
    with pytest.raises(ModelError, match=r"16x16 cannot be cut into 17x1"):
        TiledForward(plain(), (3, 16, 16), (17, 1))
    norm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        TiledForward(norm, (3, 3, 3), (1, 1))(torch.randn(1, 3, 3, 3))


class Convolutions(TorchDispatchMode):
    """Counts convolutions of a forward pass."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "lowered"), [(torch.float64, False), (torch.float32, True)])
def test_the_backward_pass_does_not_compute_convolutions_that_end_a_group_again(dtype, lowered):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)]
    module = fx.symbolic_trace(nn.Sequential(*layers).to(dtype))
    tiled, inputs = TiledForward(module, (3, 12, 12), (1, 1), Profile((0, 3, 5))), images(12, 12).to(dtype)
    with Convolutions() as counted:
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            loss = tiled(inputs).float().square().sum()
        assert counted.count == 3
        loss.backward()
        assert counted.count == 4, "the first convolution does not end its group"
    own = [each.grad.clone() for each in module.parameters()]
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        loss = module(inputs).float().square().sum()
    loss.backward()
    for mine, other in zip(own, module.parameters(), strict=True):
        assert float((mine - other.grad).norm() / other.grad.norm()) < (1e-2 if lowered else 1e-6)
