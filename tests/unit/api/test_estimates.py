"""Estimates are compared with bytes counted by hand, with real steps of plain PyTorch, and with committed runs."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit import Estimate
from snugfit import _models as models
from snugfit._core.estimate import PROCESS_EXTRA_BYTES
from snugfit._upstream import to_channels_last
from snugfit.errors import ModelError, UsageError
from snugfit.memory import tensor_peak_bytes

SCALAR = 4
"""The loss times its share of the step, which the plain loop does not have."""
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


class Shared(nn.Module):
    """Two convolutions with one weight, a branch, and a tensor that the forward pass makes."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.other, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)
        self.other.weight, self.norm = self.again.weight, nn.BatchNorm2d(16)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = x + self.norm(self.other(F.relu(self.again(x))))
        return self.last((x * torch.ones(1)).mean((2, 3)))


def plain_step(module, shape, batch, make_optimizer, bfloat16=False):
    """Peak tensor bytes of the second of two real steps, in the usual loop."""
    to_channels_last(module.train())
    optimizer = make_optimizer(module.parameters())

    def step():
        images = torch.randn(batch, *shape).contiguous(memory_format=torch.channels_last)
        labels = torch.zeros(batch, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            outputs = module(images)
            loss = F.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [each for values in optimizer.state.values() for each in values.values() if torch.is_tensor(each)]
    return tensor_peak_bytes(step, [module, *state])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def tiny():
    return nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def test_bytes_of_a_tiny_network_as_counted_by_hand():
    step = snugfit.estimate(tiny(), (1, 4, 4), batch_size=5).steps[0]
    weights = 4 * (2 * 9 + 8 * 3 + 3)
    images, labels, feature_map, logits = 4 * 5 * 16, 8 * 5, 4 * 5 * 2 * 2 * 2, 4 * 5 * 3
    assert step.whole["parameters"] == step.whole["gradients"] == step.whole["optimizer_state"] == weights
    assert step.whole["batch"] == images + labels
    # the linear layer reads ReLU's kept output through a view; the loss keeps log-probabilities and a sum of weights
    assert step.whole["activations"] == feature_map + logits + 4
    assert step.whole["buffers"] == 0


def test_what_is_there_at_the_peak_sums_to_the_peak():
    found = snugfit.estimate("smallconv", (1, 16, 16), batch_size=(4, 32))
    for step in found.steps:
        assert sum(step.at_peak.values()) == step.peak_bytes
        assert all(step.at_peak[kind] <= step.whole[kind] for kind in step.whole)


@pytest.mark.parametrize("name, make", [("sgd", sgd), ("adamw", adamw)])
def test_the_peak_is_that_of_a_real_step_of_resnet20(name, make):
    found = snugfit.estimate("resnet20", (3, 32, 32), batch_size=8, optimizer=name)
    assert found.divided
    real = plain_step(models.build("resnet20", 10, 32), (3, 32, 32), 8, make)
    assert found.peak_bytes == real + SCALAR


def test_the_peak_is_that_of_a_real_step_with_shared_weights():
    found = snugfit.estimate(Shared(), (3, 12, 12), batch_size=6)
    assert not found.divided and "tied weights" in found.notes[-1]
    assert found.peak_bytes == plain_step(Shared(), (3, 12, 12), 6, sgd) + SCALAR


def test_the_largest_power_of_two_that_fits():
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10))
    found = snugfit.estimate(network, (1, 16, 16), memory="36MB", batch_size=4)
    peaks = {size: snugfit.estimate(network, (1, 16, 16), batch_size=size).peak_bytes for size in (16, 32, 64, 128)}
    fitting = [size for size, peak in peaks.items() if peak + PROCESS_EXTRA_BYTES <= 36_000_000]
    assert 16 <= fitting[-1] < 128
    assert found.largest_batch == fitting[-1] == found.steps[-1].batch_size
    assert [step.fits for step in found.steps] == [True, True]
    assert snugfit.estimate(network, (1, 16, 16), memory="1MB").largest_batch == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_module_stays_as_it_is(device):
    module = Shared().eval().to(device)
    module.other.weight = module.again.weight
    module.first.requires_grad_(False)
    before = {name: (id(tensor), tensor._version) for name, tensor in module.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    found = snugfit.estimate(module, torch.zeros(6, 3, 12, 12))
    assert {name: (id(each), each._version) for name, each in module.state_dict(keep_vars=True).items()} == before
    assert not module.training and module.other.weight is module.again.weight and type(module.first) is nn.Conv2d
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert found.steps[0].batch_size == 6
    frozen = sum(each.nbytes for each in module.first.parameters())
    assert found.steps[0].whole["gradients"] == found.steps[0].whole["parameters"] - frozen


def test_the_layer_of_the_peak():
    wide = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(256, 2))
    step = snugfit.estimate(wide, (1, 16, 16), batch_size=32).steps[0]
    assert (step.layer, step.during) == ("1", "backward")  # convolution's output, ReLU's, and the gradients of both
    deep = nn.Sequential(nn.Flatten(), nn.Linear(16, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 2))
    assert snugfit.estimate(deep, (1, 4, 4), batch_size=2).steps[0].during == "backward"


