"""The whole network's trainer against plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from training_samples import make_workload

from snugfit._core.workload import OptimizerSettings
from snugfit._training.network import NetworkTrainer
from snugfit.memory.tensors import tensor_peak_bytes

SGD = OptimizerSettings("sgd", lr=0.1, momentum=0.9, weight_decay=0.01)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).double()


def images(count=8):
    torch.manual_seed(1)
    return torch.randn(count, 2, 4, 4, dtype=torch.float64), torch.randint(0, 3, (count,))


def trainer(module, micro_batches=1, **changes):
    return NetworkTrainer(module, module, make_workload(optimizer=SGD, **changes), micro_batches)


def plain(module, steps):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for _ in range(steps):
        inputs, labels = images()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal_weights(got, want):
    for mine, theirs in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_step_is_a_plain_step_and_leaves_no_gradients():
    mine, theirs = network(), network()
    made = trainer(mine)
    losses = [made.step(*images()).loss for _ in range(3)]
    assert losses == pytest.approx(plain(theirs, 3), rel=1e-12)
    assert_equal_weights(mine, theirs)
    assert all(parameter.grad is None for parameter in mine.parameters())


def test_the_loss_has_the_workloads_label_smoothing():
    """The same step as torch's own loss, and another one than without."""
    mine, theirs, unsmoothed = network(), network(), network()
    trainer(mine, label_smoothing=0.2).step(*images())
    trainer(unsmoothed).step(*images())
    inputs, labels = images()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    nn.functional.cross_entropy(theirs(inputs), labels, label_smoothing=0.2).backward()
    optimizer.step()
    assert_equal_weights(mine, theirs)
    assert any((a != b).any() for a, b in zip(mine.parameters(), unsmoothed.parameters(), strict=True))


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_accumulated_micro_batches_are_the_whole_batch(parts):
    mine, theirs = network(), network()
    made = trainer(mine, micro_batches=parts)
    for _ in range(3):
        inputs, labels = images()
        pieces = list(zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True))
        for index, (some, those) in enumerate(pieces):
            before = copy.deepcopy(mine.state_dict())
            made.step(some, those, len(some) / len(inputs), index == parts - 1)
            changed = any(not torch.equal(before[k], v) for k, v in mine.state_dict().items())
            assert changed == (index == parts - 1)
    plain(theirs, 3)
    assert_equal_weights(mine, theirs)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("norm", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("weights", [(), (0.3, 1.0, 4.0)])
def test_clipping_is_torchs_whatever_the_micro_batches(parts, norm, weights):
    """A small norm changes every step, a large one none."""
    mine, theirs, free = network(), network(), network()
    changes = {"classes": 3, "class_weights": weights}
    made, unclipped = trainer(mine, parts, clip_norm=norm, **changes), trainer(free, parts, **changes)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    weight = torch.tensor(weights, dtype=torch.float64) if weights else None
    inputs, labels = images()
    for _ in range(3):
        for index, (some, those) in enumerate(zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True)):
            for each in (made, unclipped):
                each.step(some, those, len(some) / len(inputs), index == parts - 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(inputs), labels, weight).backward()
        found = nn.utils.clip_grad_norm_(theirs.parameters(), norm)
        assert (found > norm) == (norm < 1e3)
        optimizer.step()
    assert_equal_weights(mine, theirs)
    assert all(parameter.grad is None for parameter in mine.parameters())
    changed = any((a - b).abs().max() > 1e-6 for a, b in zip(mine.parameters(), free.parameters(), strict=True))
    assert changed == (norm < 1e3)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_mixed_targets_are_those_of_torch_in_micro_batches_too(parts, clip):
    """Each image is half of its own class, and half of the next one's."""
    mine, theirs = network(), network()
    made = trainer(mine, parts, mixed=True, classes=3, clip_norm=clip)
    inputs, labels = images()
    targets = nn.functional.one_hot(labels, 3).double()
    targets = (targets + targets.roll(1, 0)) / 2
    for index, (some, those) in enumerate(zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)):
        made.step(some, those, len(some) / len(inputs), index == parts - 1)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    outputs = theirs(inputs)
    each = [nn.functional.cross_entropy(outputs, some) for some in (labels, labels.roll(1, 0))]
    (sum(each) / 2).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(theirs.parameters(), clip)
    optimizer.step()
    assert_equal_weights(mine, theirs)


def test_clipped_gradients_are_all_in_memory_until_the_step():
    """Without clipping each is freed at once; on the meta device and on this one the same."""
    for device in ("meta", "cpu"):
        peaks = {}
        for norm in (None, 1.0):
            torch.manual_seed(0)
            layers = [nn.Flatten(), *(nn.Linear(256, 256, bias=False) for _ in range(6)), nn.Linear(256, 3)]
            module = nn.Sequential(*layers).to(device)
            made = trainer(module, clip_norm=norm)
            batch = torch.zeros(2, 1, 16, 16, device=device), torch.zeros(2, dtype=torch.int64, device=device)
            peaks[norm] = tensor_peak_bytes(lambda m=made, b=batch: m.step(*b), [module], repeats=2)
        assert 4.9 <= (peaks[1.0] - peaks[None]) / (4 * 256 * 256) < 5.2, device


def mean_error(outputs, labels):
    return nn.functional.mse_loss(outputs, nn.functional.one_hot(labels, 3).double())


