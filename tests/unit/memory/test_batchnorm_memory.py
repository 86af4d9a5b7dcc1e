"""Room for what BatchNorm's backward pass reserves and never touches: given where the budget holds the rest."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from snugfit.memory.address_space import SPARE_BYTES, allow_batch_norm_backward

MAP = (2, 3, 4, 4)
BYTES = 2 * 3 * 4 * 4 * 4

TIGHT = """
import torch
from torch import nn
from snugfit.memory import MemoryLimit, prepare_process, release_memory

torch.manual_seed(0)
network = nn.Sequential(nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
small = torch.randn(1, 3, 8, 8)
network(small).sum().backward()
resting = prepare_process(1)
images = torch.randn(64, 3, 32, 32)
# 0.8 MB of images; two maps of 16.8 MB live at most beside the gradient of BatchNorm's input
with MemoryLimit(64_000_000, resting, torch.device("cpu")) as limit:
    with limit.allow_kernels():
        network(images).sum().backward()
print("done")
"""


class Recorded:
    """A limit that notes what it was asked for."""

    def __init__(self, left_bytes, address_space=0):
        self.left_bytes, self.address_space, self.asked = left_bytes, address_space, []

    def has_address_space(self, size):
        return size <= self.address_space

    def refresh(self, extra_bytes=0):
        self.asked.append(extra_bytes)


@pytest.mark.parametrize(("left", "given"), [(BYTES, BYTES), (BYTES - 1, 0)])
def test_room_is_given_for_the_backward_pass_where_its_result_fits(left, given):
    limit = Recorded(left)
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
    handle = allow_batch_norm_backward(limit)
    try:
        loss = network(torch.randn(MAP)).sum()
        assert limit.asked == []
        loss.backward()
    finally:
        handle.remove()
    assert limit.asked == [given, 0]


@pytest.mark.parametrize(("address_space", "asked"), [(2 * BYTES, [BYTES, 0]), (2 * BYTES + SPARE_BYTES, [])])
def test_nothing_is_asked_where_the_limit_has_room_for_both_gradients(address_space, asked):
    limit, norm = Recorded(10**9, address_space), nn.BatchNorm2d(3)
    handle = allow_batch_norm_backward(limit)
    try:
        norm(torch.randn(MAP, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert limit.asked == asked


class Activated(nn.BatchNorm2d):
    """Applies its activation itself, as timm's do."""

    def forward(self, x):
        return nn.functional.silu(super().forward(x))


def test_a_layer_with_its_own_activation_gets_room_for_its_norm():
    limit = Recorded(10**9)
    handle = allow_batch_norm_backward(limit)
    try:
        Activated(3)(torch.randn(MAP, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert limit.asked == [BYTES, 0]


def test_nothing_is_hooked_without_gradients_or_after_removal():
    limit, layer = Recorded(10**9), nn.BatchNorm2d(3)
    handle = allow_batch_norm_backward(limit)
    with torch.no_grad():
        layer(torch.randn(MAP))
    handle.remove()
    layer(torch.randn(MAP)).sum().backward()
    assert limit.asked == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")
def test_a_step_is_not_refused_for_memory_that_it_never_touches():
    finished = subprocess.run([sys.executable, "-c", TIGHT], capture_output=True, text=True, check=False)
    assert finished.stdout == "done\n", finished.stderr


ADDRESS_SPACE = """
import torch
from snugfit.memory import MemoryLimit, prepare_process

resting = prepare_process(1)
with MemoryLimit(64_000_000, resting, torch.device("cpu")) as limit:
    before = limit.has_address_space(40_000_000), limit.has_address_space(70_000_000)
    kept = torch.empty(40_000_000, dtype=torch.uint8)
    while_kept = limit.has_address_space(10_000_000), limit.has_address_space(40_000_000)
    del kept
    print(before, while_kept, limit.has_address_space(40_000_000))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")
def test_address_space_that_is_mapped_is_no_longer_left():
    finished = subprocess.run([sys.executable, "-c", ADDRESS_SPACE], capture_output=True, text=True, check=False)
    assert finished.stdout == "(True, False) (True, False) True\n", finished.stderr
