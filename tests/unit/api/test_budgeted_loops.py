"""A memory budget for a loop of one's own: the same weights as a plain loop, inside an enforced limit."""

import copy
import resource
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings
from snugfit._engine.loop_trainer import LoopNetwork, TrialSteps, parts_of
from snugfit.errors import BudgetExceededError, CheckpointError, ModelError, UnknownNameError, UsageError
from snugfit.strategies.recomputation.schedule import Schedule

SETTINGS = {"lr": 0.05, "weight_decay": 1e-3}


def small(*extra, dtype=torch.float64):
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 4, 3, padding=1), *extra, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(256, 5)).to(dtype)


def batches(*sizes, dtype=torch.float64):
    torch.manual_seed(1)
    return [(torch.randn(size, 1, 8, 8, dtype=dtype), torch.randint(5, (size,))) for size in sizes]


def plain_loop(model, data, optimizer, part=None):
    """Train by torch alone; with ``part``, on gradients accumulated over parts of that many images."""
    kinds = {"sgd": lambda w: torch.optim.SGD(w, momentum=0.9, **SETTINGS), "adamw": adamw}
    updates = kinds[optimizer](model.parameters())
    for images, targets in data:
        updates.zero_grad()
        for some, truths in zip(images.split(part or len(images)), targets.split(part or len(images)), strict=True):
            (F.cross_entropy(model(some), truths, reduction="sum") / len(images)).backward()
        updates.step()


def adamw(weights):
    return torch.optim.AdamW(weights, **SETTINGS)


def assert_same(model, other):
    for (name, tensor), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_weights_are_those_of_a_plain_loop(optimizer):
    model, data = small(), batches(8, 8, 8, 5)  # a last smaller batch
    other = copy.deepcopy(model)
    losses = []
    with snugfit.fit(
        model, F.cross_entropy, memory="1GB", batch_size=8, example=data[0], optimizer=optimizer, **SETTINGS
    ) as step:
        for images, targets in data:
            expected = F.cross_entropy(model(images), targets).item()
            losses.append((step(images, targets).item(), expected))
    plain_loop(other, data, optimizer)
    assert_same(model, other)
    assert all(found == pytest.approx(expected, abs=1e-10) for found, expected in losses)
    assert step.record.micro_batches == 1 and step.record.steps == 4


@pytest.mark.parametrize("schedule", ["0 1 2", "(0 1) 2"])
def test_micro_batches_and_recomputation_give_the_gradients_of_the_whole_batch(schedule):
    model, data = small(), batches(8, 8, 7)
    other = copy.deepcopy(model)
    trainer = network_of(model).trainer(Schedule.parse(schedule), True)
    for images, targets in data:
        trainer.step(parts_of(images, targets, (3, 3, len(images) - 6)))
    plain_loop(other, data, "sgd")
    assert_same(model, other)


def test_batch_norms_normalise_by_the_images_of_a_micro_batch():
    model, data = small(nn.BatchNorm2d(4)), batches(8, 8)
    other = copy.deepcopy(model)
    trainer = network_of(model).trainer(Schedule.parse("(0) 1 2"), True)
    for images, targets in data:
        trainer.step(parts_of(images, targets, (4, 4)))
    plain_loop(other, data, "sgd", part=4)
    assert_same(model, other)


def network_of(model):
    chain = Chain.from_any_module(model, (1, 8, 8))
    return LoopNetwork(model, chain, F.cross_entropy, OptimizerSettings("sgd", **SETTINGS))


@pytest.mark.parametrize("holds", [False, True])
def test_trials_change_nothing_even_where_gradients_are_infinite(holds):
    model = small(nn.BatchNorm2d(4))
    before = copy.deepcopy(model.state_dict())
    trials = TrialSteps(network_of(model))
    trainer = trials.trainer(Schedule.parse("0 (1) 2"), holds)
    ((images, targets),) = batches(4)
    trainer.step(parts_of(images / 0, targets, (2, 2) if holds else (4,)))
    assert trainer.optimizers.state(), "it took the memory of a real step"
    trials.clear()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    F.cross_entropy(model(images), targets).backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "no hook is left"


