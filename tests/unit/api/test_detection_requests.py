"""Requests to detect: what a workload is made of, and what does not go together."""

import numpy as np
import pytest
import tiny_boxes
import torch
from torch import nn

from snugfit._api.planning import profile_request
from snugfit._core.option_groups import DataOptions, ModelOptions, TrainingOptions
from snugfit._core.request import Request
from snugfit._data import load_boxed
from snugfit._engine.builder import assemble, own_splits
from snugfit.detection import anchors_for
from snugfit.errors import ModelError, UnknownNameError, UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_boxes.write_yolo(tmp_path_factory.mktemp("boxes"), (("train", 12), ("val", 4)), size=32)


def request(folder, model="yolov2_16", size=32, task="detect", **training):
    data = DataOptions(str(folder), task=task)
    return Request(ModelOptions(model, image_size=size), data, training=TrainingOptions(**training))


def test_a_workload_holds_anchors_and_boxes(folder):
    made = assemble(request(folder))
    work, train = made.workload, made.splits.train
    assert (work.task, work.most_boxes, work.classes, work.train_count) == ("detect", train.most, 2, 12)
    sizes = train.boxes.rows[:, 3:5]
    assert work.anchors == anchors_for(sizes, 5)
    assert (made.architecture.task, made.architecture.anchors) == ("detect", work.anchors)
    assert (work.optimizer.name, work.optimizer.lr, work.optimizer.momentum) == ("sgd", 0.0003, 0.9)
    images, targets = next(iter(made.training_data().train.epoch(0, 4)))
    assert images.shape == (4, 3, 32, 32) and targets.shape == (4, work.most_boxes, 5)


def test_own_learning_rate_and_optimizer(folder):
    assert assemble(request(folder, lr=0.01)).workload.optimizer.lr == 0.01
    found = assemble(request(folder, optimizer="schedulefree")).workload.optimizer
    assert (found.name, found.lr, found.schedule) == ("schedulefree", 0.0003, "constant")


def test_a_module_of_ones_own_may_have_any_number_of_anchors(folder):
    module = nn.Sequential(nn.Conv2d(3, 4, 3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3 * 7, 1))
    made = assemble(request(folder), module=module)
    assert len(made.workload.anchors) == 3
    given = load_boxed(str(folder), image_size=32)
    assert own_splits(given, request(folder)) is given
    assert np.array_equal(assemble(request(folder), given, module).splits.val.labels, np.zeros(4))


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"model": "vgg16"}, ModelError, "must output feature maps of 7 channels for each anchor, as yolov2_16 does"),
        ({"size": 40}, ModelError, "multiple of 16, not 40"),
        ({"erase": 0.5}, UsageError, "--erase would hide objects"),
        ({"class_weights": "balanced"}, UsageError, "--class-weights applies to cross entropy"),
        ({"loss": "focal"}, UsageError, "--loss focal is to classify"),
        ({"mixup": 0.2}, UsageError, "--mixup 0.2 mixes classes of images"),
        ({"label_smoothing": 0.1}, UsageError, "--label-smoothing applies to cross entropy"),
    ],
)
def test_what_does_not_go_together(folder, changes, kind, said):
    with pytest.raises(kind, match=said):
        assemble(request(folder, **changes))


def test_classes_and_boxes_are_not_mixed_up(folder):
    with pytest.raises(ModelError, match="--task detect takes a model that outputs feature maps of boxes"):
        assemble(request("digits", task="classify"))
    with pytest.raises(UsageError, match="the data has boxes; --task detect"):
        assemble(request(folder, model="vgg16", task="classify"), load_boxed(str(folder), image_size=32))
    with pytest.raises(UsageError, match="boxes are read from files"):
        own_splits(torch.utils.data.TensorDataset(torch.zeros(1)), request(folder))
    digits = assemble(request("digits", model="vgg16", task="classify")).splits
    with pytest.raises(UsageError, match="the data has no boxes"):
        assemble(request(folder), digits)
    with pytest.raises(UsageError, match="profile measures units"):
        profile_request(request(folder))
    with pytest.raises(UnknownNameError, match="detect"):
        DataOptions(task="boxes")
