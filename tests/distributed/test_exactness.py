"""A step over several processes is the untiled step: outputs, gradients of images and weights, buffers of norms."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tensors import assert_same
from tiled_nets import LAYERS, gradients, images, network, untiled, weighted
from torch import nn
from torch.nn import functional as F

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.tiling.distributed import TiledNetwork
from snugfit.tiling.exchange import cells_of
from snugfit.tiling.geometry import balanced
from snugfit.tiling.grouping import Profile, every_cut
from snugfit.tiling.layers import Tiling
from snugfit.tiling.plan import schedule_of
from snugfit.tiling.sequential import rest_of
from snugfit.tiling.tileable_prefix import find_tileable_prefix
from snugfit.tiling.transport import ProcessTransport

FEW = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def tiled(
    group, rank, plans, size, batch, training, grid, profiles, recompute, replicas, rest, processes, early, split
):
    """On every process: what who computes the rest has, and the buffers of this process."""
    module = network(plans).train(training)
    prefix = find_tileable_prefix(module, (3, *size))
    last = prefix.layers.maps[-1]
    tiling = Tiling.of(prefix.layers, balanced(last.height, grid[0]), balanced(last.width, grid[1]))
    forward, backward = (Profile(cuts) for cuts in profiles)
    schedule = schedule_of(prefix, tiling, forward, backward, recompute=recompute, image=True)
    cells = cells_of(tiling.tiles, replicas, processes)
    net = TiledNetwork(prefix, schedule, cells, ProcessTransport(group), rest, range(split))
    given_images = images(*size, batch) if rank == 0 else None
    made = net.forward(given_images, batch)
    upper = None
    if made is not None:
        made.requires_grad_(True)
        with torch.enable_grad():
            weighted(made).backward()
        upper = made.grad
    found = net.backward(upper, sums=early)
    net.sum_gradients()
    own = [parameter.grad for parameter in module.parameters()]
    buffers = [buffer.numpy() for buffer in module.buffers()]
    outputs = None if made is None else [made.detach().numpy(), None if found is None else found.numpy()]
    return outputs, [None if each is None else each.numpy() for each in own], buffers


def subset(draw, cuts):
    inner = draw(st.lists(st.sampled_from(cuts[1:-1]), unique=True)) if len(cuts) > 2 else []
    return (cuts[0], *sorted(inner), cuts[-1])


@FEW
@given(
    st.data(), st.lists(LAYERS, max_size=6), st.integers(9, 20), st.integers(9, 20), st.booleans(), st.booleans(),
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 2),
    st.sampled_from(("gateway", "replicated")), st.booleans(), st.sampled_from((0, 100)),
)  # fmt: skip
def test_any_grid_any_groups_any_processes(
    processes, data, plans, height, width, training, recompute, down, across, count, replicas, rest, early, split
):
    module = network(plans).train(training)
    try:
        prefix = find_tileable_prefix(module, (3, height, width))
    except Exception:  # maps that become too small for a layer
        return
    whole = untiled(module)
    try:
        want = gradients(whole, whole, images(height, width, 3))
    except (ValueError, RuntimeError):  # one value per channel, or nothing left
        return
    if len(prefix.operators) < sum(1 for node in module.graph.nodes if node.op == "call_module") or want[0].dim() != 4:
        return
    profiles = subset(data.draw, prefix.layers.cuts), subset(data.draw, prefix.layers.cuts)
    count = min(count, down * across * replicas)
    found = processes.run(
        tiled, plans, (height, width), 3, training, (down, across), profiles, recompute, replicas, rest, count,
        early, split, processes=count,
    )  # fmt: skip
    for number, (outputs, weights, buffers) in enumerate(found):
        if number == 0:
            assert_same([torch.from_numpy(each) for each in outputs], want[:2])
        elif rest == "replicated":
            assert outputs[1] is None
            assert_same([torch.from_numpy(outputs[0])], want[:1])
        else:
            assert outputs is None
        assert_same([None if each is None else torch.from_numpy(each) for each in weights], want[2:])
        for mine, theirs in zip(buffers, whole.buffers(), strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-10, atol=1e-10)


def stepped(group, rank, name, size, rate, grid, processes, steps):
    """Some steps of training of a model by name, whose leading layers are tiled; the rest is on the gateway."""
    module = named(name, size)
    prefix = find_tileable_prefix(module, (3, size, size))
    last = prefix.layers.maps[-1]
    tiling = Tiling.of(prefix.layers, balanced(last.height, grid[0]), balanced(last.width, grid[1]))
    profile = every_cut(prefix.layers.cuts)
    schedule = schedule_of(prefix, tiling, profile, profile)
    net, rest = (
        TiledNetwork(prefix, schedule, cells_of(tiling.tiles, 1, processes), ProcessTransport(group)),
        rest_of(module, prefix),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        made = net.forward(images(size, size, 2) + step if rank == 0 else None, 2)
        upper = None
        if made is not None:
            made.requires_grad_(True)
            F.cross_entropy(rest(made), torch.tensor([1, 3])).backward()
            upper = made.grad
        net.backward(upper, sums=step % 2 == 0)
        net.sum_gradients()
        optimizer.step()
    own = module if rank == 0 else prefix_module(prefix)
    return {name: each.detach().numpy() for name, each in own.state_dict().items()}


def prefix_module(prefix):
    return nn.ModuleDict({each.layer.name.replace(".", "/"): each.module for each in prefix.operators if each.module})


def named(name, size):
    torch.manual_seed(3)
    chain = Chain.from_module(models.build(name, 5, size), (3, size, size), name)
    module = chain.to_module().double().train()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return module


@pytest.mark.parametrize(
    ("name", "size", "rate"), [("resnet20", 32, 1e-3), pytest.param("mobilenet_v2", 64, 1e-5, marks=pytest.mark.slow)]
)
def test_four_steps_of_a_model_stay_together(processes, name, size, rate):
    """On smaller images, or at a higher rate, MobileNetV2 itself makes much of a change in the last digit."""
    whole = untiled(named(name, size))
    optimizer = torch.optim.SGD(whole.parameters(), lr=rate, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        F.cross_entropy(whole(images(size, size, 2) + step), torch.tensor([1, 3])).backward()
        optimizer.step()
    want = whole.state_dict()
    found = processes.run(stepped, name, size, rate, (2, 2), 4, 4, processes=4)
    assert found[0].keys() == want.keys()
    for own in found:
        assert len(own) > 20
        for key, mine in own.items():
            torch.testing.assert_close(torch.from_numpy(mine), want[key.replace("/", ".")], rtol=1e-8, atol=1e-9)
