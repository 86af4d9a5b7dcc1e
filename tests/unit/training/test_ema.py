"""Moving averages of weights: those of torch, in place for evaluation only, exact to resume; notices of short runs."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_samples import make_workload

from snugfit._core.workload import OptimizerSettings
from snugfit._training.ema import first_step_notice
from snugfit._training.network import NetworkTrainer
from snugfit.errors import CheckpointError, UsageError
from snugfit.memory.tensors import tensor_peak_bytes

SGD = OptimizerSettings("sgd", lr=0.1, momentum=0.9, weight_decay=1e-2, ema=0.8)
ADAMW = OptimizerSettings("adamw", lr=0.01, ema=0.8)
SMALL = dataclasses.replace(SGD, state="int8")
each_setting = pytest.mark.parametrize("settings", [SGD, ADAMW, SMALL], ids=lambda s: f"{s.name}-{s.state}")


def network(double=True):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 3)
    )
    return module.double() if double else module


def batch(step, double=True):
    torch.manual_seed(100 + step)
    images, labels = 1 + torch.randn(12, 2, 4, 4, dtype=torch.float64), torch.randint(0, 3, (12,))
    return images if double else images.float(), labels


def trainer(module, settings=SGD, parts=1):
    return NetworkTrainer(module, module, make_workload(optimizer=settings, classes=3), parts)


def train(made, steps, first=0, double=True):
    for step in range(first, first + steps):
        inputs, labels = batch(step, double)
        parts = list(zip(inputs.chunk(made.micro_batches), labels.chunk(made.micro_batches), strict=True))
        for index, (some, those) in enumerate(parts):
            made.step(some, those, len(some) / len(inputs), index == len(parts) - 1)


def copies(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_average_is_that_of_torch_and_training_goes_on_from_the_trained_weights(parts, steps):
    """Batch norm in evaluation mode, so that micro-batches change nothing."""
    mine, theirs = network(), network()
    mine[1], theirs[1] = nn.Identity(), nn.Identity()
    made = trainer(mine, parts=parts)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    average = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(steps):
        train(made, 1, step)
        inputs, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(inputs), labels).backward()
        optimizer.step()
        average.update_parameters(theirs)
        torch.testing.assert_close(copies(mine), copies(theirs), rtol=1e-9, atol=1e-10)
        made.settle([])
        torch.testing.assert_close(copies(mine), copies(average.module), rtol=1e-9, atol=1e-10)
    assert steps == 1 or any(
        (a - b).abs().max() > 1e-3 for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
    )


def test_statistics_are_those_of_the_averaged_weights():
    module = network()
    made = trainer(module)
    train(made, 4)
    images = torch.cat([batch(step)[0] for step in (20, 21)])
    made.settle([(images[:12], None), (images[12:], None)])
    maps = module[0](images).detach()
    torch.testing.assert_close(module[1].running_mean, maps.mean((0, 2, 3)))
    torch.testing.assert_close(module[1].running_var, maps.transpose(0, 1).flatten(1).var(1))


@each_setting
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_resumed_average_is_the_uninterrupted_one(settings, evaluated):
    """A checkpoint is written within an epoch, with the trained weights in place, or after evaluation."""
    whole, resumed = network(double=False), network(double=False)
    made = trainer(whole, settings)
    train(made, 3, double=False)
    if evaluated:
        made.optimizers.average()
    saved = {
        group: {
            name: (each if isinstance(each, torch.Tensor) else each.make()).clone() for name, each in tensors.items()
        }
        for group, tensors in made.state().items()
    }
    again = trainer(resumed, settings)
    again.load_state(lambda group: dict(saved[group]))
    for each in (made, again):
        train(each, 3, first=3, double=False)
    assert_equal(copies(resumed), copies(whole))
    for each in (made, again):
        each.optimizers.average()
    assert_equal(copies(resumed), copies(whole))


def test_kept_weights_alone_are_evaluated_and_stay():
    """As after the last epoch, when there is no optimizer state any more."""
    module = network()
    made = trainer(module)
    train(made, 3)
    made.optimizers.average()
    kept = {name: tensor.clone() for name, tensor in made.state()["model"].items()}
    train(made, 2, first=3)
    made.load_state(lambda group: kept if group == "model" else {})
    made.optimizers.average()
    assert_equal(module.state_dict(), kept)


def test_a_checkpoint_has_the_average_as_its_model():
    module = network()
    made = trainer(module)
    train(made, 3)
    trained, state = copies(module), made.state()
    found = {name: state["model"][name].make().clone() for name in trained}
    made.optimizers.average()
    assert_equal(found, copies(module))
    assert any(not torch.equal(found[name], trained[name]) for name in trained)


def test_a_damaged_average_is_refused():
    made = trainer(network())
    train(made, 1)
    state = {**made.optimizers.state(), "0.weight/trained": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"0\.weight/trained.*of shape \(3,\)"):
        made.optimizers.load_state(state)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_it_takes_the_memory_of_the_weights_and_no_more(device):
    peaks = {}
    for ema in (None, 0.9):
        torch.manual_seed(0)
        layers = [nn.Flatten(), *(nn.Linear(256, 256, bias=False) for _ in range(6)), nn.Linear(256, 3, bias=False)]
        module = nn.Sequential(*layers).to(device)
        made = trainer(module, dataclasses.replace(SGD, ema=ema))
        inputs = torch.zeros(2, 1, 16, 16, device=device), torch.zeros(2, dtype=torch.int64, device=device)
        peaks[ema] = tensor_peak_bytes(lambda m=made, b=inputs: m.step(*b), [module], repeats=3)
    weights = sum(each.numel() * 4 for each in module.parameters())
    assert abs(peaks[0.9] - peaks[None] - weights) < 0.01 * weights


def test_state_counts_the_average_in_its_own_type():
    assert SGD.state_per_parameter == 2 and ADAMW.state_per_parameter == 3
    assert 1.25 < SMALL.state_per_parameter < 1.26
    plain = dataclasses.replace(SGD, momentum=0.0, state="int8")
    assert plain.state_per_parameter == 1 and not plain.rounds and SMALL.rounds


def test_schedule_free_weights_are_averages_already():
    with pytest.raises(UsageError, match=r"schedulefree averages weights by itself; leave out --ema 0\.9"):
        OptimizerSettings("schedulefree", schedule="constant", ema=0.9)


@pytest.mark.parametrize(
    ("decay", "steps", "text"),
    [
        (0.999, 70, "93% of the average; 0.93 suits"),
        (0.9, 3, "81% of the average"),
        (0.99, 231, None),
        (0.9, 30, None),
        (0.9999, 1000, "; 0.995 suits"),
        (0.9999999, 10**6, "; 0.999995 suits"),
    ],
)
def test_a_run_too_short_for_its_average_says_so(decay, steps, text):
    found = first_step_notice(dataclasses.replace(SGD, ema=decay), steps)
    assert found is None if text is None else text in found
    assert first_step_notice(dataclasses.replace(SGD, ema=None), 5) is None
