"""Seeds for everything random, derived by name so that no two uses share a random stream."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """Hash names and numbers to a seed in ``[0, 2**63)``, the same on every machine and in every process.

    ``derive_seed(7, "shuffle", 3)`` is unrelated to ``derive_seed(7, "shuffle", 4)`` and ``derive_seed(7, "crop", 3)``.
    """
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(seed: int) -> None:
    """Seed torch (every device), numpy's global generator and Python's ``random``."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> Tensor:
    """State of torch's global CPU generator, uint8 (n,)."""
    return torch.get_rng_state()


def set_rng_state(state: Tensor) -> None:
    """Restore a state (n,) from :func:`rng_state`."""
    torch.set_rng_state(state)


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Row order of one epoch: a permutation of ``range(rows)`` (int64) that depends on ``seed`` and ``epoch`` alone.

    ``snugfit._data.Batches`` uses the same order, so that cached and recomputed activations train identically.
    """
    return np.random.default_rng((seed & 0xFFFFFFFF, 0, epoch)).permutation(rows)
