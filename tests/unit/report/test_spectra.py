"""Spectra: a wave has its own frequency, and activations follow the basis that they were made of."""

import math

import pytest
import torch

from snugfit._report.pictures import class_means, prominence, spatial_frequencies, spectrum
from snugfit.errors import DataError
from snugfit.local import NetworkStats, UnitShape, build_local_loss

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