def test_planning_draws_nothing_and_keeps_modes():
    model, data = small(nn.Dropout()), batches(4)
    model[1].eval()
    before = torch.get_rng_state()
    with snugfit.fit(model, F.cross_entropy, memory="1GB", batch_size=4, example=data[0]):
        assert torch.equal(torch.get_rng_state(), before)
        assert model.training and not model[1].training


def test_the_learning_rate_follows_the_caller_and_the_state_is_restored():
    model, data = small(), batches(4, 4)
    start = copy.deepcopy(model.state_dict())
    options = {"memory": "1GB", "batch_size": 4, "example": data[0]}
    with snugfit.fit(model, F.cross_entropy, optimizer="adamw", **options) as step:
        assert step.lr == 0.001
        step.lr = 0.0
        step(*data[0])
        assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
        state = copy.deepcopy(step.state_dict())
    with snugfit.fit(model, F.cross_entropy, optimizer="adamw", **options) as step:
        step.load_state_dict(state)
        assert step.state_dict()["0.weight/step"] == 1
        with pytest.raises(CheckpointError, match="belongs to no parameter"):
            step.load_state_dict({"other/step": torch.zeros(())})


def test_targets_may_be_anything_that_the_loss_takes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))  # a map per image
    images, targets = torch.randn(6, 1, 8, 8), torch.randn(6, 1, 8, 8)
    with snugfit.fit(model, F.mse_loss, memory="1GB", batch_size=6, example=(images[:1], targets[:1]), lr=0.1) as step:
        losses = [step(images, targets).item() for _ in range(5)]
    assert losses[-1] < losses[0]


class Branching(nn.Module):
    """Cannot be divided into units."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(144, 5)

    def forward(self, images):
        features = self.first(images)
        return self.last((features if features.sum() > 0 else -features).flatten(1))


def test_a_network_that_cannot_be_divided_is_trained_as_a_whole():
    model, data = Branching(), batches(6, 6, dtype=torch.float32)
    other = copy.deepcopy(model)
    with snugfit.fit(model, F.cross_entropy, memory="1GB", batch_size=6, example=data[0], **SETTINGS) as step:
        for images, targets in data:
            step(images, targets)
    plain_loop(other, data, "sgd")
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"memory": "much"}, UsageError, "--memory must be"),
        ({"batch_size": 0}, UsageError, "--batch-size must be"),
        ({"optimizer": "schedulefree"}, UnknownNameError, "Known: adamw, sgd"),
        ({"optimizer": torch.optim.SGD(small().parameters())}, UsageError, r"not SGD: .*memory\.MemoryLimit"),
        ({"lr": -1.0}, UsageError, "--lr must be"),
        ({"epochs": 3}, UnknownNameError, "unknown option 'epochs'"),
        ({"example": torch.zeros(4, 1, 8, 8)}, UsageError, "must be a pair of tensors"),
        ({"example": (torch.zeros(4, 1, 8, 8), torch.zeros(3))}, UsageError, "4 images and 3 targets"),
        ({"example": (torch.zeros(0, 1, 8, 8), torch.zeros(0))}, UsageError, "at least one"),
        ({"example": (torch.zeros(4, 2, 8, 8), torch.zeros(4))}, ModelError, "does not run"),
        ({"loss_function": lambda outputs, targets: outputs.sum()}, UsageError, "not the mean over the images"),
        ({"model": nn.Flatten()}, ModelError, "no parameters"),
        ({"model": small(dtype=torch.float16)}, UsageError, "weights in float16 learn next to nothing"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:30],
)
def test_bad_calls_are_refused_before_anything_is_limited(changed, error, text):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    (example,) = batches(4, dtype=torch.float32)
    given = {"model": small(dtype=torch.float32), "loss_function": F.cross_entropy, "memory": "1GB"}
    with pytest.raises(error, match=text), snugfit.fit(**{**given, "example": example, **changed}):
        pass
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(
    ("images", "targets", "text"),
    [
        (torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.int64), "1 to batch_size=4"),
        (torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64), "got 0 images"),
        (torch.zeros(4, 1, 9, 9), torch.zeros(4, dtype=torch.int64), "of shapes"),
        (torch.zeros(4, 1, 8, 8), torch.zeros(3, dtype=torch.int64), "4 images and 3 targets"),
    ],
)
def test_a_step_refuses_what_it_was_not_planned_for(images, targets, text):
    (example,) = batches(4, dtype=torch.float32)
    model = small(dtype=torch.float32)
    with snugfit.fit(model, F.cross_entropy, memory="1GB", batch_size=4, example=example) as step:
        with pytest.raises(UsageError, match=text):
            step(images, targets)
        step(*example)


def test_a_step_outside_of_its_context_is_refused():
    (example,) = batches(4)
    with snugfit.fit(small(), F.cross_entropy, memory="1GB", batch_size=4, example=example) as step:
        step(*example)
    with pytest.raises(UsageError, match="after the context"):
        step(*example)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_an_exception_in_the_loop_restores_the_limit_and_the_model():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    (example,) = batches(4)
    model = small()

    def loop():
        with snugfit.fit(model, F.cross_entropy, memory="1GB", batch_size=4, example=example) as step:
            step(*example)
            assert resource.getrlimit(resource.RLIMIT_DATA) != before
            raise KeyError("of the loop")

    with pytest.raises(KeyError, match="of the loop"):
        loop()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    F.cross_entropy(model(example[0]), example[1]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "gradients are held as before"


def deep():
    """Images (B, 3, 32, 32) to logits (B, 10); 12 MB of feature maps in a batch of 64 for each of its layers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


