"""Average precision of several labels against scikit-learn's, and its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from snugfit._training.average_precision import Scores, average_precision, bytes_of_scores


@pytest.mark.parametrize("levels", [3, 20, 10**6])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_it_is_that_of_scikit_learn_also_with_equal_scores(levels: int, share: float) -> None:
    rng = np.random.default_rng(levels)
    scores, targets = rng.integers(0, levels, 300) / levels, rng.random(300) < share
    found = average_precision(torch.from_numpy(scores), torch.from_numpy(targets))
    assert found == pytest.approx(average_precision_score(targets, scores), abs=1e-12)


def test_a_class_without_images_has_none() -> None:
    assert average_precision(torch.rand(5), torch.zeros(5)) is None
    assert average_precision(torch.rand(0), torch.zeros(0)) is None
    assert Scores(2).per_class() == [None, None]


def test_batches_are_one_split() -> None:
    logits, targets = torch.randn(50, 3), (torch.rand(50, 3) < 0.3).float()
    whole, parts = Scores(3), Scores(3)
    whole.add(logits, targets)
    for rows in torch.arange(50).split(7):
        parts.add(logits[rows].to(torch.float32), targets[rows])
    assert len(parts) == 50 and whole.per_class() == parts.per_class()


def test_all_equal_scores_get_the_share_of_the_class() -> None:
    """A network that says the same of every image, such as never, gets no more than guessing."""
    assert average_precision(torch.zeros(10), torch.arange(10) < 3) == pytest.approx(0.3)


def test_its_memory_is_bounded() -> None:
    """No block is moved to make room for more, which takes its memory twice, and none keeps what it is a view of."""
    scores, whole = Scores(20), torch.randn(500, 8, 20)
    for logits in whole:
        scores.add(logits, torch.ones(8, 20))
    addresses = [block.data_ptr() for block in scores._logits]
    held = sum(block.untyped_storage().nbytes() for block in (*scores._logits, *scores._targets))
    assert held == 5 * 20 * 4000 <= bytes_of_scores(4000, 20) - 64 * 4000
    scores.add(whole[0], torch.ones(8, 20))
    assert [block.data_ptr() for block in scores._logits[:500]] == addresses
