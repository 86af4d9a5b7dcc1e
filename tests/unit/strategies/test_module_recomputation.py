"""Modules of networks that cannot be divided run again: to the same bits, with the memory that was expected, or not."""

import copy
import random

import numpy as np
import pytest
import torch
from block_nets import NETWORKS, Around, Block, OnData, Tied, Twice, TwoInputs, made_by
from strategy_samples import HARDWARE, workload
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from snugfit._chain import Chain
from snugfit._core.inputs import Input
from snugfit._engine.loop_plan import on_meta
from snugfit._training.network import NetworkTrainer
from snugfit.errors import ModelError, UsageError
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling import unit_stats
from snugfit.strategies.checkpoint.candidates import find_candidates
from snugfit.strategies.checkpoint.strategy import Checkpoint
from snugfit.strategies.memory_estimates import place_synthetic_weights
from snugfit.strategies.recomputation.module_costs import network_calls, reasons_against_modules
from snugfit.strategies.recomputation.paging import recomputing_forward
from snugfit.strategies.recomputation.schedule import ModuleSchedule, Schedule, parse_schedule

SHAPE = (1, 12, 12)
PLAIN = ModuleSchedule(())
SEVERAL = (Input((2, 6, 6)), Input((3,)))


def chain_of(network, shape=SHAPE):
    return Chain.from_any_module(on_meta(network), shape)


def trained(network, schedule, micro_batches=1, shape=SHAPE):
    """Weights, statistics and random state after three steps."""
    own = copy.deepcopy(network)
    trainer = NetworkTrainer(own, recomputing_forward([own], schedule), workload(), micro_batches)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for part in range(micro_batches):
            images, labels = torch.randn(4, *shape, generator=generator), torch.randint(2, (4,), generator=generator)
            trainer.step(images, labels, 1 / micro_batches, update=part == micro_batches - 1)
    return {**own.state_dict(), "random state": torch.get_rng_state()}


