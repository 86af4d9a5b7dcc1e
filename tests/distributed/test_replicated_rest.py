"""Where every process computes the layers behind the tiles: the untiled training, and the same weights everywhere."""

import random
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from tiled_nets import images
from torch import nn

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.network import NetworkTrainer
from snugfit.strategies.tiled.runner import GatewayTrainer, serve_task
from snugfit.tiling.coordinator import seeded_rng
from snugfit.tiling.cost_counter import Placement, count_step_cost
from snugfit.tiling.plan import TilePlan, Tiles
from snugfit.tiling.step_cost import GATEWAY
from snugfit.tiling.transport import ProcessTransport, receive_tensors, send_tensors

STEPS, BATCH, SIZE = 4, 5, 12
WORKLOAD = Workload("small", "digits", (3, SIZE, SIZE), 4, 64, 16, 0, optimizer=OptimizerSettings("sgd", lr=0.02))


class Orders:
    """A channel over a process group."""

    def __init__(self, group):
        self.group = group

    def send(self, command):
        dist.broadcast_object_list([command], group_src=GATEWAY, group=self.group)

    def receive(self):
        found = [None]
        dist.broadcast_object_list(found, group_src=GATEWAY, group=self.group)
        return found[0]


def chain(device):
    """Tiled up to the second convolution; BatchNorm by the batch and dropout behind."""
    torch.manual_seed(4)
    with torch.device(device):
        layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1)]
        rest = [nn.AdaptiveAvgPool2d(5), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3)]
        network = nn.Sequential(*layers, *rest, nn.Flatten(), nn.Linear(54, 4), nn.BatchNorm1d(4))
    found = Chain.from_module(network, (3, SIZE, SIZE), "small")
    for unit in found.all_units:
        unit.module.double()
    return found


def batch(number):
    """Images in the order of memory of runs, on which it depends which values a dropout draws."""
    labels = torch.randint(0, 4, (BATCH,), generator=torch.Generator().manual_seed(number))
    return (images(SIZE, SIZE, BATCH) + number).contiguous(memory_format=torch.channels_last), labels


def train(trainer, steps, micro_batches, around):
    """Steps whose batches differ, at rates that differ; every micro-batch has a seed of its own."""
    for step in steps:
        trainer.set_lr_factor(1 / (1 + step))
        for part in range(micro_batches):
            random.seed(10 * step + part)
            with around(10 * step + part):
                trainer.step(*batch(10 * step + part), 1 / micro_batches, part + 1 == micro_batches)


class Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def same_draws(number):
    """What the rest draws in a micro-batch, for a network that draws nothing else."""
    random.seed(number)
    return seeded_rng(random.getrandbits(62), torch.device("cpu"))


def untiled(micro_batches):
    module = chain("cpu").to_module().to(memory_format=torch.channels_last)
    trainer = NetworkTrainer(module, module, WORKLOAD, micro_batches)
    train(trainer, range(STEPS), micro_batches, same_draws)
    trainer.settle([batch(7), batch(8)])
    return module.state_dict()


def replicated(group, rank, plan, micro_batches, stops):
    """Weights, buffers and the generator's state on every process; the gateway begins anew before some steps."""
    transport, channel, found = ProcessTransport(group), Orders(group), chain("cpu" if rank == GATEWAY else "meta")
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    if rank == GATEWAY:
        module, saved = found.to_module(), {}
        for start, stop in zip([0, *stops], [*stops, STEPS], strict=True):
            trainer = GatewayTrainer(found, module, WORKLOAD, micro_batches, plan, transport, channel)
            if saved:
                trainer.load_state(saved.__getitem__)
            train(trainer, range(start, stop), micro_batches, lambda number: Nothing())
            trainer.settle([batch(7), batch(8)])
            with torch.no_grad():
                trainer.evaluating()(batch(0)[0])
            saved = {name: {k: v.clone() for k, v in group.items()} for name, group in trainer.state().items()}
            trainer.optimizers.release()
        channel.send('{"kind": "stop"}')
    else:
        serve_task(found, WORKLOAD, asdict(plan), channel, torch.device("cpu"), lambda: None, transport)
    state = {name: each.numpy() for name, each in found.to_module().state_dict().items()}
    return state, torch.equal(before, torch.get_rng_state())


