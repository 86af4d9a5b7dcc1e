"""Plans and profiles by the shape of images, held against those of a data set of that shape."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import snugfit
from snugfit import profile_request
from snugfit._core.registry import strategy_class
from snugfit._core.request import Request
from snugfit._core.serial import from_data
from snugfit.errors import UsageError

COUNTS = {"max_train": 96, "max_val": 24, "classes": 10, "batch_size": 16, "epochs": 2, "threads": 1}
SHAPE = {"input_shape": (1, 8, 8), **COUNTS}


@pytest.fixture(scope="module")
def both():
    """A plan with the digits, and one with their shape, both from the measurements of a plan before."""
    snugfit.plan("smallconv", **SHAPE)
    with_data = snugfit.plan("smallconv", "digits", image_size=8, **COUNTS)
    return with_data, snugfit.plan("smallconv", **SHAPE)


def costs(planned):
    """Predicted costs of what fits, without the memory that was in use before: data and network."""
    profile, plan = replace(planned.profile, base_bytes=0), planned.plan
    fitting = [each for each in plan.candidates if each.feasible]
    made = {each.strategy: from_data(strategy_class(each.strategy), each.settings) for each in fitting}
    return {name: each.estimate(plan.workload, profile, plan.hardware) for name, each in made.items()}


def test_the_work_is_that_of_a_data_set_of_this_shape(both):
    with_data, without = (each.plan.workload for each in both)
    assert without == replace(with_data, data=without.data) and without.data != "digits"


def test_predictions_are_those_of_a_data_set_of_this_shape(both):
    with_data, without = map(costs, both)
    assert without == with_data and {"backprop", "checkpoint", "blockwise"} <= set(without)


class Both(nn.Module):
    """Can be divided where its inputs have met."""

    def __init__(self):
        super().__init__()
        self.conv, self.words = nn.Conv2d(2, 8, 3), nn.Embedding(5, 8)
        self.more = nn.Sequential(nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, photo, word):
        return self.more(self.conv(photo).mean((2, 3)) + self.words(word))


def items(count):
    return [({"photo": torch.rand(2, 8, 12), "word": number % 5}, number % 10) for number in range(count)]


def test_several_inputs_are_those_of_a_data_set():
    options = {**COUNTS, "input_shape": {"photo": (2, 8, 12), "word": "int64"}}
    snugfit.plan(Both(), **options)
    data = snugfit.from_dataset(items(96), items(24), items(24))
    plans = snugfit.plan(Both(), data, **COUNTS), snugfit.plan(Both(), **options)
    with_data, without = (each.plan.workload for each in plans)
    assert without == replace(with_data, data=without.data) and len(without.inputs) == 2
    found, expected = map(costs, reversed(plans))
    assert found == expected and set(found) == {"backprop", "checkpoint"}


def test_trials_of_several_inputs_train_on_noise():
    shape = "photo=2x8x12,word=int64"
    (trial,) = snugfit.plan(Both(), strategy="backprop", input_shape=shape, **COUNTS).compare(steps=2)
    assert (trial.images, trial.error) == (32, None)


def test_it_cannot_run(both, tmp_path):
    with pytest.raises(UsageError, match=r"training needs data.*--input-shape 1x8x8"):
        both[1].run((), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_said_of_the_data_that_are_not_there():
    heard = []
    planned = snugfit.plan("smallconv", subscribers=(heard.append,), strategy="backprop", **SHAPE)
    assert not any("training images" in getattr(event, "message", "") for event in heard), "no notes on few images"
    assert "are for 96 training images" in str(planned) and "--data DATA" in str(planned)


@pytest.mark.parametrize("data", ["digits", TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 10)])
def test_data_and_a_shape_contradict_each_other(data):
    with pytest.raises(UsageError, match="--input-shape 1x8x8 is for plans without data; leave it out"):
        snugfit.plan("smallconv", data, **SHAPE)


def test_classes_are_needed():
    with pytest.raises(UsageError, match="add --classes"):
        snugfit.plan("smallconv", input_shape=(3, 8, 8))


def test_trials_train_on_noise():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    (trial,) = snugfit.plan(network, strategy="backprop", **SHAPE).compare(steps=2)
    assert (trial.images, trial.error) == (32, None)
    assert trial.measured_peak_bytes is not None, "which may be below the baseline after other tests"


@pytest.mark.parametrize("channels", [1, 3])
def test_a_profile(channels):
    request = Request.of(model="smallconv", input_shape=(channels, 8, 8), classes=7, batch_size=4)
    found = profile_request(request, activation_memory=True)
    assert found["input_shape"] == [channels, 8, 8]
    assert found["units"][0]["macs"] == channels * 9 * 32 * 8 * 8, "a convolution of 3 x 3 to 32 channels"
    with_data = Request.of(model="smallconv", data="digits", image_size=8, batch_size=4)
    if channels == 1:
        same = profile_request(with_data, activation_memory=True)
        assert found["units"][:-1] == same["units"][:-1], "all but the classifier of 7 classes"
