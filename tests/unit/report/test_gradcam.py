"""Grad-CAM against formulas written out by hand, in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._report.pictures import grad_cam
from snugfit.errors import ModelError
from snugfit.local import NetworkStats, UnitShape, build_local_loss
from snugfit.local.assignment import ExitModel


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
    images, classes = torch.randn(2, 1, 6, 6), torch.tensor([4, 1])
    found = grad_cam(model, images, classes)
    weights = linear.weight.detach()[classes].view(2, 3, 16).mean(2)
    maps = (weights[:, :, None, None] * conv(images).relu().detach()).sum(1).relu()
    expected = F.interpolate(maps[:, None], (6, 6), mode="bilinear", align_corners=False)[:, 0]
    assert torch.equal(found.classes, classes) and torch.allclose(found.maps, expected, atol=1e-12)


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
