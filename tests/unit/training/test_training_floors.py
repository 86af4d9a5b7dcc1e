"""What a step takes on the meta device is what it takes where it is computed, in every precision and optimizer."""

import pytest
import torch
from torch import nn

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.network import NetworkTrainer
from snugfit.memory.autocast import autocast
from snugfit.memory.tensors import tensor_peak_bytes

SHAPE = (3, 16, 16)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.Hardswish(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 5),
    )  # fmt: skip


def peak(device, precision, optimizer, micro_batches):
    torch.manual_seed(0)
    chain = Chain.from_module(network().to(device), SHAPE)
    module = chain.to_module().to(memory_format=torch.channels_last)
    work = Workload("net", "data", SHAPE, 5, 32, 4, 4, optimizer=OptimizerSettings(optimizer), precision=precision)
    trainer = NetworkTrainer(module, chain.forward, work, micro_batches)
    images = torch.ones((8, *SHAPE), device=device).to(memory_format=torch.channels_last)
    labels = torch.zeros(8, dtype=torch.int64, device=device)

    def step():
        for part in range(micro_batches):
            trainer.step(images, labels, 1.0, part == micro_batches - 1)

    return tensor_peak_bytes(step, trainer.modules, repeats=2)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_step_takes_as_many_bytes_of_tensors_on_the_meta_device(precision, optimizer, micro_batches):
    found = [peak(device, precision, optimizer, micro_batches) for device in ("meta", "cpu")]
    assert found[0] == pytest.approx(found[1], rel=0.005)


def test_layers_compute_in_bfloat16_on_the_meta_device_and_losses_do_not():
    layer, images = nn.Conv2d(3, 4, 3, device="meta"), torch.empty(2, 3, 8, 8, device="meta")
    with autocast("meta"):
        maps = layer(images)
        loss = nn.functional.cross_entropy(maps.flatten(1), torch.zeros(2, dtype=torch.int64, device="meta"))
        with torch.autocast("cpu", enabled=False):
            assert layer(images).dtype == torch.float32
    assert (maps.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert layer(images).dtype == torch.float32