def trained(memory, optimizer="adamw", keep=0, images=64, side=32):
    """The record of some steps in a budget, the last one smaller; ``keep`` bytes are allocated after each."""
    import torch

    import snugfit

    example = torch.randn(images, 3, side, side), torch.randint(10, (images,))
    loss, kept = torch.nn.functional.cross_entropy, []
    options = {"memory": memory, "batch_size": images, "optimizer": optimizer}
    with snugfit.fit(deep(), loss, example=example, **options) as step:
        for count in (images, images, images, images * 2 // 3):
            step(example[0][:count], example[1][:count])
            kept.append(torch.ones(keep, dtype=torch.uint8))
    return vars(step.record)


def budgets():
    import snugfit

    snugfit.prepare_process(1)
    return [trained("300MB"), trained("40MB"), trained("30MB", images=2, side=128)]


def smallest():
    """The smallest budget that an error names does, and the budget before it was too small."""
    import snugfit
    from snugfit.errors import InfeasibleBudgetError

    snugfit.prepare_process(1)
    try:
        trained("8MB")
    except InfeasibleBudgetError as error:
        return trained(error.smallest_bytes)


def named():
    """What an error names as the smallest budget, for the budget in the environment; 0 if that is enough."""
    import os

    import torch
    from torch import nn

    import snugfit
    from snugfit.errors import InfeasibleBudgetError

    snugfit.prepare_process(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 10))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    drawn, example = torch.get_rng_state(), (torch.ones(128, 3, 32, 32), torch.arange(128) % 10)
    options = {"memory": int(os.environ["BUDGET"]), "batch_size": 128, "example": example}
    try:
        with snugfit.fit(model, nn.functional.cross_entropy, **options) as step:
            step(*example)
            assert step.record.measured_bytes <= step.record.predicted_bytes <= step.record.budget_bytes
            return 0
    except InfeasibleBudgetError as error:
        assert all(each.grad is None and not each._post_accumulate_grad_hooks for each in model.parameters())
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), drawn)
        return error.smallest_bytes


def refused():
    """Tensors like the example, which is repeated, that are alive while an error is handled; and of a large batch."""
    import gc

    import torch

    import snugfit
    from snugfit.errors import BudgetExceededError, InfeasibleBudgetError

    snugfit.prepare_process(1)
    example, loss = (torch.randn(2, 3, 32, 32), torch.tensor([0, 1])), torch.nn.functional.cross_entropy
    try:
        with snugfit.fit(deep(), loss, example=example, memory="8MB", batch_size=64):
            pass
    except InfeasibleBudgetError:
        tensors = [each for each in gc.get_objects() if torch.is_tensor(each) and not each.is_meta]
        alive = sum(each.shape[1:] == (3, 32, 32) for each in tensors)
    try:
        with snugfit.fit(deep(), loss, example=example, memory="40MB", batch_size=100_000):
            pass
    except BudgetExceededError as error:
        return {"alive": alive, "message": str(error)}


