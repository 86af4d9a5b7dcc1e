"""Tasks: their losses, tallies and made-up targets; and the trainer that follows them."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training_samples import PHASE, OneWeight, Source, make_run, make_workload

from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.events import EpochDone, StepDone
from snugfit._training.finalize import Outcome, evaluate_model, make_record
from snugfit._training.loop import train_phase
from snugfit._training.network import NetworkTrainer
from snugfit._training.strategy import TrainingData
from snugfit._training.task import (
    Classification,
    Detection,
    StepResult,
    measure,
    needs_classes,
    precision_context,
    task_of,
)
from snugfit.detection import yolov2_loss
from snugfit.errors import UsageError

CPU = torch.device("cpu")
ANCHORS = ((0.2, 0.2), (0.6, 0.5))
BOXES = {"task": "detect", "anchors": ANCHORS, "most_boxes": 3}
SURE = 12.0


def perfect(targets, cells=4, classes=2):
    """Outputs that say exactly what the targets (B, M, 5) do, by the anchor of the same size."""
    outputs = torch.full((len(targets), len(ANCHORS), 5 + classes, cells, cells), -SURE)
    for image, rows in enumerate(targets):
        for label, x, y, width, height in rows.tolist():
            if label < 0:
                continue
            number = 0 if width < 0.4 else 1
            place = outputs[image, number, :, int(y * cells), int(x * cells)]
            place[0], place[1] = torch.logit(torch.tensor([x * cells % 1, y * cells % 1]))
            place[2], place[3] = np.log(width / ANCHORS[number][0]), np.log(height / ANCHORS[number][1])
            place[4], place[5 + int(label)] = SURE, SURE
    return outputs.flatten(1, 2)


TARGETS = torch.tensor(
    [
        [[0, 0.3, 0.3, 0.2, 0.2], [1, 0.6, 0.7, 0.6, 0.5], [-1, 0, 0, 0, 0]],
        [[1, 0.55, 0.4, 0.2, 0.2], [-1, 0, 0, 0, 0], [-1, 0, 0, 0, 0]],
    ]
)


class Boxed(Source):
    """Four images, each with the boxes of one of the two above."""

    def batch(self, samples):
        chosen = TARGETS[[sample % 2 for sample in samples]]
        return torch.tensor([float(sample) for sample in samples]), chosen


def all_found(inputs):
    return perfect(TARGETS[inputs.long() % 2])


def none_found(inputs):
    return torch.full((len(inputs), 14, 4, 4), -SURE)


def test_workloads_name_their_task_and_survive_json():
    work = make_workload(**BOXES)
    assert task_of(work) == Detection(2, ANCHORS, 3)
    assert from_data(Workload, to_data(work)) == work
    assert task_of(make_workload()) == Classification(2)
    old = {key: value for key, value in to_data(make_workload()).items() if key not in BOXES}
    assert from_data(Workload, old) == make_workload(), "written before there were tasks"
    with pytest.raises(UsageError, match="anchors"):
        make_workload(task="detect")


def test_strategies_that_need_classes_say_so():
    assert needs_classes(make_workload()) == []
    assert "boxes train with backprop, checkpoint or tiled" in needs_classes(make_workload(**BOXES))[0]


def test_accuracy_by_hand():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 1.0]])
    score = measure(Classification(3), lambda x: x, [(logits, torch.tensor([0, 1, 1]))], CPU)
    assert (score.value, score.top5, score.samples) == (pytest.approx(2 / 3), 1.0, 3)
    assert score.confusion == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert score.per_class == [1.0, 0.5, 0.0]
    assert measure(Classification(3), lambda x: x, [], CPU).value == 0.0


def test_confusion_by_hand():
    """Six classes; logits favour the input's own number, then smaller numbers."""

    def forward(inputs):
        return -(torch.arange(6.0)[None] - inputs).abs()

    batches = [(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 2])), (torch.tensor([[5.0]]), torch.tensor([0]))]
    score = measure(Classification(6), forward, batches, CPU)
    want = torch.zeros(6, 6, dtype=torch.int64)
    want[0, 0] = want[2, 1] = want[0, 5] = 1
    assert score.confusion == want.tolist()
    assert score.top5 == 2 / 3


