"""A run that removed channels is loaded with the widths that its weights have."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import snugfit
from snugfit._chain import Chain
from snugfit._storage.manifest import Manifest
from snugfit.errors import CheckpointError
from snugfit.surgery import find_groups, prune

SHAPE = (1, 8, 8)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(5 * 16, 2),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder whose weights were pruned after training, and the pruned network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = TensorDataset(torch.rand(24, *SHAPE), torch.arange(24) % 2)
    plan = snugfit.plan(make_net(), (data, data, data), strategy="backprop", epochs=1, batch_size=8, augment=False)
    plan.run((), out=tmp_path / "run")
    small = Chain.from_module(snugfit.load(tmp_path / "run", make_net), SHAPE).to_module()
    small.get_parameter("3.weight").data[:, [0, 4]] = 0
    small.get_parameter("6.weight").data[:, 16:32] = 0
    prune(small, find_groups(small, SHAPE))
    save_file(small.state_dict(), tmp_path / "run" / "model.safetensors")
    say(tmp_path / "run", "prunetrain")
    return tmp_path / "run", small.eval()


def say(folder, scheme):
    path = folder / "architecture.json"
    architecture = json.loads(path.read_text())
    structure = {"pruned": True} if scheme == "prunetrain" else {}
    path.write_text(json.dumps({**architecture, "strategy": "elastic", "structure": structure}))
    Manifest.of(folder)


def test_it_is_loaded_with_its_widths(run):
    folder, small = run
    loaded = snugfit.load(folder, make_net)
    assert loaded.get_parameter("3.weight").shape == (4, 4, 3, 3)
    images = torch.rand(3, *SHAPE)
    assert torch.equal(loaded(images), small(images))


def test_other_runs_must_have_the_models_own_widths(run):
    folder, _ = run
    say(folder, "elastic")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        snugfit.load(folder, make_net)


def test_widths_that_do_not_fit_each_other(run):
    folder, _ = run
    state = load_file(folder / "model.safetensors")
    save_file({**state, "6.weight": torch.zeros(2, 48)}, folder / "model.safetensors")
    Manifest.of(folder)
    with pytest.raises(CheckpointError, match="do not fit each other"):
        snugfit.load(folder, make_net)


@pytest.mark.timeout(60)  # reading a pipe waits for who writes to it
def test_a_pipe_in_place_of_weights_is_refused(run):
    folder, _ = run
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="is no regular file"):
        snugfit.load(folder, make_net)