def kept():
    """A loop that keeps memory is refused it in a step, and the process lives on."""
    import resource

    import snugfit
    from snugfit.errors import BudgetExceededError
    from snugfit.memory import is_out_of_memory

    snugfit.prepare_process(1)
    before, messages = resource.getrlimit(resource.RLIMIT_DATA), []
    for size in (5_000_000, 200_000_000):
        try:
            trained("30MB", keep=size)
        except BudgetExceededError as error:
            messages.append(str(error))
        except (RuntimeError, MemoryError) as error:
            messages.append("the loop's own" if is_out_of_memory(error) else str(error))
    restored = resource.getrlimit(resource.RLIMIT_DATA) == before
    return {"messages": messages, "restored": restored, "again": trained("300MB", images=6)["steps"]}


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_measured_is_at_most_predicted_which_is_at_most_the_budget(fresh_process):
    found = fresh_process(budgets, helpers=(deep, trained))["budgets"]
    for record in found:
        assert record["enforced"] and record["steps"] == 4
        assert 0 < record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"], record
    whole, parts, recomputed = found
    assert whole["micro_batches"] == 1 < parts["micro_batches"]
    assert recomputed["recomputation"], "batch norms need two images, which do not fit without recomputation"


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_an_error_keeps_no_batch_alive_and_a_batch_above_the_budget_is_told(fresh_process):
    found = fresh_process(refused, helpers=(deep,))["refused"]
    assert found["alive"] == 1
    assert "an example of 100000 images was refused memory within memory=40.0 MB." in found["message"]


def keeping():
    """Page faults of the first step and of a later one, and what is in memory after it, by budget and option."""
    import resource

    import torch

    import snugfit
    from snugfit._core.machine_memory import private_bytes

    def faults(step, images, targets):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(images, targets)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def trained(memory, keep_freed=None):
        example = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
        options = {"memory": memory, "batch_size": 32, "example": example, "keep_freed": keep_freed}
        with snugfit.fit(deep(), torch.nn.functional.cross_entropy, **options) as step:
            first = faults(step, *example)
            for _ in range(4):
                step(*example)
            later, between = faults(step, *example), private_bytes() - resting
            return {"first": first, "later": later, "between": between, **vars(step.plan), **vars(step.record)}

    snugfit.prepare_process(1)
    resting = private_bytes()
    ample = trained("600MB")
    least = ample["predicted_bytes"] - ample["kept_bytes"]
    return [ample, trained(int(least * 2.2)), trained(int(least * 1.05)), trained("600MB", keep_freed=False)]


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_freed_memory_is_kept_in_a_step_and_between_steps_where_another_one_would_fit(fresh_process):
    ample, some, tight, returned = records = fresh_process(keeping, helpers=(deep,))["keeping"]
    for record in records:
        assert record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"], record
        assert record["later"] < record["first"] * 0.8, record
    assert [record["kept_between"] for record in records] == [True, False, False, False]
    assert ample["kept_bytes"] == pytest.approx(some["kept_bytes"], rel=0.1)
    assert tight["kept_bytes"] < some["kept_bytes"] / 2
    for record in (some, tight, returned):
        assert record["between"] < ample["between"] / 2


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_the_smallest_budget_of_the_error_is_enough(fresh_process):
    record = fresh_process(smallest, helpers=(deep, trained))["smallest"]
    assert record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_three_mb_less_than_the_smallest_budget_is_refused_and_names_the_same(fresh_process, monkeypatch):
    def answer(budget):
        monkeypatch.setenv("BUDGET", str(budget))
        return fresh_process(named)["named"]

    smallest = answer(3_000_000)
    assert answer(smallest) == 0, "it is enough"
    assert 0 < answer(smallest - 3_000_000) == pytest.approx(smallest, abs=1_000_000)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_a_step_without_memory_is_an_error_that_the_process_survives(fresh_process):
    found = fresh_process(kept, helpers=(deep, trained))["kept"]
    step, loop = found["messages"]
    assert "was refused memory within memory=30.0 MB" in step and loop == "the loop's own"
    assert found["restored"] and found["again"] == 4
    assert issubclass(BudgetExceededError, snugfit.errors.SnugfitError)
