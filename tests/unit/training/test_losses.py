"""Losses to classify other than cross entropy: the focal loss, and what is refused of functions from Python."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training_samples import make_workload

from snugfit._training.losses import binary_loss, check_loss, focal_loss, require_mean_for
from snugfit._training.task import task_of
from snugfit.errors import UsageError

CPU = torch.device("cpu")
LABELS = torch.tensor([0, 3, 1, 1, 2])


def logits():
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_the_focal_loss_by_its_formula():
    found, outputs = task_of(make_workload(classes=4, loss="focal")).loss(logits(), LABELS), logits()
    p = outputs.softmax(1)[torch.arange(5), LABELS]
    torch.testing.assert_close(found, -((1 - p) ** 2 * p.log()).mean(), rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(lambda outputs: focal_loss(outputs, LABELS), (logits(),))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 3.5])
def test_the_exponent_of_the_focal_loss(gamma):
    task, outputs = task_of(make_workload(classes=4, loss="focal", focal_gamma=gamma)), logits()
    p = outputs.softmax(1)[torch.arange(5), LABELS]
    torch.testing.assert_close(task.loss(logits(), LABELS), -((1 - p) ** gamma * p.log()).mean(), rtol=1e-12, atol=0)
    certain = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    focal_loss(certain, torch.tensor([0]), gamma).backward()
    assert certain.grad.isfinite().all()


def test_certain_outputs_have_a_finite_focal_loss_and_gradient():
    outputs = torch.tensor([[1000.0, 0.0], [0.0, 1000.0]], requires_grad=True)
    found = focal_loss(outputs, torch.tensor([0, 0]))
    found.backward()
    assert found == 500 and outputs.grad.isfinite().all()


def test_the_focal_loss_of_mixed_targets_is_that_of_both_labels():
    own, other = F.one_hot(LABELS, 4).double(), F.one_hot(LABELS.flip(0), 4).double()
    both = 0.3 * focal_loss(logits(), LABELS) + 0.7 * focal_loss(logits(), LABELS.flip(0))
    torch.testing.assert_close(focal_loss(logits(), 0.3 * own + 0.7 * other), both, rtol=1e-12, atol=0)


def test_a_loss_must_take_the_targets_of_mixed_images():
    work = make_workload(classes=3, mixed=True)
    check_loss(nn.CrossEntropyLoss(), work, CPU)
    with pytest.raises(UsageError, match=r"loss= failed for .* and probabilities of shape \(18, 3\)"):
        check_loss(lambda outputs, labels: outputs.gather(1, labels[:, None]).mean(), work, CPU)


VECTORS = F.one_hot(LABELS, 4).float() + torch.tensor([1.0, 0, 0, 0]) * (LABELS > 0)[:, None]


def test_several_labels_have_binary_losses_by_their_formulas():
    work, p = make_workload(classes=4, task="multi-label"), logits().sigmoid()
    binary = -(VECTORS * p.log() + (1 - VECTORS) * (1 - p).log()).mean()
    torch.testing.assert_close(task_of(work).loss(logits(), VECTORS), binary, rtol=1e-12, atol=0)
    focal = -(VECTORS * (1 - p) ** 3 * p.log() + (1 - VECTORS) * p**3 * (1 - p).log()).mean()
    work = make_workload(classes=4, task="multi-label", loss="focal", focal_gamma=3.0)
    torch.testing.assert_close(task_of(work).loss(logits(), VECTORS), focal, rtol=1e-12, atol=0)
    half = task_of(work).loss(logits().bfloat16(), VECTORS)
    assert half.dtype == torch.float32 and abs(half - focal) < 0.01 * focal


@pytest.mark.parametrize("gamma", [None, 0.0, 0.5, 2.0])
def test_certain_labels_have_finite_losses_and_gradients(gamma):
    outputs = torch.tensor([[1000.0, -1000.0, 1000.0]], requires_grad=True)
    found = binary_loss(outputs, torch.tensor([[1.0, 0.0, 0.0]]), gamma)
    found.backward()
    assert found.item() == pytest.approx(1000 / 3) and outputs.grad.isfinite().all()


def test_a_loss_must_take_vectors_if_there_are_several_labels():
    work = make_workload(classes=3, task="multi-label")
    check_loss(nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), work, CPU)
    with pytest.raises(UsageError, match=r"loss= failed for .* and probabilities of shape \(18, 3\)"):
        check_loss(lambda outputs, labels: outputs.gather(1, labels[:, None]).mean(), work, CPU)


def mean_error(outputs, labels):
    return F.mse_loss(outputs.softmax(1), F.one_hot(labels, outputs.shape[1]).to(outputs.dtype))


def test_a_task_uses_a_loss_from_python_but_not_on_the_meta_device():
    task = task_of(make_workload(classes=4, loss="python"), mean_error)
    assert task.loss(logits(), LABELS) == mean_error(logits(), LABELS)
    weighted = task_of(make_workload(classes=4, loss="python"), nn.CrossEntropyLoss(torch.ones(4)))
    assert weighted.loss(logits().to("meta"), LABELS.to("meta")).is_meta


@pytest.mark.parametrize("loss", [None, mean_error, F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_means_are_taken(loss):
    check_loss(loss, make_workload(classes=3), CPU)


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, labels):
        return self.scale * F.cross_entropy(outputs, labels)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="sum"), "is not the mean over the images"),
        (
            nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3])),
            "is not the mean over .* class_weights= of snugfit.plan",
        ),
        ("focal", "is 'focal'; pass a function"),
        (lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none"), "a tensor of shape \\(18,\\) for"),
        (lambda outputs, labels: F.cross_entropy(outputs, labels).item(), "returned float for logits of shape"),
        (lambda outputs, labels: F.cross_entropy(outputs, labels).detach(), "without a gradient"),
        (lambda outputs, labels: None, "returned NoneType"),
        (lambda outputs: outputs.mean(), "failed for logits of shape \\(18, 3\\).*TypeError"),
        (F.mse_loss, "failed for logits of shape \\(18, 3\\) and labels of shape \\(18,\\): RuntimeError"),
        (Learned(), "has parameters, which would not be trained"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_is_no_mean_loss_is_refused(loss, said):
    with pytest.raises(UsageError, match=rf"(?s)loss= .*{said}"):
        check_loss(loss, make_workload(classes=3), CPU)


@pytest.mark.parametrize("classes", [2, 3, 10, 40])
def test_no_weight_of_a_class_is_overlooked(classes):
    """Nor in labels of one class alone, as the first batch of sorted ones has."""
    work, alone = make_workload(classes=classes), torch.zeros(8, dtype=torch.int64)
    for odd in (0, 1, classes // 2, classes - 1):
        loss = nn.CrossEntropyLoss(torch.ones(classes).index_fill_(0, torch.tensor(odd), 1.5))
        with pytest.raises(UsageError, match="is not the mean over the images"):
            check_loss(loss, work, CPU)
        with pytest.raises(UsageError, match="is not the mean over the images"):
            require_mean_for(loss, (classes,), alone, torch.zeros(()), None)


def test_an_examples_targets_are_tried_whatever_they_are():
    """Two classes whose labels begin 0, 1, 1, 0 have the same weights in both halves of four images, and in pairs."""
    loss, labels = nn.CrossEntropyLoss(torch.tensor([1.0, 9.0])), torch.tensor([0, 1, 1, 0])
    maps = labels[:, None, None].expand(4, 2, 2)
    with pytest.raises(UsageError, match="is not the mean over the images"):
        require_mean_for(loss, (2, 2, 2), maps, torch.zeros(()), None)
    with pytest.raises(UsageError, match="is not the mean over the images"):
        require_mean_for(loss, (2, 300, 300), labels[:, None, None].expand(4, 300, 300), torch.zeros(()), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_of_any_targets_are_taken(dtype):
    """A loss that leaves a label out, one of few labels that are no classes, and one of numbers."""
    like = torch.zeros((), dtype=dtype)
    labels = torch.tensor([0, 1, 2])
    require_mean_for(F.cross_entropy, (3,), labels, like, -100)
    require_mean_for(nn.CrossEntropyLoss(ignore_index=1), (3,), torch.tensor([0, 2]), like, 1)
    require_mean_for(nn.CrossEntropyLoss(ignore_index=0), (3,), torch.tensor([0, 0, 2]), like, 0)
    borders = torch.tensor([255, 1, 2, 255, 255, 0]).view(3, 1, 2)
    require_mean_for(nn.CrossEntropyLoss(ignore_index=255), (3, 1, 2), borders, like, 255)
    require_mean_for(
        lambda outputs, kinds: outputs[:, :2].gather(1, kinds[:, None]).mean(), (3,), labels[:2], like, None
    )
    require_mean_for(F.mse_loss, (3,), torch.zeros(5, 3, dtype=dtype), like, None)
