"""What the probe of a unit holds in its step, beside the unit."""

import pytest
import torch
from strategy_samples import HARDWARE, workload
from torch import nn

from snugfit._chain import Chain
from snugfit.local.assignment import Layout
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling import unit_stats
from snugfit.strategies.blockwise.probes import module_costs
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.memory_estimates import partial_gradient_bytes, stored_batches
from snugfit.strategies.recomputation.unit_costs import unit_costs


def chain():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 64, 10),
    )  # fmt: skip
    return Chain.from_module(network.to("meta"), (3, 8, 8))


def step_bytes(cache_dtype, index=1, batch=5):
    probe = Blockwise(module_units="1", cache_dtype=cache_dtype).probes(workload(), chain(), HARDWARE)[index]
    step = probe.build()
    return tensor_peak_bytes(lambda: step(batch))


@pytest.mark.parametrize(("cache_dtype", "extra"), [("float32", 512), ("bfloat16", 0), ("uint8", 4 * 8 - 256)])
def test_two_stored_batches_in_the_caches_type_lie_beside_the_step(cache_dtype, extra):
    """Maps of (4, 8, 8); uint8 rows have two floats beside each channel."""
    assert step_bytes(cache_dtype) - step_bytes("float16") == 2 * 5 * extra


def test_stored_batches():
    stored = stored_batches((3, 4, 4), 7, "float16")
    assert stored.nbytes == 2 * 7 * 3 * 16 * 2 and stored.dtype == torch.uint8


def test_a_floor_is_below_the_step_and_kept_bytes_are_by_hand():
    """The last unit trains with the network's own head; SGD keeps one momentum per parameter."""
    probes = Blockwise(module_units="1").probes(workload(), chain(), HARDWARE)
    assert [probe.name for probe in probes] == [f"unit:{unit.name}" for unit in chain().units]
    last = (4 * 6 * 9 + 6) + (6 * 64 * 10 + 10)
    assert probes[1].kept_bytes == last * 4 * 2
    auxiliary = Layout.of(chain(), "aan", 10).make_loss(0)
    first = 3 * 4 * 9 + 4 + sum(p.numel() for p in auxiliary.parameters())
    assert probes[0].kept_bytes == first * 4 * 2 + sum(b.nbytes for b in auxiliary.buffers())
    for probe in probes:
        step = probe.build()
        assert probe.kept_bytes < probe.floor(5) <= tensor_peak_bytes(lambda step=step: step(5)) + probe.kept_bytes


@pytest.mark.parametrize(("threads", "partials"), [(1, 0), (2, 1), (3, 1), (4, 2), (16, 3)])
def test_convolutions_in_bfloat16_may_need_further_partial_weight_gradients(monkeypatch, threads, partials):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    lowered = workload(precision="bfloat16")
    last = Blockwise(module_units="1").probes(lowered, chain(), HARDWARE)[1]
    assert last.partial_bytes == partials * 4 * (4 * 6 * 9)
    assert partial_gradient_bytes(lowered, "cuda", nn.Conv2d(4, 6, 3)) == 0
    assert Blockwise(module_units="1").probes(workload(), chain(), HARDWARE)[1].partial_bytes == 0


def test_probes_train_on_copies():
    made = chain()
    for probe in Blockwise(module_units="1").probes(workload(), made, HARDWARE):
        probe.build()(2)
    assert all(p.is_meta and p.grad is None for unit in made.all_units for p in unit.module.parameters())


def test_losses_that_read_feature_maps_before_their_pool_are_priced_there():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.MaxPool2d(4), nn.Flatten(),
        nn.Linear(6, 10),
    )  # fmt: skip
    pooled = Chain.from_module(network.to("meta"), (3, 8, 8))
    layout = Layout.of(pooled, "lls-mxm", 10)
    assert layout.make_loss(1).before_pool and pooled.units[1].output_shape == (6, 1, 1)
    costs = module_costs(layout, unit_costs(pooled, unit_stats(pooled), 2), workload(), batch=2)
    assert len(costs.losses) == 2 and min(cost.backward_peak for cost in costs.losses) > 0
