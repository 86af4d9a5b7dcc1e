"""Defects of torch: that they are there, and that no package of the project lets training meet them."""

import pytest
import torch
from forked import run_copies
from torch import nn

from snugfit._upstream import GROUP_NORM_MENDED, kept_shared, shared_names, to_channels_last
from snugfit.memory import tensor_peak_bytes

PACKAGES = ("_chain", "lean", "local", "memory", "profiling", "selection", "surgery", "tiling")
CRASH = """
import torch
images = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
torch.nn.GroupNorm(2, 4)(images).sum().backward()
print("alive")
"""
LAYOUTS = {
    "channels_last": ((3, 8, 6, 5), torch.channels_last),
    "large map": ((2, 8, 48, 48), torch.channels_last),
    "one pixel": ((3, 8, 1, 1), torch.channels_last),
    "volume": ((2, 8, 3, 4, 5), torch.channels_last_3d),
    "contiguous": ((3, 8, 6, 5), torch.contiguous_format),
    "rows": ((3, 8, 7), torch.contiguous_format),
}


def test_the_versions_of_torch_that_crash_are_the_ones_that_are_named():
    """Once the least torch that the project asks for does not crash, the mend can go."""
    ((code, said),) = run_copies("import torch", CRASH)
    assert (code, said) == ((-11, "") if torch.__version__ < GROUP_NORM_MENDED else (0, "alive\n"))


def test_every_package_that_runs_networks_mends_group_norm():
    found = run_copies("import torch", *(f"import snugfit.{package}\n{CRASH}" for package in PACKAGES))
    assert found == [(0, "alive\n")] * len(PACKAGES)


def test_no_source_lines_of_torch_are_held_and_they_are_read_on_demand():
    held = "sum(name.startswith(os.path.dirname(torch.__file__)) for name in linecache.cache)"
    code = f"""if True:
        import inspect, linecache, os, torch
        linecache.cache["own"] = (5, None, ["line"], "own")
        before = {held}
        import snugfit.memory
        print(before > 0, {held}, linecache.getline("own", 1), "def conv2d_input" in inspect.getsource(torch.nn.grad))
    """
    assert run_copies("", code) == [(0, "True 0 line True\n")]


def gradients(layer, images, upper):
    layer.zero_grad()
    layer(images).backward(upper)
    return [p.grad.clone() for p in layer.parameters() if p.requires_grad]


@pytest.mark.parametrize("trains", ["weight bias", "weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_an_input_that_has_one(layout, dtype, trains):
    shape, memory_format = LAYOUTS[layout]
    torch.manual_seed(0)
    images = torch.randn(shape, dtype=dtype).contiguous(memory_format=memory_format)
    upper = torch.randn(shape, dtype=dtype)
    layer = nn.GroupNorm(4, 8, dtype=dtype)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trains)
    expected = gradients(layer, images.clone().requires_grad_(), upper)
    found = gradients(layer, images, upper)
    assert len(found) == len(trains.split())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


SIBLINGS = {
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "instance, running": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "instance, evaluated": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True).eval(),
    "layer": lambda: nn.LayerNorm([8, 6, 6]),
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, evaluated": lambda: nn.BatchNorm2d(8).eval(),
    "rms": lambda: nn.RMSNorm([8, 6, 6]),
}


@pytest.mark.parametrize("kind", SIBLINGS)
def test_other_normalisations_have_the_gradients_of_an_input_that_has_one(kind):
    torch.manual_seed(0)
    images = torch.randn(4, 8, 6, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    upper, layer = torch.randn_like(images), SIBLINGS[kind]().double()
    found = gradients(layer, images, upper)
    expected = gradients(layer, images.clone().requires_grad_(), upper)
    assert len(found) >= 1
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))


def test_the_gradient_that_is_dropped_counts_while_it_is_there():
    """Input, upper gradient and output of 4608 bytes each; a fourth while the gradient of the input is made."""

    def peak(device):
        layer = nn.GroupNorm(2, 8, device=device)
        images = torch.ones(4, 8, 6, 6, device=device).contiguous(memory_format=torch.channels_last)
        upper = torch.ones_like(images)
        parameters = list(layer.parameters())
        step = lambda: torch.autograd.grad(layer(images), parameters, upper)  # noqa: E731
        return tensor_peak_bytes(step, [layer, images, upper])

    affine, statistics = 4 * 2 * 8, 4 * 2 * 4 * 2
    assert peak("cpu") == (4 if torch.__version__ < GROUP_NORM_MENDED else 3) * 4608 + affine + statistics
    assert peak("meta") >= peak("cpu")  # there torch copies to contiguous maps besides


@pytest.mark.parametrize("change", [
    lambda made: made.to_empty(device="meta"),
    lambda made: made.to("meta"),
    lambda made: made.load_state_dict({name: each.clone() for name, each in made.state_dict().items()}, assign=True),
])  # fmt: skip
def test_shared_weights_come_apart_and_are_kept_shared(change):
    def tied():
        made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        made[2].weight = made[0].weight
        return made

    alone, kept = tied(), tied()
    change(alone)
    assert alone[2].weight is not alone[0].weight  # otherwise torch keeps them shared, and kept_shared can go
    with kept_shared(kept):
        change(kept)
    assert kept[2].weight is kept[0].weight and kept[2].bias is not kept[0].bias
    assert shared_names(kept) == {"2.weight": "0.weight"} and not shared_names(alone)


def test_tensors_of_five_dimensions_stay_as_they_are_in_channels_last():
    module = nn.Sequential(nn.Conv2d(2, 4, 3))
    module.register_buffer("mask", torch.zeros(1, 2, 1, 3, 4))  # as timm's Swin has them
    to_channels_last(module)
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert module.get_buffer("mask").is_contiguous() and to_channels_last(module, "meta")[0].weight.is_meta
