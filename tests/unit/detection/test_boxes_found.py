"""From outputs to boxes, suppression, mAP and anchors, against slow versions and numbers by hand."""

import numpy as np
import pytest
import slow_yolo
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugfit.detection import (
    COCO_ANCHORS,
    Detections,
    MeanAveragePrecision,
    anchors_for,
    average_precision,
    corners,
    detections,
    non_maximum_suppression,
    pairwise_iou,
)
from snugfit.detection.boxes import shape_iou

ANCHORS = ((0.2, 0.3), (0.6, 0.5))


def random_boxes(seed, *shape):
    draws = torch.rand((*shape, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draws * torch.tensor([0.6, 0.6, 0.4, 0.4]) + torch.tensor([0.2, 0.2, 0.1, 0.1])


def test_corners_by_hand():
    assert corners(torch.tensor([0.5, 0.4, 0.2, 0.6])).tolist() == pytest.approx([0.4, 0.1, 0.6, 0.7])


@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(1, 6))
def test_overlap_of_pairs(seed, one, other):
    a, b = random_boxes(seed, one), random_boxes(seed + 1, other)
    want = [[slow_yolo.overlap(x, y) for y in b.tolist()] for x in a.tolist()]
    assert pairwise_iou(a, b).tolist() == [pytest.approx(row) for row in want]


@given(st.integers(0, 10**6), st.integers(0, 150))
def test_suppression_keeps_what_the_greedy_loop_keeps(seed, count):
    boxes = random_boxes(seed, count)
    classes = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed))
    found = [(float(-i), c, tuple(b)) for i, (c, b) in enumerate(zip(classes.tolist(), boxes.tolist(), strict=True))]
    want = [int(-score) for score, _, _ in slow_yolo.surely(found, -1e9, 0.45)]
    assert non_maximum_suppression(boxes, classes, 0.45).nonzero()[:, 0].tolist() == want


@given(st.integers(0, 10**6))
def test_detections_are_those_of_a_loop_over_predictors(seed):
    generator = torch.Generator().manual_seed(seed)
    outputs = (torch.rand((2, 2 * 8, 3, 4), generator=generator, dtype=torch.float64) - 0.4) * 5
    for image, found in zip(outputs.tolist(), detections(outputs, ANCHORS, 0.3), strict=True):
        every = []
        for said, box in slow_yolo.predicted(image, ANCHORS, 3).values():
            shares = slow_yolo.softmax(said[5:])
            every.append((slow_yolo.sigmoid(said[4]) * max(shares), shares.index(max(shares)), box))
        want = slow_yolo.surely(every, 0.3, 0.45)
        assert found.scores.tolist() == pytest.approx([score for score, _, _ in want])
        assert found.classes.tolist() == [label for _, label, _ in want]
        assert found.boxes.tolist() == [pytest.approx(box) for _, _, box in want]


def test_no_more_boxes_than_asked_for_and_none_below_the_threshold():
    outputs = torch.zeros(1, 2 * 8, 8, 8)
    assert len(detections(outputs, ANCHORS, 0.1, most=5)[0].boxes) == 5
    assert detections(outputs, ANCHORS, 0.2)[0].boxes.shape == (0, 4)


def found_of(rows):
    scores, classes, boxes = zip(*rows, strict=True) if rows else ((), (), ())
    return Detections(
        torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4), torch.tensor(scores), torch.tensor(classes).long()
    )


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_map_equals_the_brute_force_area_under_the_curve(seed, count):
    rng = np.random.default_rng(seed)
    meter, images = MeanAveragePrecision(3), []
    scores = iter(rng.permutation(100) / 100 + 0.001)
    for _ in range(count):
        boxes = random_boxes(int(rng.integers(99)), rng.integers(0, 5)).tolist()
        truths = [[int(rng.integers(3)), *box] for box in boxes]
        near = [[t[0], *(np.array(t[1:]) * rng.uniform(0.8, 1.2, 4))] for t in truths for _ in range(2)]
        rows = sorted([(float(next(scores)), int(t[0]), tuple(t[1:])) for t in near], key=lambda row: -row[0])
        images.append((rows, truths))
        padded = torch.tensor([*truths, [-1, 0, 0, 0, 0]], dtype=torch.float64)
        meter.add(found_of(rows), padded)
    assert meter.value == pytest.approx(slow_yolo.mean_average_precision(images, 3))


def test_average_precision_by_hand():
    """Found, missed, found of two: precision 1 up to recall 1/2, then 2/3."""
    scores, right = np.array([0.9, 0.8, 0.7]), np.array([True, False, True])
    assert average_precision(scores, right, 2) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert average_precision(scores, right, 4) == pytest.approx(0.25 * 1 + 0.25 * 2 / 3)
    assert average_precision(np.zeros(0), np.zeros(0, dtype=bool), 3) == 0


def test_one_object_is_found_once_and_by_its_own_class():
    box = (0.5, 0.5, 0.2, 0.2)
    meter = MeanAveragePrecision(2)
    meter.add(found_of([(0.9, 1, box), (0.8, 0, box), (0.7, 0, box)]), torch.tensor([[0, *box]], dtype=torch.float64))
    assert meter.per_class == [1.0, None]
    assert meter.value == 1.0


def test_nothing_found_or_nothing_there():
    meter = MeanAveragePrecision(2)
    assert meter.value == 0.0
    meter.add(found_of([(0.9, 1, (0.5, 0.5, 0.2, 0.2))]), torch.zeros(0, 5))
    assert (meter.value, meter.per_class) == (0.0, [None, None])
    meter.add(found_of([]), torch.tensor([[1.0, 0.5, 0.5, 0.1, 0.1]]))
    assert meter.per_class == [None, 0.0]


def test_anchors_are_the_means_of_clear_clusters():
    rng = np.random.default_rng(0)
    centres = np.array([[0.05, 0.1], [0.3, 0.1], [0.2, 0.4], [0.6, 0.5], [0.5, 0.9]])
    sizes = np.concatenate([centre + rng.uniform(-0.005, 0.005, (40, 2)) for centre in centres])
    found = anchors_for(rng.permutation(sizes), 5)
    assert np.array(found) == pytest.approx(centres[np.argsort(centres.prod(axis=1))], abs=0.002)
    assert found == anchors_for(sizes, 5), "they do not depend on the order of the boxes"


def test_clusters_overlap_better_than_the_published_anchors():
    rng = np.random.default_rng(1)
    sizes = rng.uniform(0.02, 0.3, (500, 2))
    own, published = (
        shape_iou(torch.from_numpy(sizes), torch.tensor(each)).amax(dim=1).mean()
        for each in (anchors_for(sizes, 5), COCO_ANCHORS)
    )
    assert own > published


def test_anchors_without_boxes_or_with_few():
    assert anchors_for(np.zeros((0, 2)), 5) == COCO_ANCHORS
    assert COCO_ANCHORS[0] == pytest.approx((0.57273 / 13, 0.677385 / 13))
    assert anchors_for(np.array([[0.2, 0.3]]), 3) == ((0.2, 0.3),) * 3
