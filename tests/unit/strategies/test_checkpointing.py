"""Recomputation by a schedule against the plain forward pass, in values and in memory."""

import copy
from pathlib import Path

import pytest
import torch
from schedule_samples import every_schedule, every_split
from strategy_samples import HARDWARE, workload
from torch import nn

from snugfit._chain import Chain
from snugfit._training.network import NetworkTrainer
from snugfit.memory.autocast import autocast
from snugfit.memory.host_pages import HostPages
from snugfit.memory.paging import BLOCK_BYTES, BLOCKS, PageFile
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling import unit_stats
from snugfit.strategies.checkpoint.candidates import INTERMEDIATE, find_candidates, subsample
from snugfit.strategies.checkpoint.strategy import Checkpoint
from snugfit.strategies.recomputation import dynamic_program, paging
from snugfit.strategies.recomputation.dynamic_program import frontier, schedule_cost
from snugfit.strategies.recomputation.paging import DiskPages, Paging, recomputing_forward
from snugfit.strategies.recomputation.schedule import Schedule
from snugfit.strategies.recomputation.unit_costs import unit_costs


class Net(nn.Module):
    def __init__(self, dropout=0.0, momentum=0.1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4, momentum=momentum),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
        )
        self.deep = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Dropout(dropout))
        self.plain = nn.BatchNorm2d(4, track_running_stats=False)
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x):
        return self.head(self.plain(self.deep(self.body(self.stem(x)))).flatten(1))


def modules_of(chain):
    return [unit.module for unit in chain.all_units]


def pair(**options):
    """Two equal networks in float64, and a chain that shares the second one's weights."""
    torch.manual_seed(0)
    plain = Net(**options)
    other = copy.deepcopy(plain)
    chain = Chain.from_module(other, (2, 6, 6))
    return plain.double(), other.double(), chain


IMAGES = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 1, 0])


def train_once(module, forward):
    torch.manual_seed(7)
    module.train()
    loss = nn.functional.cross_entropy(forward(IMAGES), LABELS)
    loss.backward()
    return loss


SCHEDULES = [str(Schedule(parts)) for parts in every_schedule(0, 3)]


def assert_same_step(other, plain, forward):
    want, got = train_once(plain, plain), train_once(other, forward)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for (name, mine), theirs in zip(other.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)
    for (name, mine), theirs in zip(other.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0, msg=name)


@pytest.mark.parametrize("text", SCHEDULES)
@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"momentum": None}], ids=str)
def test_recomputation_changes_nothing(text, options):
    """Gradients add up over two steps; statistics of BatchNorm are updated once in each, and dropout drops the same."""
    plain, other, chain = pair(**options)
    assert len(chain.all_units) == 4
    for step in range(2):
        assert_same_step(other, plain, recomputing_forward(modules_of(chain), Schedule.parse(text)))
        assert other.stem[1].num_batches_tracked == step + 1
    assert other.stem[1].momentum == plain.stem[1].momentum