KINDS = {
    "labels": torch.arange(4),
    "boxes": torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(1)),
    "momentum": torch.arange(36.0, dtype=torch.float64).view(1, 4, 3, 3).contiguous(memory_format=torch.channels_last),
    "step": torch.tensor(7.0),
    "nothing": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
}


def told(group, rank):
    transport = ProcessTransport(group)
    if rank == GATEWAY:
        send_tensors(KINDS, transport)
        return {}
    return {name: (each.numpy(), str(each.dtype)) for name, each in receive_tensors(transport).items()}


def test_tensors_of_any_kind_travel(processes):
    for found in processes.run(told, processes=3)[1:]:
        assert list(found) == list(KINDS)
        for name, (values, kind) in found.items():
            assert kind == str(KINDS[name].dtype) and torch.equal(torch.from_numpy(values), KINDS[name])


class Weighed(ProcessTransport):
    """Notes the values that leave this process."""

    def swap(self, outgoing, incoming):
        SENT.append(sum(flat.numel() for flat in outgoing.values()))
        return super().swap(outgoing, incoming)


SENT = []


def sent(group, rank, plan, shape):
    """The values that a process sends in a step beside sums of gradients, and how many were counted."""
    SENT.clear()
    tiles = Tiles(chain("cpu").to_module(), shape, plan, Weighed(group))
    net = tiles.training
    made = net.forward(images(SIZE, SIZE, BATCH) if rank == GATEWAY else None, BATCH)
    net.backward(None if made is None else torch.ones_like(made))
    counted = count_step_cost(
        net.schedule, net.cells, BATCH, Placement(rest=plan.rest), processes=dist.get_world_size(group)
    )
    return sum(SENT), counted.sent(rank) - counted.sent(rank, "weights")


@pytest.mark.parametrize("rest", ["gateway", "replicated"])
@pytest.mark.parametrize(("grid", "replicas", "count"), [((2, 2), 1, 4), ((2, 1), 2, 3), ((1, 2), 1, 3)])
def test_what_is_counted_is_what_leaves_a_process(processes, rest, grid, replicas, count):
    plan = TilePlan(grid, replicas, rest=rest)
    for really, counted in processes.run(sent, plan, (3, SIZE, SIZE), processes=count):
        assert really == counted


@pytest.mark.parametrize(
    ("plan", "count", "micro_batches", "stops"),
    [
        (TilePlan((2, 2), rest="replicated"), 4, 1, ()),
        (TilePlan((2, 1), replicas=2, rest="replicated"), 4, 2, ()),
        (TilePlan((1, 3), update="gateway", rest="replicated"), 2, 2, (2,)),
        (TilePlan((2, 1), rest="replicated"), 3, 1, (1, 3)),
    ],
    ids=["a tile each", "replicas, accumulated", "weights by the gateway, taken up", "one without a tile, taken up"],
)
def test_all_processes_train_the_rest_alike(processes, plan, count, micro_batches, stops):
    """They have the statistics that the gateway has taken anew, too."""
    want = untiled(micro_batches)
    found = processes.run(replicated, plan, micro_batches, stops, processes=count)
    for rank, (state, undisturbed) in enumerate(found):
        assert undisturbed and state.keys() == want.keys()
        for name, mine in state.items():
            late = plan.update == "gateway" and rank and name.startswith(("0.", "1.w", "1.b"))
            if not late:  # the gateway sends these before the next step
                torch.testing.assert_close(torch.from_numpy(mine), want[name], rtol=1e-10, atol=1e-10)
                assert (mine == found[0][0][name]).all(), name
