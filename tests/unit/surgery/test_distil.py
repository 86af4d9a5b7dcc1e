"""Distillation: pruned blocks come closer to the unpruned ones, and nothing else changes."""

import pytest
import torch
from sklearn.datasets import load_digits
from surgery_zoo import NETWORKS, conv_norm
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain, find_blocks
from snugfit.errors import DivergedError, ModelError, UsageError
from snugfit.lean import LeanConv2d, use_lean
from snugfit.surgery import (
    TeacherStudent,
    channel_importance,
    copy_for_pruning,
    distil,
    hidden_groups,
    most_important,
    remove_channels,
    width,
)
from snugfit.surgery.reconstruction import Regression

SHAPE = (3, 16, 16)


def digits(count=32):
    """Handwritten digits in three colours, (count, 3, 16, 16)."""
    images = torch.tensor(load_digits().images[:count], dtype=torch.float64)[:, None] / 16
    grey = F.interpolate(images, size=16, mode="bilinear")
    return torch.cat([grey, 1 - grey, grey.square()], 1)


def batches(size=8):
    return digits().split(size)


def plain():
    return nn.Sequential(
        conv_norm(3, 8), conv_norm(8, 8), nn.MaxPool2d(2), conv_norm(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


BACKBONES = {"plain": plain, "resnet": NETWORKS["resnet"], "mobilenet": NETWORKS["mobilenet"]}


def settled(model):
    """A network in double precision whose BatchNorm statistics are of the digits."""
    module = Chain.from_module(model.double(), SHAPE).to_module().train()
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.normal_(layer.bias, std=0.3)
                layer.momentum = 0.5
        for _ in range(6):
            module(digits())
    return module.eval()


def pruned(name, blocks=None, share=0.6):
    """A network, and its twin without some of the hidden channels of some blocks."""
    torch.manual_seed(0)
    teacher = settled(BACKBONES[name]())
    found = hidden_groups(teacher, SHAPE)
    groups = [group for block in (blocks or found) for group in found[block]]
    student = copy_for_pruning(teacher, SHAPE, groups)
    scores = channel_importance(teacher, groups, batches())
    kept = most_important(scores, {group.name: max(1, int(share * width(teacher, group))) for group in groups})
    return teacher, student, remove_channels(student, groups, kept)


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(module, before):
    return {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}


def error(teacher, student):
    with torch.no_grad():
        theirs, own = teacher.eval()(digits()), student.eval()(digits())
    return float((own - theirs).square().sum() / theirs.square().sum())


@pytest.mark.parametrize("name", BACKBONES)
def test_blocks_and_the_network_come_closer_to_the_teacher(name):
    teacher, student, cuts = pruned(name)
    theirs, before = state(teacher), error(teacher, student)
    found = distil(TeacherStudent(teacher, student, cuts, SHAPE), batches)
    assert found and all(0 <= each.after < each.before for each in found)
    assert all(each.solved for each in found)
    assert error(teacher, student) < 0.5 * before
    assert changed(teacher, theirs) == set()


@pytest.mark.parametrize(("name", "block", "own"), [("mobilenet", 2, "features.2."), ("resnet", 2, "blocks.1.")])
def test_only_the_block_that_lost_inputs_changes(name, block, own):
    teacher, student, cuts = pruned(name, [block])
    before = state(student)
    (found,) = distil(TeacherStudent(teacher, student, cuts, SHAPE), batches)
    assert found.block == block
    names = changed(student, before)
    assert names and all(each.startswith(own) for each in names)
    assert not any(each.endswith(("running_var", "num_batches_tracked")) for each in names)


def test_a_stem_that_lost_outputs_alone_is_left():
    """What is left of it makes what it made; the block that reads it is retrained on the channels that are left."""
    teacher, student, cuts = pruned("mobilenet", [1])
    stem, first = state(student), find_blocks(student, SHAPE)[0]
    pruned_plain = pruned("plain", [1])
    assert [each.block for each in distil(TeacherStudent(*pruned_plain, SHAPE), batches)] == [1]
    found = distil(TeacherStudent(teacher, student, cuts, SHAPE), batches)
    assert [each.block for each in found] == [1]
    assert not any(name.startswith(f"{first.name}.") for name in changed(student, stem))


def test_the_closed_form_alone_restores_what_the_surviving_channels_hold():
    """Channels that are copies of others lose nothing: least squares finds that, without a step."""
    torch.manual_seed(0)
    layers = (conv_norm(3, 6), conv_norm(6, 7), conv_norm(7, 4))
    teacher = settled(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)))
    tensors = teacher.state_dict()
    groups = hidden_groups(teacher, SHAPE)[2]
    for slot in (*groups[0].producers, *groups[0].statistics):
        tensors[slot.tensor][4:] = tensors[slot.tensor][1:4]
    student = copy_for_pruning(teacher, SHAPE, groups)
    cuts = remove_channels(student, groups, {groups[0].name: range(4)})
    (found,) = distil(TeacherStudent(teacher, student, cuts, SHAPE), batches, ridge=1e-12)
    assert found.solved == ("2.0",) and found.before > 1e-3 and found.after < 1e-12
    assert error(teacher, student) < 1e-12


def test_a_pruned_output_is_compared_on_the_channels_that_are_left():
    teacher, student, cuts = pruned("plain")
    found = distil(TeacherStudent(teacher, student, cuts, SHAPE), batches)
    assert [each.block for each in found] == [1, 2]
    assert all(each.after < each.before for each in found)


def test_micro_batches_make_no_difference():
    results = []
    for size in (3, 8):
        teacher, student, cuts = pruned("mobilenet")
        distil(TeacherStudent(teacher, student, cuts, SHAPE), batches, micro_batch=size)
        results.append(state(student))
    assert all(torch.allclose(tensor, results[1][name], atol=1e-8) for name, tensor in results[0].items())


def test_what_trains_modes_and_layers_come_back_as_they_were():
    teacher, student, cuts = pruned("mobilenet")
    student.train().requires_grad_(False)
    use_lean(student)
    distil(TeacherStudent(teacher, student, cuts, SHAPE), batches)
    assert student.training and not any(p.requires_grad or p.grad is not None for p in student.parameters())
    assert any(isinstance(layer, LeanConv2d) for layer in student.modules())


def test_a_block_that_only_gets_worse_keeps_its_weights(monkeypatch):
    teacher, student, cuts = pruned("mobilenet", [2])
    before = state(student)
    monkeypatch.setattr(Regression, "solve", lambda self, *_: (self.layer.weight.detach() + 9.0, torch.tensor(0.0)))
    (found,) = distil(TeacherStudent(teacher, student, cuts, SHAPE), batches)
    assert not found.solved and found.after == found.before and changed(student, before) == set()


def test_nothing_is_retrained_where_nothing_was_cut():
    teacher, student, _ = pruned("mobilenet", share=1.0)
    assert distil(TeacherStudent(teacher, student, {}, SHAPE), batches) == []


def test_what_cannot_be_distilled_is_refused():
    teacher, student, cuts = pruned("mobilenet")
    other = Chain.from_module(plain().double(), SHAPE).to_module()
    with pytest.raises(ModelError, match="does not have the layers"):
        distil(TeacherStudent(other, student, cuts, SHAPE), batches)
    with pytest.raises(UsageError, match="learns from images"):
        distil(TeacherStudent(teacher, student, cuts, SHAPE), lambda: [])
    with pytest.raises(DivergedError, match="after distillation"):
        distil(
            TeacherStudent(teacher, student, cuts, SHAPE),
            lambda: [batch * float("nan") for batch in batches()],
        )
