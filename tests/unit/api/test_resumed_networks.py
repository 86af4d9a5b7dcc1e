"""A run keeps the weights of the network that it was given, and calls the network's own ``train``."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import snugfit
from snugfit._training.events import StepDone
from snugfit.errors import ModelError

IMAGES, LABELS = torch.rand(24, 3, 12, 12), torch.arange(24) % 3
DATA = [(image, int(label)) for image, label in zip(IMAGES, LABELS, strict=True)]
SETTINGS = {"strategy": "backprop", "epochs": 2, "batch_size": 8, "lr": 0.1}


class Net(nn.Sequential):
    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3))


def data():
    return snugfit.from_dataset(DATA[:16], DATA[16:])


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Killed(Exception):
    """The process ends without saving, as by a kill."""


def kill(event):
    if isinstance(event, StepDone):
        raise Killed


def test_a_run_that_ends_in_its_first_epoch_resumes_from_the_weights_that_it_was_given(tmp_path):
    snugfit.plan(Net(), data(), **SETTINGS).run((), out=tmp_path / "whole")
    with pytest.raises(Killed):
        snugfit.plan(Net(), data(), **SETTINGS).run((kill,), out=tmp_path / "killed")
    begun = snugfit.plan(Net(), data(), out=str(tmp_path / "begun"), **SETTINGS).begin()
    for folder in (tmp_path / "killed", begun):
        snugfit.resume(folder, model=Net(seed=1), data=data())
        assert same(weights(tmp_path / "whole"), weights(folder)), folder
    snugfit.plan(Net(seed=1), data(), **SETTINGS).run((), out=tmp_path / "other")
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "other"))


class Frozen(Net):
    """Keeps its norm in evaluation mode, as fine-tuning does."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def test_an_own_train_is_called_before_the_first_step(tmp_path):
    model = Frozen()
    assert model[1].training, "nothing has called it yet"
    with torch.no_grad():
        model[1].running_mean.fill_(0.5)
    snugfit.plan(model, data(), **SETTINGS).run((), out=tmp_path / "run")
    assert torch.equal(weights(tmp_path / "run")["1.running_mean"], torch.full((8,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_network_of_another_type_is_refused(dtype):
    with pytest.raises(ModelError, match=rf"Net has weights in {str(dtype)[6:]}, .* pass it in float32"):
        snugfit.plan(Net().to(dtype), data(), **SETTINGS)


def recurrent():
    """The accuracy of a recurrent network in a budget that has little room for kernels."""
    import tempfile

    import torch
    from torch import nn

    import snugfit

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.rows = nn.LSTM(256, 16, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(32, 4)

        def forward(self, x):
            rows = self.conv(x).relu().permute(0, 2, 1, 3).flatten(2)
            return self.head(self.rows(rows)[0][:, -1])

    snugfit.prepare_process(1)
    items = [(torch.randn(3, 32, 32), index % 4) for index in range(150)]
    data = snugfit.from_dataset(items[:100], items[100:], as_is=True)
    plan = snugfit.plan(Recurrent(), data, strategy="backprop", memory="22MB", epochs=1, batch_size=48)
    with tempfile.TemporaryDirectory() as folder:
        return plan.run((), out=f"{folder}/run").accuracy["val"]


def test_kernels_of_recurrent_layers_in_validation_fit_the_budget(fresh_process):
    assert 0 <= fresh_process(recurrent)["recurrent"] <= 1