def test_confusion_of_few_classes_and_of_nothing():
    score = measure(Classification(2), lambda x: x.repeat(1, 2), [], CPU)
    assert score.confusion == [[0, 0], [0, 0]] and score.top5 == 0
    pair = (torch.ones(3, 1), torch.tensor([0, 1, 1]))
    score = measure(Classification(2), lambda x: x.repeat(1, 2), [pair], CPU)
    assert score.confusion == [[1, 0], [2, 0]] and score.top5 == 1.0


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_label_smoothing_is_a_mixture_of_all_classes(smoothing):
    """By hand in float64: the target is 1 - X of the class and X / K of each class; and as torch computes it."""
    logits, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    task = task_of(replace(make_workload(), classes=4, label_smoothing=smoothing))
    targets = torch.full((5, 4), smoothing / 4, dtype=torch.float64)
    targets[torch.arange(5), labels] += 1 - smoothing
    by_hand = -(targets * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(task.loss(logits, labels), by_hand, rtol=1e-12, atol=0)
    assert task.loss(logits, labels) == F.cross_entropy(logits, labels, label_smoothing=smoothing)


def test_precision_of_perfect_and_of_no_boxes():
    task = task_of(make_workload(**BOXES))
    score = measure(task, all_found, Boxed(4).in_order(2), CPU)
    assert (score.value, score.samples, score.per_class) == (1.0, 4, [1.0, 1.0])
    assert (score.top5, score.confusion) == (None, [])
    assert measure(task, none_found, Boxed(4).in_order(3), CPU).value == 0.0


def test_perfect_outputs_have_next_to_no_loss():
    task = task_of(make_workload(**BOXES))
    outputs = perfect(TARGETS)
    assert task.loss(outputs, TARGETS) == yolov2_loss(outputs, TARGETS, ANCHORS) < 1e-3
    assert task.correct(outputs, TARGETS) is None


def test_a_mixed_image_counts_as_its_likeliest_class():
    task = task_of(make_workload(mixed=True, classes=3))
    assert task.correct(torch.eye(3), torch.tensor([[0.6, 0.4, 0], [0.6, 0.4, 0], [0, 0.1, 0.9]])) == 2


@pytest.mark.parametrize(
    "work",
    [make_workload(), make_workload(mixed=True), make_workload(**BOXES)],
    ids=["classify", "mixed", "detect"],
)
def test_made_up_targets_are_like_real_ones(work):
    task = task_of(work)
    outputs = torch.randn(5, 2) if work.task == "classify" else torch.randn(5, 14, 4, 4)
    targets = task.synthetic_targets(5, "cpu")
    assert task.loss(outputs, targets).isfinite()
    assert task.synthetic_targets(5, "meta").shape == targets.shape
    if work.task == "detect":
        assert targets.shape == (5, 3, 5) and set(targets[..., 0].flatten().tolist()) <= {0.0, 1.0}
        assert targets[..., 1:].min() >= 0.1 and targets[..., 1:].max() <= 0.9


def detector():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(8, 14, 1)]
    return nn.Sequential(*layers).double()


def test_a_detector_trains_like_plain_pytorch():
    module, settings = detector(), OptimizerSettings("sgd", lr=0.01, momentum=0.9, weight_decay=0.01)
    plain = copy.deepcopy(module)
    trainer = NetworkTrainer(module, module, make_workload(optimizer=settings, **BOXES))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
    for step in range(4):
        images = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = yolov2_loss(plain(images), TARGETS.double(), ANCHORS)
        loss.backward()
        optimizer.step()
        result = trainer.step(images, TARGETS.double())
        assert result.correct is None and result.loss == pytest.approx(loss.item(), rel=1e-10)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


class Silent(OneWeight):
    """A trainable whose single samples do not tell."""

    def step(self, inputs, labels, share=1.0, update=True):
        self.calls.append(share)
        return StepResult(1.0, None)


def test_events_have_no_training_accuracy_and_name_the_metric(tmp_path):
    events = []
    run = make_run(tmp_path, [events.append], epochs=1, **BOXES)
    train_phase(Silent(), Boxed(4), PHASE, run, lambda: 0.25)
    (epoch,) = [event for event in events if isinstance(event, EpochDone)]
    assert (epoch.metric, epoch.accuracy, epoch.val_accuracy) == ("mAP50", None, 0.25)
    assert all(event.accuracy is None for event in events if isinstance(event, StepDone))


@pytest.mark.parametrize("test", [True, False])
def test_the_record_holds_map50(tmp_path, test):
    data = TrainingData(Boxed(4), Boxed(4), Boxed(2) if test else None, ("a", "b"))
    run = make_run(tmp_path, **BOXES)
    found = evaluate_model(all_found, data, run, 2)
    record = make_record(run, data, Outcome("backprop", {}, found, {"full": 1, "trained_model": 1}))
    assert record.accuracy == {"val": 1.0, "test": 1.0 if test else None, "test_top5": None, "map50": 1.0}
    assert record.confusion == []


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_what_torch_cannot_do_in_a_precision_is_told_from_what_a_network_cannot(precision):
    inputs = torch.ones(4)
    said = f"--precision {precision}: .* not implemented for .* use another one"
    with pytest.raises(UsageError, match=said), precision_context(inputs, precision):
        torch.special.erfcx(inputs.to(getattr(torch, precision)))
    for words in ("", "no head for videos"):
        with pytest.raises(NotImplementedError, match=words), precision_context(inputs, precision):
            raise NotImplementedError(words)
