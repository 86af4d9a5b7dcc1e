"""Every registered local loss keeps the protocol's promises."""

import pytest
import torch
from torch import nn

from snugfit._core.workload import Workload
from snugfit.errors import ModelError, UnknownNameError
from snugfit.local import LOCAL_LOSSES, LocalLoss, NetworkStats, UnitShape, build_local_loss
from snugfit.local.lls import PUBLISHED_TEMPERATURE
from snugfit.strategies.blockwise.worker import LocalUnit

NETWORK = NetworkStats(narrowest=8, widest=16, classes=4)
UNITS = [UnitShape((6, 8, 8), initial=True), UnitShape((6, 4, 4)), UnitShape((12,))]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.output_shape))
@pytest.mark.parametrize("name", sorted(LOCAL_LOSSES))
class TestEveryLocalLoss:
    def test_trains_its_unit_and_itself(self, name, unit):
        loss_module = build_local_loss(name, unit, NETWORK)
        features = torch.randn(5, *unit.output_shape, requires_grad=True)
        output = loss_module(features, torch.tensor([0, 1, 2, 3, 0]))
        output.loss.backward()
        assert isinstance(loss_module, LocalLoss)
        assert output.logits.shape == (5, 4) and output.loss.shape == ()
        assert features.grad.abs().sum() > 0
        assert all(p.grad is not None for p in loss_module.parameters())

    def test_learns_to_tell_two_samples_apart(self, name, unit):
        torch.manual_seed(0)
        loss_module = build_local_loss(name, unit, NETWORK)
        features, labels = nn.Parameter(torch.randn(2, *unit.output_shape)), torch.tensor([0, 3])
        optimizer = torch.optim.Adam([features, *loss_module.parameters()], lr=0.05)
        first = loss_module(features, labels).loss.item()
        for _ in range(100):
            optimizer.zero_grad()
            loss_module(features, labels).loss.backward()
            optimizer.step()
        assert loss_module(features, labels).loss.item() < 0.5 * first

    def test_leaves_a_frozen_unit_alone(self, name, unit):
        layer = nn.Conv2d(3, unit.output_shape[0], 1) if not unit.flat else nn.Linear(3, unit.output_shape[0])
        layer.requires_grad_(False)
        inputs = torch.randn(5, 3, *unit.output_shape[1:])
        workload = Workload("m", "d", (3, 4, 4), 4, 5, 1, 1)
        before = layer.weight.clone()
        local = LocalUnit(layer, build_local_loss(name, unit, NETWORK), workload)
        local.step(inputs, torch.tensor([0, 1, 2, 3, 0]))
        assert torch.equal(layer.weight, before)

    def test_is_built_on_meta_and_initialised_by_its_layers(self, name, unit):
        with torch.device("meta"):
            empty = build_local_loss(name, unit, NETWORK)
        assert all(p.is_meta for p in empty.parameters())
        torch.manual_seed(3)
        expected = build_local_loss(name, unit, NETWORK)
        empty.to_empty(device="cpu")
        torch.manual_seed(3)
        for module in empty.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for (key, got), want in zip(empty.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(got, want), key


def test_unknown_name_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'linear'"):
        build_local_loss("linaer", UNITS[0], NETWORK)


@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2, 2), (1, 2, 3, 4)])
def test_unusable_shapes_are_refused(shape):
    with pytest.raises((ModelError, ValueError)):
        UnitShape(shape)


@pytest.mark.parametrize("name", ["lls", "lls-m", "lls-mxm"])
def test_projections_are_not_rounded_to_bfloat16(name):
    """oneDNN would keep 1 MB of code for each batch size; 256 latents and M are read in float32."""
    loss_module = build_local_loss(name, UnitShape((64, 8, 8)), NETWORK)
    features = torch.randn(5, 64, 8, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss_module.predict(features)
        latents = loss_module.read(features)
    assert found.dtype == torch.float32
    expected = latents.float() @ loss_module.basis_in_use().T / PUBLISHED_TEMPERATURE
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
