"""Joint distillation: all pruned blocks and what the classifier reads come closer, and nothing else changes."""

import pytest
import torch
from test_distil import SHAPE, batches, changed, digits, pruned, state

from snugfit.errors import DivergedError, UsageError
from snugfit.surgery import JointDistillation, TeacherStudent, distil, later_biases
from snugfit.surgery.joint import learning_rate_factor


def classifier(module):
    """Names of the last linear layer."""
    return {[name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)][-1]}


def prepared(name, solve=True):
    teacher, student, cuts = pruned(name)
    if solve:
        distil(TeacherStudent(teacher, student, cuts, SHAPE), batches)
    shared = {id(tensor) for tensor in teacher.state_dict(keep_vars=True).values()}
    own = {name for name, tensor in student.state_dict(keep_vars=True).items() if id(tensor) not in shared}
    return teacher, student, cuts, own | later_biases(student, own, classifier(student))


def joint(made, steps, **more):
    teacher, student, cuts, names = made
    pair = TeacherStudent(teacher, student, cuts, SHAPE)
    return JointDistillation(pair, trained=names, until=classifier(student), steps=steps, **more)


def features(module):
    """What the classifier reads."""
    found = []
    layer = module.get_submodule(next(iter(classifier(module))))
    hook = layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad():
        module(digits())
    hook.remove()
    return found[0]


@pytest.mark.parametrize("name", ["plain", "resnet", "mobilenet"])
def test_what_the_classifier_reads_comes_closer(name):
    made = prepared(name)
    teacher, student, _, names = made
    before, theirs, own = features(student), state(teacher), state(student)
    flags = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    kinds = [type(layer) for layer in student.modules()]
    trained = joint(made, 40)
    for _ in range(10):
        for images in batches():
            trained.step(images)
    wanted = features(teacher)
    assert (features(student) - wanted).square().sum() < 0.7 * (before - wanted).square().sum()
    assert changed(teacher, theirs) == set() and changed(student, own) <= names
    assert {name: parameter.requires_grad for name, parameter in student.named_parameters()} == flags
    assert [type(layer) for layer in student.modules()] == kinds
    assert all(parameter.grad is None for parameter in (*student.parameters(), *teacher.parameters()))


def test_biases_behind_are_the_students_own():
    teacher, student, _, names = prepared("mobilenet", solve=False)
    last = next(iter(classifier(student)))
    assert not any(name.startswith(f"{last}.") for name in names)
    mine, theirs = student.state_dict(keep_vars=True), teacher.state_dict(keep_vars=True)
    assert all(mine[name] is not theirs[name] for name in names if name in theirs)
    assert any(name.endswith("bias") and mine[name].shape == theirs[name].shape for name in names)


def test_micro_batches_make_one_step():
    """The errors of single images count by their own targets, and so not quite alike."""
    found = []
    for micro_batch in (8, 4):
        trained = joint(prepared("mobilenet"), 4, micro_batch=micro_batch)
        found.append(trained.step(digits(8)))
    assert found[0] == pytest.approx(found[1], rel=0.1) and trained.done == 1


def test_a_resumed_one_ends_as_the_uninterrupted_one():
    made = prepared("mobilenet")
    whole = joint(made, 8)
    for images in [*batches(), *batches()]:
        whole.step(images)
    expected = state(made[1])
    made = prepared("mobilenet")
    first = joint(made, 8)
    for images in batches():
        first.step(images)
    second = joint(made, 8)
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()}, first.done)
    for images in batches():
        second.step(images)
    assert changed(made[1], expected) == set()


def test_the_rate_rises_and_falls():
    rates = [learning_rate_factor(done, 100) for done in range(100)]
    assert max(rates) == 1 and rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)
    assert 0 < rates[0] <= 0.1 and 0 < rates[-1] < 0.001
    assert 0 < learning_rate_factor(0, 1) <= 1


def test_it_needs_a_step():
    with pytest.raises(UsageError, match="at least one step"):
        joint(prepared("plain"), 0)


def test_an_error_that_is_not_a_number_is_told():
    with pytest.raises(DivergedError, match="joint distillation"):
        joint(prepared("plain"), 4).step(digits(8) * torch.nan)
