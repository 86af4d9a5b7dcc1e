"""Models that cannot become a chain, and what the messages say."""

import random

import numpy as np
import pytest
import torch
from chain_zoo import SHAPE, StochasticDepth
from torch import nn

from snugfit._chain import Chain
from snugfit.errors import ModelError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.conv2, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1), nn.Linear(3, 5)

    def forward(self, x):
        return self.fc(self.conv2(self.conv(x)).mean((2, 3)))


class DataDependent(Net):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return super().forward(x)


class OtherPathInTraining(Net):
    def forward(self, x):
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


class TwoOutputs(Net):
    def forward(self, x):
        return super().forward(x), x


class TwoInputs(Net):
    def forward(self, x, y):
        return super().forward(x + y)


class SameLayerTwice(Net):
    def forward(self, x):
        return self.fc(self.conv(self.conv(x)).mean((2, 3)))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Conv2d(3, 3, 1)
        self.other.weight = self.conv2.weight

    def forward(self, x):
        return super().forward(self.other(x))


class Residual(Net):
    def forward(self, x):
        return x + self.conv(x)


class UnusedParameter(Net):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DataDependent, r"cannot be traced: .*control flow.*test_chain_errors.py:\d+ in forward.*Chain.from_units"),
        (OtherPathInTraining, "another path in training mode.*Chain.from_units"),
        (TwoOutputs, "must return one tensor"),
        (TwoInputs, r"more than one input \(y\)"),
        (SameLayerTwice, "tied weights: conv.weight"),
        (Tied, "tied weights: other.weight .*conv2.weight"),
        (Residual, "nothing to split"),
        (UnusedParameter, "gain is never used"),
        (nn.Flatten, "no convolution or linear layer"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 5)), "nothing to split"),
    ],
)
def test_model_error(model, message):
    built = model()
    with pytest.raises(ModelError, match=message) as caught:
        Chain.from_module(built, SHAPE)
    assert "\n" not in str(caught.value)
    assert all(type(module.training) is bool for module in built.modules())


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 2, 2)])
def test_input_that_does_not_run(shape):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 5))
    with pytest.raises(ModelError, match="does not run on an input of shape " + "x".join(map(str, shape))):
        Chain.from_module(model, shape)


def test_inner_module_with_weights_that_looks_at_training_stays_whole():
    class Inner(Net):
        def forward(self, x):
            return self.conv2(self.conv(x)) if self.training else self.conv(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner, self.drop = nn.Conv2d(3, 3, 1), Inner(), StochasticDepth()
            self.fc = nn.Linear(3, 5)

        def forward(self, x):
            return self.fc(self.drop(self.inner(self.stem(x))).mean((2, 3)))

    model = Outer()
    chain = Chain.from_module(model, SHAPE)
    assert [unit.name for unit in chain.all_units] == ["stem", "inner", "fc"]
    assert set(chain.to_module().state_dict()) == set(model.state_dict())
    x = torch.randn(2, *SHAPE)
    for training in (True, False):
        model.train(training)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(chain(x), expected)


class OneSize(nn.Module):
    """Asserts its image size in words, as timm's transformers do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x):
        height = x.shape[2]
        torch._assert(height == 8, f"Input height ({height}) doesn't match model (8)")
        return self.conv(x).flatten(1)


def test_words_of_a_traced_assertion_name_no_proxy():
    with pytest.raises(ModelError, match=r"shape 1x16x16: Input height doesn't match model \(8\)\. Check image size"):
        Chain.from_module(OneSize(), (1, 16, 16))


class FrozenByContext(Net):
    def forward(self, x):
        with torch.no_grad():
            x = self.conv(x)
        return self.fc(self.conv2(x).mean((2, 3)))


class InBfloat16(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class InFloat32(Net):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class DrawsMany(Net):
    """As many numbers as the generator makes at once, so that its position is the same."""

    def forward(self, x):
        return super().forward(x * np.random.rand(312).mean())


def with_own_train():
    model = Net()
    model.train = lambda mode=True: model
    return model


class DropsLayers(Net):
    def forward(self, x):
        return super().forward(x) if torch.rand(1).item() < 0.5 else self.fc(self.conv(x).mean((2, 3)))


class DrawsInPython(Net):
    def forward(self, x):
        return super().forward(x * random.uniform(0.9, 1.1))


class DrawsByNumpy(Net):
    def forward(self, x):
        return super().forward(x * np.random.rand())


class KeepsEvaluating:
    """Has a norm that stays in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class FreezesNorms(KeepsEvaluating, Net):
    def forward(self, x):
        return super().forward(self.norm(x))


class AveragesAllBatches(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=None)

    def forward(self, x):
        return super().forward(self.norm(x))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FrozenByContext, "under no_grad"),
        (InBfloat16, "changes autocast"),
        (InFloat32, "changes autocast"),
        (DropsLayers, "draws random numbers"),
        (DrawsInPython, "draws random numbers"),
        (DrawsByNumpy, "draws random numbers"),
        (FreezesNorms, "FreezesNorms.train of the model is overridden"),
        (with_own_train, "Net.train of the model is overridden"),
        (DrawsMany, "draws random numbers"),
    ],
)
def test_what_a_graph_would_lose_keeps_a_network_whole(kind, reason):
    torch.manual_seed(0)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2:]
    model = kind()
    torch.set_rng_state(states[0])
    with pytest.raises(ModelError, match=reason):
        Chain.from_module(model, SHAPE)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2:]) == states[1:]


def test_a_norm_that_averages_over_all_batches_keeps_a_planned_network_whole():
    assert "'norm' has momentum=None" in Chain.from_any_module(AveragesAllBatches(), SHAPE).undivided
    assert Chain.from_module(AveragesAllBatches(), SHAPE).units


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(layer):
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = layer(8, 4, sparse=True)

        def forward(self, x):
            return self.table(x.flatten(1).long().clamp(0, 7)).flatten(1)

    with pytest.raises(ModelError, match=r"'table' has sparse gradients.*sparse=False"):
        Chain.from_any_module(Looking(), SHAPE)


def test_a_frozen_part_under_no_grad_is_not_trained():
    torch.manual_seed(0)
    model = FrozenByContext()
    chain = Chain.from_any_module(model, SHAPE)
    chain.forward(torch.randn(2, *SHAPE)).sum().backward()
    assert chain.undivided and model.conv.weight.grad is None and model.conv2.weight.grad is not None


class Normalising(Net):
    """Normalises its images, which get no gradient in any case."""

    def forward(self, x):
        with torch.no_grad():
            x = (x - 0.5) / 0.25
        return super().forward(x)


class Switching(KeepsEvaluating, nn.Module):
    """Reads its mode, and has a ``train`` of its own, which its unit calls."""

    def forward(self, x):
        return self.norm(x) if self.training else x


class WithSwitch(Net):
    def __init__(self):
        super().__init__()
        self.switch = Switching()

    def forward(self, x):
        return self.fc(self.conv2(self.switch(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize("kind", [Normalising, WithSwitch])
def test_what_units_keep_is_divided(kind):
    assert len(Chain.from_module(kind(), SHAPE).units) > 1
