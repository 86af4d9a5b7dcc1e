"""The feedback rules against sums written out by hand, sample by sample."""

import math

import pytest
import torch
from torch.nn import functional as F

from snugfit.strategies.feedback.rules import (
    MODULATION,
    dfa_delta,
    drtp_delta,
    modulated,
    output_error,
    pepita_delta,
    project,
    random_projection,
)

LOGITS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([2, 0, 1, 2])


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def matrix(*shape, seed=5):
    return random_projection(3, shape, seed, dtype=torch.float64)


def test_the_error_is_the_gradient_of_the_loss_at_the_logits():
    logits = LOGITS.clone().requires_grad_()
    F.cross_entropy(logits, LABELS, reduction="sum").backward()
    close(output_error(LOGITS, LABELS), logits.grad)
    by_hand = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in LOGITS.tolist()]
    for row, label in zip(by_hand, LABELS.tolist(), strict=True):
        row[label] -= 1
    close(output_error(LOGITS, LABELS), torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(5,), (2, 4, 3)])
def test_projections_by_hand(shape):
    found, signal = matrix(*shape), output_error(LOGITS, LABELS)
    assert found.shape == (3, *shape)
    by_hand = torch.stack([sum(signal[b, k] * found[k] for k in range(3)) for b in range(4)])
    close(project(signal, found), by_hand)
    close(dfa_delta(signal, found), by_hand / 4)
    close(drtp_delta(LABELS, found), torch.stack([-found[label] / 4 for label in LABELS]))
    images = torch.randn(4, *shape, dtype=torch.float64)
    close(modulated(images, signal, found), images + by_hand)


def test_the_change_of_a_response_is_averaged_over_batch_and_positions():
    first, second = torch.randn(2, 4, 3, 5, 6, dtype=torch.float64)
    close(pepita_delta(first, second), (first - second) / (4 * 5 * 6))
    close(pepita_delta(first[..., 0, 0], second[..., 0, 0]), (first - second)[..., 0, 0] / 4)


def test_matrices_are_uniform_of_the_deviation_that_the_papers_give():
    """Uniform on +-sqrt(6 / n), whose deviation is sqrt(2 / n)."""
    drawn = random_projection(10, (3, 32, 32), seed=1)
    count = 3 * 32 * 32
    assert float(drawn.abs().max()) <= math.sqrt(6 / count)
    assert float(drawn.std()) == pytest.approx(math.sqrt(2 / count), rel=0.02)
    assert abs(float(drawn.mean())) < 0.02 * math.sqrt(2 / count)
    torch.testing.assert_close(random_projection(10, (3, 32, 32), seed=1, scale=MODULATION), drawn * 0.05)


def test_a_matrix_depends_on_its_seed_alone():
    state = torch.get_rng_state()
    assert torch.equal(matrix(7), matrix(7)) and not torch.equal(matrix(7), matrix(7, seed=6))
    assert torch.equal(torch.get_rng_state(), state)
    assert random_projection(3, (7,), 5, device="meta").is_meta


def test_a_batch_may_lack_the_last_class():
    """Its labels alone do not tell how many classes there are."""
    labels, found = torch.tensor([0, 1, 0, 1]), matrix(5)
    signal = output_error(LOGITS, labels)
    assert signal.shape == (4, 3)
    close(signal[:, 2], LOGITS.softmax(1)[:, 2])
    close(drtp_delta(labels, found), -found[labels] / 4)


def test_on_the_meta_device_a_matrix_has_its_type_and_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "uniform_", None)
    drawn = random_projection(3, (7, 2), 5, dtype=torch.float64, device="meta")
    assert drawn.is_meta and drawn.dtype == torch.float64 and drawn.shape == (3, 7, 2)