@pytest.mark.parametrize("parts", [1, 3])
def test_a_loss_from_python_is_the_mean_over_all_micro_batches(parts):
    mine, theirs = network(), network()
    made = NetworkTrainer(mine, mine, make_workload(optimizer=SGD, loss="python"), parts, mean_error)
    inputs, labels = images()
    for index, (some, those) in enumerate(zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True)):
        made.step(some, those, len(some) / len(inputs), index == parts - 1)
    mean_error(theirs(inputs), labels).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01).step()
    assert_equal_weights(mine, theirs)


WEIGHTS = (0.3, 1.0, 4.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_class_weights_are_torchs_whatever_the_micro_batches(parts, smoothing):
    """The mean of a step is over its weights; a mean over images of the parts' means is something else."""
    mine, theirs = network(), network()
    made = trainer(mine, micro_batches=parts, classes=3, class_weights=WEIGHTS, label_smoothing=smoothing)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    inputs, labels = images()
    for _ in range(3):
        results = [
            made.step(some, those, len(some) / len(inputs), index == parts - 1)
            for index, (some, those) in enumerate(
                zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True)
            )
        ]
        optimizer.zero_grad()
        weight = torch.tensor(WEIGHTS, dtype=torch.float64)
        loss = nn.functional.cross_entropy(theirs(inputs), labels, weight, label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        total = sum(result.weight or 1.0 for result in results)
        mean = sum(result.loss * (result.weight or 1.0) for result in results) / total
        assert mean == pytest.approx(loss.item(), rel=1e-10)
    assert_equal_weights(mine, theirs)
    assert all(parameter.grad is None for parameter in mine.parameters())


def test_the_result_tells_loss_and_correct_ones():
    module = nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).double()
    with torch.no_grad():
        module[1].weight.zero_()
        module[1].bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    inputs, labels = images()
    result = trainer(module).step(inputs, labels)
    assert result.correct == int((labels == 1).sum())
    assert result.loss == pytest.approx(nn.functional.cross_entropy(torch.tensor([[0.0, 1, 0]] * 8), labels).item())


def test_it_trains_in_training_mode():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(1.0), nn.Linear(32, 3)).double().eval()
    trainer(module).step(*images())
    assert module.training


def test_another_forward_pass_may_be_given():
    module, seen = network(), []

    def forward(inputs):
        seen.append(len(inputs))
        return module(inputs)

    NetworkTrainer(module, forward, make_workload(optimizer=SGD)).step(*images())
    assert seen == [8]


def test_the_learning_rate_factor_scales_the_step():
    module = network()
    before = copy.deepcopy(module)
    made = trainer(module)
    made.set_lr_factor(0.0)
    made.step(*images())
    assert_equal_weights(module, before)


def test_a_state_taken_up_goes_on_as_if_never_left():
    mine, other = network(), network()
    made = trainer(mine)
    made.step(*images())
    state = {group: {k: v.clone() for k, v in tensors.items()} for group, tensors in made.state().items()}
    assert set(state) == {"model", "optimizer"}
    made.step(*images())
    again = trainer(other)
    again.load_state(state.__getitem__)
    again.step(*images())
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights():
    module, seen = network().float(), []
    module[0].register_forward_hook(lambda *hooked: seen.append(hooked[2].dtype))
    inputs, labels = images()
    trainer(module, precision="bfloat16").step(inputs.float(), labels)
    assert seen == [torch.bfloat16]
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


def test_on_the_meta_device_a_step_costs_nothing():
    module = network().to("meta")
    inputs, labels = images()
    result = trainer(module).step(inputs.to("meta"), labels.to("meta"))
    assert (result.loss, result.correct) == (0.0, 0)


def wide():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 16, 3))


def wide_images(value=None):
    torch.manual_seed(1)
    inputs = torch.randn(16, 2, 8, 8)
    if value is not None:
        inputs[0] = value
    return inputs, torch.randint(0, 3, (16,))


def test_exact_activations_are_plain_training_to_the_bit():
    mine, theirs = wide(), wide()
    step = trainer(mine, activations="exact")
    step.step(*wide_images())
    inputs, labels = wide_images()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)
    nn.functional.cross_entropy(theirs(inputs), labels).backward()
    optimizer.step()
    assert all(map(torch.equal, mine.state_dict().values(), theirs.state_dict().values()))


@pytest.mark.parametrize("activations", ["int8", "int4"])
def test_compressed_activations_change_gradients_a_little_and_the_loss_of_the_step_not_at_all(activations):
    mine, theirs, start = wide(), wide(), wide()
    exact = trainer(theirs).step(*wide_images())
    assert trainer(mine, activations=activations).step(*wide_images()).loss == exact.loss
    weights = zip(mine.parameters(), theirs.parameters(), start.parameters(), strict=True)
    for rounded, plain_, first in weights:
        if plain_.dim() > 1:
            assert not torch.equal(rounded, plain_)
            assert (rounded - plain_).norm() < (0.01 if activations == "int8" else 0.1) * (plain_ - first).norm()


@pytest.mark.parametrize("activations", ["exact", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_images_that_are_not_finite_give_such_a_loss(activations, value):
    assert torch.tensor(trainer(wide(), activations=activations).step(*wide_images(value)).loss).isnan()
