"""Networks, losses and data of one's own: what they do is kept, or refused by one clear error."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit._data.user import from_dataset, labels_of
from snugfit._training.ignored_targets import ignored_target
from snugfit.errors import DataError, InfeasibleBudgetError, ModelError, UsageError

IMAGES, LABELS = torch.rand(24, 3, 12, 12), torch.arange(24) % 3
DATA = [(image, int(label)) for image, label in zip(IMAGES, LABELS, strict=True)]
SETTINGS = {"strategy": "backprop", "epochs": 1, "batch_size": 8}


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


class Frozen(nn.Module):
    """Trains its classifier alone."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)

    def forward(self, images):
        with torch.no_grad():
            maps = self.body(images).relu()
        return self.head(maps.mean((2, 3)))


def test_a_part_under_no_grad_keeps_its_weights_in_a_loop_of_ones_own():
    torch.manual_seed(0)
    model = Frozen()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example = IMAGES[:8], LABELS[:8]
    with snugfit.fit(model, F.cross_entropy, memory="60MB", batch_size=8, example=example, lr=0.1) as step:
        step(*example)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        partial(F.cross_entropy, ignore_index=2),
        nn.CrossEntropyLoss(ignore_index=2),
    ],
)
def test_ignored_targets_are_refused_in_micro_batches_alone(loss):
    torch.manual_seed(0)
    ignored = ignored_target(loss)
    images, targets = IMAGES[:8], LABELS[:8] % 2
    with snugfit.fit(network(), loss, memory="60MB", batch_size=8, example=(images, targets)) as step:
        some = torch.cat([targets[:4], torch.full((4,), ignored)])
        step(images, some)
        object.__setattr__(step.plan, "micro_batch", 4)
        step(images, targets)
        with pytest.raises(UsageError, match=f"targets of {ignored}, which the loss ignores"):
            step(images, some)


@pytest.mark.parametrize("lr", [float("nan"), -1, "0.1", None])
def test_a_learning_rate_that_is_none_is_refused(lr):
    example = IMAGES[:8], LABELS[:8]
    with snugfit.fit(network(), F.cross_entropy, memory="60MB", batch_size=8, example=example) as step:
        with pytest.raises(UsageError, match=r"step\.lr must be a number of 0 or more"):
            step.lr = lr
        step.lr = 0
        step.lr = np.float32(0.5)
        assert step.lr == 0.5


class WithBuffer(nn.Module):
    """Subtracts a mean that is not stored, and scales by a plain tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5), persistent=False)
        self.scale = torch.ones(8, 1, 1)
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, images):
        maps = self.first(images - self.mean) * self.scale
        return self.head(self.second(maps.relu()).mean((2, 3)))


def test_tensors_that_are_not_stored_neither_end_a_run_nor_a_loop(tmp_path):
    options = {**SETTINGS, "strategy": "blockwise", "module_units": "1"}
    record = snugfit.plan(WithBuffer(), DATA, memory="60MB", **options).run((), out=tmp_path / "run")
    assert record.exit["of"] == 2
    example = IMAGES[:8], LABELS[:8]
    with snugfit.fit(WithBuffer(), F.cross_entropy, memory="60MB", batch_size=8, example=example) as step:
        assert step(*example).isfinite()


def test_a_norm_that_averages_over_all_batches_is_trained(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.Flatten(), nn.Linear(800, 3))
    record = snugfit.plan(model, DATA, memory="60MB", **SETTINGS).run((), out=tmp_path / "run")
    assert record.measured["peak_bytes"] <= record.predicted["peak_bytes"] <= 60_000_000


class Items(torch.utils.data.Dataset):
    """Items whose labels are not those that it lists."""

    def __init__(self, listed, labels):
        self.targets, self.given = listed, labels

    def __len__(self):
        return len(self.given)

    def __getitem__(self, index):
        return IMAGES[index], self.given[index]


@pytest.mark.parametrize(
    "listed",
    [
        [0, 1, 2] * 8,
        [2, 1, 0] * 9,
        ["cat", "dog", "cow"],
        lambda: None,
        {"0.jpg": 2},
        torch.zeros(24, dtype=torch.int64),
    ],
)
def test_labels_are_those_of_the_items(listed):
    assert labels_of(Items(listed, [2, 1, 0] * 8)).tolist() == [2, 1, 0] * 8


def test_labels_that_are_listed_are_not_read_from_all_items():
    class Counting(Items):
        read = 0

        def __getitem__(self, index):
            Counting.read += 1
            return super().__getitem__(index)

    assert labels_of(Counting(np.array([0, 1, 2] * 8), [0, 1, 2] * 8)).tolist() == [0, 1, 2] * 8
    assert Counting.read <= 8


@pytest.mark.parametrize("options", [{"image_size": 8}, {"max_train": 6}, {"max_val": 1}, {"classes": 7}])
def test_options_that_divided_data_would_ignore_are_refused(options):
    with pytest.raises(UsageError, match=f"other values of {next(iter(options))}: .*from_dataset"):
        snugfit.plan(network(), from_dataset(DATA), memory="60MB", **SETTINGS, **options)


def test_means_may_be_tensors_and_arrays():
    found = from_dataset(DATA, mean=torch.full((3,), 0.5), std=np.full(3, 0.25))
    assert (found.mean, found.std) == ((0.5,) * 3, (0.25,) * 3)
    with pytest.raises(UsageError, match="mean has a number for each channel"):
        from_dataset(DATA, mean=0.5, std=0.5)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_photos_without_a_range_are_refused(mode):
    image = pytest.importorskip("PIL.Image").new(mode, (12, 12), 100)
    with pytest.raises(DataError, match=f"image 0 .*pixels of mode {mode} have no known range"):
        from_dataset([(image, 0), (image, 1)] * 10).train.images([0])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: None, "the function that makes the model returned NoneType"),
        (3, "model= is 3; pass a module"),
    ],
)  # fmt: skip
def test_networks_that_cannot_be_trained_say_why(model, reason):
    with pytest.raises(ModelError, match=reason):
        snugfit.plan(model, DATA, memory="60MB", **SETTINGS)


@pytest.mark.parametrize("strategy", ["backprop", "checkpoint", "tiled"])
def test_a_frozen_network_is_refused_with_its_reason(strategy):
    planned = snugfit.plan(network().requires_grad_(False), DATA, memory="60MB", **{**SETTINGS, "strategy": strategy})
    with pytest.raises(InfeasibleBudgetError, match=f"{strategy}: .*no parameter requires a gradient"):
        planned.run(())


def test_a_loop_says_why_it_cannot_train():
    example = IMAGES[:8], LABELS[:8]
    for model, kind, reason in (
        (lambda images: images, UsageError, "pass a module"),
        (network().requires_grad_(False), ModelError, "requires a gradient"),
    ):
        with (
            pytest.raises(kind, match=reason),
            snugfit.fit(model, F.cross_entropy, memory="60MB", batch_size=8, example=example),
        ):
            pass
    with pytest.raises(UsageError, match=r"budget is '60MB'; pass a snugfit\.Budget"):
        snugfit.plan(network(), DATA, "60MB")


def test_a_function_makes_the_same_weights_for_a_seed():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_own_networks as t, snugfit\n"
        "print([snugfit.plan(t.network, t.DATA, memory='60MB', seed=seed, **t.SETTINGS).assembly.module[0]"
        ".weight.sum().item() for seed in (0, 0, 1)])"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    one, other = (subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2))
    first, second, third = json.loads(one)
    assert one == other
    assert first == second != third
