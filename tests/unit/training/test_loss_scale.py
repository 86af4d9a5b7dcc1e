"""Loss scaling in float16 against a plain loop with torch's GradScaler on the processor."""

import copy

import pytest
import torch
from torch import nn
from training_samples import make_workload

import snugfit
from snugfit._core.workload import OptimizerSettings
from snugfit._training.loss_scale import LossScale
from snugfit._training.network import NetworkTrainer
from snugfit.errors import CheckpointError, DivergedError, UsageError

SGD = OptimizerSettings("sgd", lr=0.05, momentum=0.9, weight_decay=0.01)
ADAMW = OptimizerSettings("adamw", lr=0.01, weight_decay=0.01)
OPTIMIZERS = {
    "sgd": (SGD, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True)),
    "adamw": (ADAMW, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01, fused=True)),
}
OVERFLOWS = (2, 5)
"""Steps whose images are so large that gradients overflow float16, and outputs do not."""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def images(step, count=6):
    drawn = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 3, (count,), generator=drawn)
    return torch.randn(count, 2, 4, 4, generator=drawn) * (2e3 if step in OVERFLOWS else 1), labels


def trainer(module, parts=1, optimizer=SGD, **changes):
    work = make_workload(optimizer=optimizer, classes=3, precision="float16", **changes)
    return NetworkTrainer(module, module, work, parts)


def train(made, step, parts=1):
    """One step in parts; its losses."""
    inputs, labels = images(step)
    pieces = zip(inputs.chunk(parts), labels.chunk(parts), strict=True)
    return [made.step(*some, 1 / parts, index == parts - 1).loss for index, some in enumerate(pieces)]


def scaled_step(module, optimizer, scaler, step, parts=1, clip=None):
    """The step that torch's documentation shows."""
    inputs, labels = images(step)
    for some, those in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(module(some), those) * (1 / parts)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if clip is not None:
        nn.utils.clip_grad_norm_(module.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def assert_equal(mine, theirs):
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_scales_are_those_of_torchs_scaler(name, parts, clip):
    """Two steps overflow; two in a row from 1,998 on double the scale."""
    settings, make = OPTIMIZERS[name]
    mine, theirs = network(), network()
    made, optimizer, scaler = trainer(mine, parts, settings, clip_norm=clip), make(theirs.parameters()), reference()
    made.loss_scale.load_state({**made.loss_scale.state(), "growth_tracker": torch.tensor(1998)})
    scales = []
    for step in range(8):
        train(made, step, parts)
        scaled_step(theirs, optimizer, scaler, step, parts, clip)
        assert made.loss_scale.value == scaler.get_scale()
        scales.append(made.loss_scale.value / 65536)
    assert_equal(mine, theirs)
    assert scales == [1, 2, 1, 1, 1, 0.5, 0.5, 0.5] and made.loss_scale.skipped == 2


def reference():
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1998})
    return scaler


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_and_its_loss_is_finite(name):
    module = network()
    made = trainer(module, 2, OPTIMIZERS[name][0])
    train(made, 0, 2)
    before, state = copy.deepcopy(module.state_dict()), copy.deepcopy(made.optimizers.state())
    losses = train(made, OVERFLOWS[0], 2)
    assert all(torch.isfinite(torch.tensor(losses))) and made.loss_scale.skipped == 1
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(torch.equal(value, state[key]) for key, value in made.optimizers.state().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_one_gradient_that_overflows_skips_the_step_of_all():
    """The last layer's gradient comes first, is finite, and would be applied by then if gradients were not held."""
    module = network()
    module[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    made, before = trainer(module), copy.deepcopy(module.state_dict())
    train(made, 0)
    assert made.loss_scale.skipped == 1
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_gradients_that_are_never_finite_end_the_run():
    module = network()
    module[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    made = trainer(module)
    with pytest.raises(DivergedError, match="--precision bfloat16"):
        for step in range(100):
            train(made, step)
    assert made.loss_scale.skipped == 31, "from 2^16 to below 2^-14"


def test_a_step_on_a_synthetic_batch_makes_the_state_although_gradients_overflow():
    made = trainer(network())
    made.loss_scale.skips = False
    train(made, OVERFLOWS[0])
    assert set(made.optimizers.state()) == {f"{name}/momentum_buffer" for name in made.optimizers.parameters}


def test_probes_and_dry_runs_take_every_step_and_training_skips(tmp_path, monkeypatch):
    """Otherwise a gradient that overflows there would leave the optimizer state out of what is measured."""
    seen, step = [], LossScale.step

    def seen_step(scale):
        seen.append(scale.skips)
        step(scale)

    monkeypatch.setattr(LossScale, "step", seen_step)
    small = {"image_size": 8, "max_train": 48, "max_val": 8, "batch_size": 16, "epochs": 1, "strategy": "backprop"}
    plan = snugfit.plan(network_of_digits(), "digits", precision="float16", **small)
    assert seen and not any(seen)
    seen.clear()
    record = plan.run((), out=tmp_path / "run")
    assert seen == [False, False, True, True, True]
    assert record.measured["loss_scale"] == {"scale": 65536.0, "skipped_steps": 0}


def network_of_digits():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    )


def test_the_state_continues_and_is_checked():
    made, other = trainer(network()), trainer(network())
    for step in range(4):
        train(made, step)
    state = made.state()["loss_scale"]
    other.load_state(lambda group: {**made.state()[group]})
    assert other.loss_scale.state() == state == {"scale": 32768.0, "growth_tracker": 1, "skipped": 1}
    other.load_state(lambda group: {**made.state()[group]} if group == "model" else {})
    assert other.loss_scale.state() == state, "the weights of an earlier epoch"
    for key, value in (("scale", 0.0), ("scale", float("nan")), ("skipped", -1), ("growth_tracker", [1, 2])):
        with pytest.raises(CheckpointError, match="loss scale"):
            other.loss_scale.load_state({**state, key: torch.tensor(value)})


def test_an_operator_without_float16_is_a_usage_error():
    """RReLU on the processor."""
    module = nn.Sequential(nn.Conv2d(2, 2, 1), nn.RReLU(), network())
    with pytest.raises(UsageError, match=r"--precision float16: .*rrelu.* for 'Half' on this device"):
        train(trainer(module), 0)


def test_other_precisions_have_no_scale():
    made = NetworkTrainer(network(), network(), make_workload(optimizer=SGD, precision="bfloat16"))
    assert made.loss_scale is None and set(made.state()) == {"model", "optimizer"}


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_digits_are_learned_as_in_float32(weights):
    from sklearn.datasets import load_digits

    from snugfit.lean.bfloat16_weights import store_bfloat16

    digits = load_digits()
    pixels, labels = torch.tensor(digits.images / 16).float().unsqueeze(1), torch.tensor(digits.target)
    found = {}
    for precision in ("float32", "float16"):
        torch.manual_seed(0)
        module = network_of_digits()
        if weights == "bfloat16":
            store_bfloat16(module)
        work = make_workload(optimizer=SGD, classes=10, precision=precision, weight_dtype=weights)
        made = NetworkTrainer(module, module, work)
        for step in range(120):
            rows = torch.arange(step * 64, step * 64 + 64) % 1400
            made.step(pixels[rows], labels[rows])
        with torch.no_grad():
            found[precision] = float((made.evaluating()(pixels[1400:]).argmax(1) == labels[1400:]).float().mean())
    assert found["float32"] > 0.85 and found["float16"] == pytest.approx(found["float32"], abs=0.02)