def test_changes_lower_what_they_say():
    found = snugfit.estimate("resnet20", (3, 32, 32), batch_size=16, optimizer="adamw").steps[0]
    lower = {each.name: each.peak_bytes for each in found.lower}
    weights = found.whole["parameters"]
    state = found.peak_bytes - lower["optimizer state in 8 bits"]
    assert state == pytest.approx(2 * weights * (1 - (1 + 4 / 256) / 4), rel=0.02)
    assert found.peak_bytes - lower["gradients released"] == pytest.approx(found.at_peak["gradients"], rel=0.05)
    assert lower["micro-batches"] < found.peak_bytes - found.whole["activations"] / 2
    assert lower["recomputation"] < lower["optimizer state in 8 bits"]


def test_recomputation_is_the_schedule_of_least_memory_at_the_batch():
    """Of one image the weights of MobileNetV1 take most, and no schedule lowers the peak."""
    (step,) = snugfit.estimate("mobilenet_v1", "3x32x32", batch_size=128).steps
    assert {each.name: each.peak_bytes for each in step.lower}["recomputation"] < 0.7 * step.peak_bytes


def test_feature_maps_as_outputs():
    step = snugfit.estimate(nn.Conv2d(3, 5, 3), (3, 8, 8), batch_size=2).steps[0]
    assert step.whole["batch"] == 4 * 2 * 3 * 64 + 8 * 2 * 36


class Reading(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


class Two(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)), x


@pytest.mark.parametrize(
    "model, text",
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), "does not run on an input of shape 1x4x4"),
        (Reading(16, 2), "must not read any"),
        (Two(16, 2), "one tensor of logits"),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).requires_grad_(False), "nothing to train"),
        (lambda: 1 / 0, "pass the module"),
    ],
)
def test_models_that_cannot_be_estimated(model, text):
    with pytest.raises(ModelError, match=text) as caught:
        snugfit.estimate(model, (1, 4, 4), batch_size=2)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "arguments, options",
    [
        (("smallconv", (1, 8)), {}),
        (("smallconv", (0, 8, 8)), {}),
        (("smallconv", 8), {}),
        (("smallconv", "1x8xa"), {}),
        (("smallconv", torch.zeros(1, 8, 8)), {}),
        (("smallconv", torch.zeros(1, 1, 8, 8, dtype=torch.int64)), {}),
        (("smallconv", (1, 8, 8)), {"batch_size": 0}),
        (("smallconv", (1, 8, 8)), {"batch_size": "8,,9"}),
        (("smallconv", (1, 8, 8)), {"memory": "100"}),
        (("smallconv", (1, 8, 8)), {"optimizer": "schedulefree", "optimizer_state": "int8"}),
        (("smallconv", (1, 8, 8)), {"optimizer": "schedulefree", "weight_dtype": "bfloat16"}),
        ((nn.Conv2d(1, 1, 1), (1, 8, 8)), {"classes": 3}),
        (("smallconv", (1, 8, 8)), {"epochs": 3}),
        (("smallconv", (1, 8, 8)), {"input_shape": (3, 8, 8)}),
        (("smalconv", (1, 8, 8)), {}),
    ],
)
def test_usage_errors(arguments, options):
    with pytest.raises(UsageError):
        snugfit.estimate(*arguments, **options)


def test_an_estimate_is_data():
    found = snugfit.estimate("smallconv", (1, 8, 8), batch_size=(2, 4), memory="37MB", optimizer="schedulefree")
    assert Estimate.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert "the state of schedulefree is weights" in str(found)


def test_measured_steps():
    step = snugfit.estimate("smallconv", (1, 16, 16), batch_size=64, measure=True).steps[0]
    assert 0 < step.measured_bytes < step.peak_bytes + PROCESS_EXTRA_BYTES


def test_committed_runs_rarely_took_more_beyond_tensors_than_is_said():
    found = []

    def collect(value):
        if isinstance(value, dict):
            measured = value.get("measured")
            of_process = isinstance(measured, dict) and not measured.get("device_memory")
            full = "schema" in value and value.get("strategy") == "backprop" and of_process
            keeps_freed = full and any(phase.get("predicted_kept_bytes") for phase in value["phases"])
            if full and measured.get("tensor_peak_bytes") and not keeps_freed:
                found.append(measured["peak_bytes"] - measured["tensor_peak_bytes"])
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(each)

    for path in RESULTS.glob("*.json"):
        collect(json.loads(path.read_text()))
    assert len(found) > 100
    assert sum(extra <= PROCESS_EXTRA_BYTES for extra in found) >= 0.95 * len(found), "docs/profiling.md says so"
