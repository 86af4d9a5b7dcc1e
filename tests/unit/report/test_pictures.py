"""Spectra, t-SNE and Grad-CAM against slow and hand-made results."""

import math
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._report.pictures import (
    FEWEST,
    class_means,
    closest_pair,
    grad_cam,
    group_agreement,
    nearest,
    project,
    prominence,
    spatial_frequencies,
    spectrum,
)
from snugfit.errors import DataError, ModelError, UnusableInputError, UsageError
from snugfit.local import NetworkStats, UnitShape, build_local_loss
from snugfit.local.assignment import ExitModel

NETWORK = NetworkStats(narrowest=8, widest=16, classes=4)


@pytest.mark.parametrize("length", [16, 33])
@pytest.mark.parametrize("periods", [1, 5])
def test_a_cosine_has_one_peak_at_its_frequency(length, periods):
    times = torch.arange(length, dtype=torch.float64)
    found = spectrum(3 * torch.cos(2 * math.pi * periods / length * times + 0.7))
    expected = torch.zeros(length // 2 + 1, dtype=torch.float64)
    expected[periods] = 3 * length / 2
    assert torch.allclose(found, expected, atol=1e-9)
    assert spatial_frequencies(length)[periods] == pytest.approx(periods / length)


def test_a_spectrum_is_the_sum_that_defines_it():
    signals = torch.randn(2, 3, 10, dtype=torch.float64)
    times, frequencies = torch.arange(10, dtype=torch.float64), torch.arange(6, dtype=torch.float64)
    waves = torch.exp(-2j * math.pi * frequencies[:, None] * times / 10)
    assert torch.allclose(spectrum(signals), (signals.to(waves.dtype) @ waves.T).abs())


def test_means_are_those_of_each_class_over_all_batches():
    latents, labels = torch.randn(12, 5), torch.tensor([0, 1, 2, 0, 1, 2, 2, 2, 0, 1, 3, 3])
    batches = zip(latents.split(5), labels.split(5), strict=True)
    found = class_means(batches, (2, 0))
    assert torch.allclose(found, torch.stack([latents[labels == label].mean(0) for label in (2, 0)]))


def test_a_class_without_samples_is_said():
    with pytest.raises(DataError, match="no image of class 7"):
        class_means([(torch.ones(2, 3), torch.tensor([0, 1]))], (0, 7))


def test_prominence_compares_with_a_typical_frequency_and_leaves_the_constant_out():
    basis = torch.tensor([[9.0, 1, 3, 1, 1, 1], [9.0, 1, 1, 1, 1, 2]])
    latents = torch.tensor([[50.0, 2, 8, 2, 1, 3], [50.0, 1, 1, 1, 1, 1]])
    assert prominence(latents, basis).tolist() == [4, 1]
    assert prominence(torch.zeros(1, 4), torch.ones(1, 4)).tolist() == [0]


@pytest.mark.parametrize("mode", ["paper", "published"])
@pytest.mark.parametrize("name", ["lls", "lls-m", "lls-mxm"])
def test_the_basis_in_use_gives_the_logits(name, mode):
    loss = build_local_loss(f"{name}:mode={mode}", UnitShape((6, 8, 8)), NETWORK).double()
    features = torch.randn(5, 6, 8, 8, dtype=torch.float64)
    temperature = 0.5 if mode == "published" else 1.0
    assert torch.allclose(loss.read(features) @ loss.basis_in_use().T / temperature, loss.predict(features))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("classes", [FEWEST, 10, 95])
def test_a_projection_is_always_the_same_and_keeps_neighbours(classes):
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.normal(size=(-(-classes // 5), classes)), 5, 0)[:classes]
    rows += 0.01 * rng.normal(size=rows.shape)
    points = project(rows)
    assert points.shape == (classes, 2) and np.isfinite(points).all()
    assert np.array_equal(points, project(rows))
    if classes > 50:
        assert (nearest(points) // 5 == np.arange(classes) // 5).mean() > 0.9


def test_too_few_classes_are_refused():
    with pytest.raises(UsageError, match="4 classes or more, not 3"):
        project(np.eye(3))


def test_scikit_learn_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(UnusableInputError, match=r"snugfit\[demo\]"):
        project(np.eye(9))


def test_the_nearest_row_is_found():
    rows = np.random.default_rng(1).normal(size=(30, 7))
    gaps = np.linalg.norm(rows[:, None] - rows, axis=2) + np.diag([np.inf] * 30)
    assert np.array_equal(nearest(rows), gaps.argmin(1))
    assert set(closest_pair(rows)) == set(np.unravel_index(gaps.argmin(), gaps.shape))


def test_group_agreement_counts_neighbours_of_the_same_group():
    rows = np.array([[0.0, 0], [0, 1], [9, 9], [9, 8], [9, 7.5], [0, 1.5]])
    assert group_agreement(rows, ["a", "a", "b", "b", "b", "c"]) == (pytest.approx(4 / 6), pytest.approx(8 / 30))


@pytest.fixture(autouse=True)
def doubles():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Pooled(nn.Module):
    """Two convolutions, global average pooling, a linear layer; activation and residual sum are functions."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.norm = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
        )
        self.linear = nn.Linear(4, 3)

    def features(self, images):
        before = F.relu(self.first(images))
        return F.relu(self.norm(self.last(before)) + before)

    def forward(self, images):
        return self.linear(self.features(images).mean((2, 3)))


def test_after_global_average_pooling_it_is_cam_divided_by_the_pixels():
    model, images = Pooled().eval(), torch.randn(3, 2, 6, 5)
    found = grad_cam(model, images)
    with torch.no_grad():
        features, logits = model.features(images), model(images)
        cam = torch.einsum("bc,bchw->bhw", model.linear.weight[logits.argmax(1)], features)
    assert torch.equal(found.classes, logits.argmax(1)) and torch.allclose(found.logits, logits)
    assert torch.allclose(found.maps, cam.relu() / 30, atol=1e-12) and found.maps.max() > 0


def test_gradients_are_averaged_over_the_map():
    """A linear layer on the flattened map: the gradient of the score is its row of weights."""
    conv, linear = nn.Conv2d(1, 3, 3), nn.Linear(3 * 4 * 4, 5)
    model = nn.Sequential(conv, nn.ReLU(inplace=True), nn.Flatten(), linear)
    images = torch.randn(2, 1, 6, 6)
    found = grad_cam(model, images)
    weights = linear.weight.detach()[model(images).argmax(1)].view(2, 3, 16).mean(2)
    maps = (weights[:, :, None, None] * conv(images).relu().detach()).sum(1).relu()
    expected = F.interpolate(maps[:, None], (6, 6), mode="bilinear", align_corners=False)[:, 0]
    assert torch.allclose(found.maps, expected, atol=1e-12)


def test_pools_end_the_map_and_convolutions_of_single_pixels_are_passed_over():
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU())
    head = nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Flatten())
    images = torch.randn(2, 1, 8, 8)
    found = grad_cam(nn.Sequential(body, head), images)
    features = body(images).detach().requires_grad_()
    score = head(features).gather(1, found.classes[:, None]).sum()
    weights = torch.autograd.grad(score, features)[0].mean((2, 3), keepdim=True)
    expected = F.interpolate((weights * features.detach()).sum(1, keepdim=True).relu(), (8, 8), mode="bilinear")
    assert torch.allclose(found.maps, expected[:, 0], atol=1e-12)


@pytest.mark.parametrize("name", ["aan", "lls", "lls-mxm"])
def test_exits_are_explained_too(name):
    loss = build_local_loss(name, UnitShape((4, 6, 6)), NetworkStats(4, 4, 3)).double()
    model = ExitModel(nn.Sequential(nn.Conv2d(1, 4, 3), nn.LeakyReLU()), loss).eval()
    found = grad_cam(model, torch.randn(2, 1, 8, 8))
    assert found.maps.shape == (2, 8, 8) and found.maps.min() >= 0 and found.maps.isfinite().all()


def test_nothing_is_left_behind_and_frozen_models_work():
    model, images = Pooled().eval(), torch.randn(2, 2, 6, 6)
    expected = grad_cam(model, images).maps
    assert all(parameter.grad is None for parameter in model.parameters()) and not images.requires_grad
    with torch.no_grad():
        assert torch.equal(grad_cam(model.requires_grad_(False), images).maps, expected)


def test_what_cannot_be_explained_is_said():
    with pytest.raises(ModelError, match="no convolution"):
        grad_cam(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), torch.randn(1, 1, 4, 4))
    conv = nn.Conv2d(1, 1, 3)

    def deaf(images):
        conv(images)
        return images.flatten(1)[:, :3]

    with pytest.raises(ModelError, match="do not depend"):
        grad_cam(deaf, torch.randn(1, 1, 4, 4))