class Averaging(nn.Module):
    """Keeps a running mean of its input, as no layer of torch does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return x


def twice_with(layer):
    """Two equal networks and the units of the second, after a step in which its first two ran again."""
    plain, other = (Net().double() for _ in range(2))
    for module in (plain, other):
        module.body[1] = layer().double()
    other.load_state_dict(plain.state_dict())
    chain = Chain.from_module(other, (2, 6, 6))
    train_once(plain, plain), train_once(other, recomputing_forward(modules_of(chain), Schedule.parse("(0-1) 2-3")))
    return plain, other, chain


def test_a_layer_that_would_change_its_buffers_twice_is_refused():
    plain, other, chain = twice_with(Averaging)
    assert not torch.equal(other.body[1].mean, plain.body[1].mean)
    (reason,) = Checkpoint().validate(workload(), chain, HARDWARE)
    assert reason == "the buffer 'body.1.mean' would change twice in a step; use backprop"


@pytest.mark.parametrize("momentum", [0.1, 0.3])
def test_statistics_of_an_instance_norm_change_once(momentum):
    plain, other, chain = twice_with(lambda: nn.InstanceNorm2d(4, momentum=momentum, track_running_stats=True))
    for (name, mine), theirs in zip(other.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert other.body[1].momentum == momentum
    assert Checkpoint().validate(workload(), chain, HARDWARE) == []


@pytest.mark.parametrize("options", [{}, {"momentum": None}])
def test_batch_norms_are_accepted(options):
    assert Checkpoint().validate(workload(), Chain.from_module(Net(**options), (2, 6, 6)), HARDWARE) == []


@pytest.mark.parametrize("text", ["(((0) 1) 2) 3", "(0) (1-2) 3"])
def test_frozen_layers_stay_without_gradients(text):
    plain, other, chain = pair(dropout=0.5)
    for module in (plain, other):
        module.stem.requires_grad_(False)
        module.body[0].requires_grad_(False)
    forward = recomputing_forward(modules_of(chain), Schedule.parse(text))
    want, got = train_once(plain, plain), train_once(other, forward)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.allclose(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_low_precision_recomputes_in_low_precision():
    plain, other, chain = pair()
    plain.float(), other.float()
    gradients = []
    recomputing = recomputing_forward(modules_of(chain), Schedule.parse("((0) 1) 2 3"))
    for module, forward in ((plain, plain), (other, recomputing)):
        module.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(forward(IMAGES.float()), LABELS)
        loss.backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.equal(mine, theirs)


def test_evaluation_is_the_networks_own():
    plain, other, chain = pair(dropout=0.5)
    other.eval(), plain.eval()
    forward = recomputing_forward(modules_of(chain), Schedule.parse("((0) 1) 2-3"))
    assert torch.equal(forward(IMAGES), plain(IMAGES))
    before = copy.deepcopy(other.state_dict())
    with torch.no_grad():
        forward(IMAGES)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("text", ["(0) (1) (2) 3", "(((0) 1) 2) 3"])
def test_gradients_applied_in_the_backward_pass_are_the_same(text):
    """Weights of later units have already changed when earlier ones are recomputed."""
    plain, other, chain = pair()

    def apply(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for module in (plain, other):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(apply)
    for _ in range(2):
        train_once(plain, plain)
        train_once(other, recomputing_forward(modules_of(chain), Schedule.parse(text)))
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


BATCH = 16


@pytest.fixture(scope="module")
def deep():
    """Units whose feature maps shrink and whose weights grow, on the meta device."""
    layers, wide = [], 4
    for stride in (*(1,) * 9, 2, 1, 2):
        layers += [nn.Conv2d(wide, wide * stride, 3, stride, 1), nn.BatchNorm2d(wide * stride), nn.ReLU()]
        wide *= stride
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(wide * 16, 10))
    return Chain.from_module(network.to("meta"), (4, 16, 16))


def true_peak(chain, schedule, *, hold, pages=None):
    """Peak tensor bytes of a trainer's step, without weights, optimizer state, held gradients and images."""
    clone = copy.deepcopy(chain)
    module = clone.to_module()
    forward = recomputing_forward(modules_of(clone), schedule, pages or DiskPages(PageFile(Path())))
    trainer = NetworkTrainer(module, forward, workload(), 2 if hold else 1)

    def step():
        for update in (False, True) if hold else (True,):
            images = torch.empty(BATCH, *chain.input_shape, device="meta")
            trainer.step(images, torch.empty(BATCH, dtype=torch.long, device="meta"), 1.0, update)

    parameters = 4 * chain.parameters * (2 if hold else 1)
    buffers = sum(unit.weight_bytes for unit in chain.all_units)
    peak = tensor_peak_bytes(step, trainer.modules, repeats=2)
    return peak - parameters - buffers - 4 * BATCH * torch.Size(chain.input_shape).numel()


@pytest.mark.parametrize("hold", [False, True])
def test_a_step_takes_the_memory_that_the_dynamic_program_predicts(deep, hold):
    """Within 2 %: labels and loss belong to no unit. Gradients that are held add nothing but themselves."""
    costs = unit_costs(deep, unit_stats(deep), BATCH)
    schedules = subsample(frontier(costs), costs, 4)
    assert len(schedules) > 4 and any("((" in str(schedule) for schedule in schedules)
    for schedule in schedules:
        _, predicted = schedule_cost(schedule, costs)
        assert 0.98 * predicted < true_peak(deep, schedule, hold=hold) < 1.02 * predicted, str(schedule)