def differences(network, schedule, micro_batches=1, shape=SHAPE):
    plain, other = (trained(network, each, micro_batches, shape) for each in (PLAIN, schedule))
    return [name for name, tensor in plain.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("make", NETWORKS)
def test_every_schedule_gives_the_same_bits(make, micro_batches):
    network = made_by(make)
    found = [each for each, _, _ in network_calls(chain_of(network)).schedules()]
    assert len(found) > 3 and found[-1] == PLAIN
    for schedule in (*found[:-1:4], ModuleSchedule(("blocks.1", "blocks.0", "blocks.2.drop", "fc"))):
        assert differences(network, schedule, micro_batches) == [], str(schedule)


def test_several_inputs_give_the_same_bits():
    network = made_by(TwoInputs)
    chain = Chain.from_any_module(network, (1, 1, 75), inputs=SEVERAL)
    assert chain.undivided
    found = network_calls(Chain.from_any_module(on_meta(network), (1, 1, 75), inputs=SEVERAL)).schedules()
    assert str(found[0][0]) == "modules (blocks.0-2)"
    assert differences(chain.head.module, found[0][0], shape=(1, 1, 75)) == []


def test_the_steps_are_those_of_plain_torch():
    network = made_by(Twice).double()
    other = copy.deepcopy(network)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    forward = recomputing_forward([network], ModuleSchedule(("blocks.0", "blocks.1")))
    for run in (forward, other):
        torch.manual_seed(1)
        for _ in range(2):
            images = torch.linspace(-1, 1, 4 * 144).reshape(4, *SHAPE)
            F.cross_entropy(run(images), torch.tensor([1, 2, 3, 4])).backward()
    optimizer.step()
    for (name, mine), theirs in zip(network.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("make", [Tied, Twice])
def test_the_expected_bytes_are_those_of_a_counted_step(make):
    network, images = made_by(make), 64
    counted, expected = [], []
    for schedule, _, size in network_calls(chain_of(network)).schedules():
        own = on_meta(network)
        place_synthetic_weights(own, "meta")
        trainer = NetworkTrainer(own, recomputing_forward([own], schedule), workload())
        trainer.train_mode()
        batch = torch.empty(images, *SHAPE, device="meta"), torch.zeros(images, dtype=torch.int64, device="meta")
        counted.append(tensor_peak_bytes(lambda batch=batch, trainer=trainer: trainer.step(*batch), [own], 2))
        expected.append(images * size)
    assert counted == sorted(counted) and counted[0] < 0.6 * counted[-1]
    saved, promised = ([sizes[-1] - each for each in sizes[:-1]] for sizes in (counted, expected))
    assert saved == pytest.approx(promised, rel=0.08)


def test_candidates_lead_from_the_plain_step_to_the_least_memory():
    chain = chain_of(made_by(lambda: Tied(blocks=8)))
    found = find_candidates(chain, unit_stats(chain), workload())
    assert not found[0].schedule.recomputes and found[0].probe == "network" and found[0].seconds == 1
    assert str(found[-1].schedule) == "modules (blocks.0-7)" and 3 < len(found) < 10
    assert found[-1].batch_bytes < 0.5 * found[0].batch_bytes
    assert all(1 <= each.seconds < 1.5 for each in found)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)


class Refused(nn.Module):
    """Keeps more than its input and its output."""

    def forward(self, x):
        return (x.sin() * x.cos() * self.factor(x)).sin()

    def factor(self, x):
        return 1.0


class Counts(Refused):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def factor(self, x):
        self.count += 1
        return self.count


class Averages(Counts):
    """As the code books of many quantised networks, which autograd does not see."""

    def factor(self, x):
        self.count.data.mul_(0.9).add_(0.1)
        return self.count.clone()


class Normalises(Refused):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def factor(self, x):
        return F.batch_norm(x, self.mean, self.var, training=True)


class Renormalises(nn.BatchNorm2d):
    """Reads statistics that it changes then."""

    def forward(self, x):
        y = (x - self.running_mean[:, None, None]).sin().cos().sin()
        return y + super().forward(x)


class Attribute(Refused):
    calls = 0

    def factor(self, x):
        self.calls += 1
        return float(self.calls)


class Draws(Refused):
    def factor(self, x):
        return 1 + random.random()


class DrawsByNumpy(Refused):
    def factor(self, x):
        return 1 + np.random.rand()


class Overwrites(Refused):
    def forward(self, x):
        y = super().forward(x)
        x.data.mul_(0.5)
        return y


class OverwrittenLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Refused()

    def forward(self, x):
        x = x * 1
        y = self.inner(x.detach())
        x.data.mul_(0.5)
        return x + y


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Module(), Block()
        self.inner.forward = lambda maps: maps[0].sin() * maps[-1].cos()

    def forward(self, x):
        maps = [x]
        y = self.inner(maps)
        maps.append(2 * x)
        return y


def hooked():
    made = nn.Sequential(nn.GELU(), nn.Tanh(), nn.GELU())
    made[1].register_forward_hook(lambda module, given, output: output * 2)
    return made


def spectral():
    return nn.Sequential(nn.GELU(), spectral_norm(nn.Conv2d(8, 8, 3, padding=1)), nn.Tanh(), nn.GELU())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.GRU(12, 12, num_layers=2, dropout=0.5)

    def forward(self, x):
        return self.rows(x.flatten(1, 2))[0].reshape(x.shape).sin().cos()


WRITES = "reads weights, buffers or inputs that the forward pass overwrites"
REFUSED = {
    Counts: WRITES,
    Averages: WRITES,
    Normalises: WRITES,
    lambda: Renormalises(8): WRITES,
    Attribute: "has attributes that the forward pass changes",
    Draws: "draws random numbers of Python or numpy",
    DrawsByNumpy: "draws random numbers of Python or numpy",
    Overwrites: WRITES,
    hooked: "has a layer with a hook, or with a parametrization that has buffers",
    spectral: WRITES,
    Recurrent: "has a recurrent layer with dropout",
}
DIFFERS = [make for make in REFUSED if make not in (hooked, Recurrent)]
"""Recomputation changes what these compute; a hook may do anything, and only a GPU has a state of such dropout."""


@pytest.mark.parametrize("make", REFUSED)
def test_a_module_that_may_compute_something_else_does_not_run_again(make):
    torch.manual_seed(0)
    calls = network_calls(chain_of(Around(make())))
    (reason,) = {call.reason for call in calls.calls if call.name == "layer"}
    assert reason.startswith(REFUSED[make])
    assert calls.failure == "" and {"blocks.0", "blocks.1"} <= calls.sizes.keys()
    assert "layer" not in calls.sizes


@pytest.mark.parametrize("make", DIFFERS)
def test_it_would_compute_something_else(make):
    torch.manual_seed(0)
    assert differences(Around(make()), ModuleSchedule(("layer",)))


@pytest.mark.parametrize(("make", "reason"), [(OverwrittenLater, WRITES), (Lists, "takes something else than tensors")])
def test_what_happens_to_inputs_after_a_call_counts(make, reason):
    calls = network_calls(chain_of(Around(make())))
    (found,) = {call.reason for call in calls.calls if call.name == "layer.inner"}
    assert found.startswith(reason) and "blocks.0" in calls.sizes


class Activated(nn.BatchNorm2d):
    """A batch norm with a forward pass of its own, as timm's."""

    def forward(self, x):
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        own = self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum
        return F.gelu(F.batch_norm(x, *own)).sin()


def test_batch_norms_of_other_classes_run_again():
    network = made_by(lambda: Around(Activated(8)))
    assert "layer" in network_calls(chain_of(network)).sizes
    assert differences(network, ModuleSchedule(("layer", "blocks.1"))) == []


def test_a_frozen_batch_norm_and_one_in_a_mode_of_its_own_run_again():
    network = made_by(OnData)
    network.blocks[0].norms.requires_grad_(False)
    assert "blocks.0" in network_calls(chain_of(network)).sizes
    assert differences(network, ModuleSchedule(("blocks.0", "blocks.2"))) == []


def test_low_precision_recomputes_in_low_precision():
    network, gradients = made_by(Twice), []
    for schedule in (PLAIN, ModuleSchedule(("blocks.0", "blocks.2"))):
        own = copy.deepcopy(network)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = recomputing_forward([own], schedule)(torch.ones(4, *SHAPE)).square().mean()
        loss.backward()
        gradients.append([parameter.grad for parameter in own.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


def test_modules_are_left_as_they_were():
    network = made_by(Twice)
    network.blocks[0].forward = own = network.blocks[0].forward
    forward = recomputing_forward([network], ModuleSchedule(("blocks.0", "blocks.1")))
    forward(torch.ones(2, *SHAPE)).sum().backward()
    with pytest.raises(RuntimeError):
        forward(torch.ones(2, 3, 12, 12))
    assert network.blocks[0].forward is own and "forward" not in vars(network.blocks[1])


def test_watching_changes_nothing():
    network, before = made_by(Tied), torch.get_rng_state()
    torch.manual_seed(3)
    random.seed(3)
    chain, before = Chain.from_any_module(network, SHAPE), (torch.get_rng_state(), random.getstate())
    state = copy.deepcopy(network.state_dict())
    network_calls(chain)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    "names",
    [
        ("blocks.0", "blocks.1", "blocks.2"),
        ("0", "1", "3"),
        ("blocks.9", "blocks.10", "blocks.12", "other"),
        ("a.01", "a.02"),
        ("a.0.b", "a.1.b"),
        ("a.0", "b.1", "a.1"),
        ("_", "a2"),
    ],
)
def test_a_schedule_of_modules_prints_and_parses(names):
    schedule = ModuleSchedule(names)
    assert parse_schedule(str(schedule)) == schedule and schedule.recomputes and not schedule.paged


def test_rows_of_modules_are_printed_by_their_ends():
    names = [f"encoder.{number}" for number in range(9, 12)]
    assert str(ModuleSchedule(("stem", *names, "head"))) == "modules (stem encoder.9-11 head)"
    assert isinstance(parse_schedule("(0-1) 2"), Schedule)


@pytest.mark.parametrize(
    "text", ["modules", "modules ()", "modules (a", "modules (a) b", "modules (a-b)", "modules (a b-)"]
)
def test_texts_that_are_no_schedule_are_refused(text):
    with pytest.raises(UsageError, match="is no schedule; one looks like modules"):
        parse_schedule(text)


def test_a_schedule_of_another_network_is_refused():
    with pytest.raises(ModelError, match=r"Tied has no module 'blocks\.7', which the plan computes again"):
        recomputing_forward([made_by(Tied)], parse_schedule("modules (blocks.2 blocks.7)"))


class Flat(Twice):
    def body(self, x):
        return self.stem(x.mean(1, keepdim=True))


class Gradients(OnData):
    def body(self, x):
        own = x.detach().requires_grad_()
        with torch.enable_grad():
            return super().body(x) + torch.autograd.grad(own.square().sum(), own)[0]


def test_a_network_without_such_modules_is_refused_with_the_reason():
    one = made_by(lambda: Around(Counts()))
    one.blocks = nn.ModuleList([nn.Identity(), nn.Identity()])
    for network, why in (
        (one, f"'layer' {WRITES}"),
        (made_by(Flat), "none of them saves much besides its inputs and outputs"),
        (made_by(Gradients), "its forward pass computes gradients"),
    ):
        (reason,) = reasons_against_modules(chain_of(network))
        name = type(network).__name__
        assert reason.startswith(f"needs units, and {name} cannot be divided: "), reason
        assert reason.endswith(f"; nor can any of its modules run again: {why}")


def test_what_needs_units_is_refused_by_name():
    chain = chain_of(made_by(Tied))
    assert Checkpoint().validate(workload(), chain, HARDWARE) == []
    (reason,) = Checkpoint().validate(workload(activations="paged"), chain, HARDWARE)
    assert reason.startswith("--activations paged needs units, and Tied cannot be divided: tied weights")
    (reason,) = Checkpoint().validate(workload(weight_dtype="bfloat16"), chain, HARDWARE)
    assert reason.startswith("--weight-dtype bfloat16 rounds weights that layers alone read, which is unknown: tied")