def test_a_paging_step_takes_the_memory_that_the_dynamic_program_predicts(deep, monkeypatch):
    """Within 2 %, with tensors of every size on disk and a small file."""
    assert dynamic_program.PAGE_FILE_BYTES == BLOCKS * BLOCK_BYTES
    for module, name in ((dynamic_program, "PAGE_FILE_BYTES"), (paging, "BLOCK_BYTES")):
        monkeypatch.setattr(module, name, 800 if module is dynamic_program else 100)
    monkeypatch.setattr(paging, "SMALLEST_BYTES", 1)
    costs = unit_costs(deep, unit_stats(deep), BATCH, paging=Paging(1e9))
    schedules = [each for each in subsample(frontier(costs, paging=True), costs, 6) if each.paged]
    schedules += [Schedule.parse(text) for text in (f"[0-{len(costs) - 1}]", "[0-3 (4-6)] (7) 8-12")]
    assert len(schedules) > 4
    for schedule in schedules:
        _, predicted = schedule_cost(schedule, costs)
        true = true_peak(deep, schedule, hold=False)
        assert 0.98 * predicted < true < 1.02 * predicted, str(schedule)


def test_a_step_that_pages_to_host_memory_takes_one_feature_map_more_at_most(deep, monkeypatch):
    """The dynamic programme leaves out what is copied while the next unit begins."""
    monkeypatch.setattr(dynamic_program, "PAGE_FILE_BYTES", 0)
    monkeypatch.setattr(paging, "SMALLEST_BYTES", 1)
    costs = unit_costs(deep, unit_stats(deep), BATCH, paging=Paging(1e9, HostPages))
    schedules = [each for each in subsample(frontier(costs, paging=True), costs, 6) if each.paged]
    schedules += [Schedule.parse(text) for text in (f"[0-{len(costs) - 1}]", "[0-3 (4-6)] (7) 8-12")]
    largest = max(cost.output_bytes for cost in costs)
    for schedule in schedules:
        _, predicted = schedule_cost(schedule, costs)
        true = true_peak(deep, schedule, hold=False, pages=HostPages())
        assert 0.98 * predicted < true < 1.02 * predicted + largest, str(schedule)


def test_paging_takes_less_memory_than_recomputation_alone(deep, monkeypatch):
    monkeypatch.setattr(dynamic_program, "PAGE_FILE_BYTES", 0)
    costs = unit_costs(deep, unit_stats(deep), BATCH, paging=Paging(1e9))
    least, paged = (schedule_cost(frontier(costs, paging=on)[0], costs)[1] for on in (False, True))
    assert paged < 0.9 * least


def test_the_least_memory_is_below_that_of_any_split(deep):
    costs = unit_costs(deep, unit_stats(deep), BATCH)
    least = min(every_split(len(costs)), key=lambda split: schedule_cost(split, costs)[1])
    best = frontier(costs)[0]
    assert schedule_cost(best, costs)[1] < schedule_cost(least, costs)[1]
    assert true_peak(deep, best, hold=False) < true_peak(deep, least, hold=False)


def test_less_is_paged_to_a_slower_disk(deep, monkeypatch):
    """In the least memory of recomputation alone: a fast disk saves time, and one that never pays is not used."""
    monkeypatch.setattr(dynamic_program, "PAGE_FILE_BYTES", 0)
    found = []
    for speed in (float("inf"), 1e9, 1e3):
        costs = unit_costs(deep, unit_stats(deep), BATCH, paging=Paging(speed))
        alone, limit = schedule_cost(frontier(costs)[0], costs)
        within = [each for each in frontier(costs, paging=True) if schedule_cost(each, costs)[1] <= limit]
        best = min(within, key=lambda each: schedule_cost(each, costs)[0])
        found.append((schedule_cost(best, costs)[0], best.paged))
    seconds, paged = zip(*found, strict=True)
    assert seconds[0] < seconds[1] <= seconds[2] == alone
    assert paged[0] and not paged[2]


def test_candidates_begin_without_recomputation_and_end_in_least_memory(deep):
    candidates = find_candidates(deep, unit_stats(deep), workload(batch_size=BATCH))
    assert not candidates[0].schedule.recomputes and candidates[0].seconds == 1 and candidates[0].probe == "network"
    seconds = [each.seconds for each in candidates[:-1]]
    assert seconds == sorted(seconds)
    assert candidates[-1].sample_bytes == min(each.sample_bytes for each in candidates)
    ends, smaller_batches = 2, 2
    assert len({each.probe for each in candidates}) == len(candidates) <= ends + INTERMEDIATE + smaller_batches


def test_a_recomputed_step_in_bfloat16_runs_on_the_meta_device():
    net = Net().to("meta")
    forward = recomputing_forward(modules_of(Chain.from_module(net, (2, 6, 6))), Schedule.parse("((0) 1) 2-3"))
    with autocast("meta"):
        loss = forward(torch.empty(5, 2, 6, 6, device="meta")).sum()
    loss.backward()
    assert net.stem[0].bias.grad.shape == (4,)
