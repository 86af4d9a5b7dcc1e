"""The settings of ``blockwise``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from snugfit._core.literals import CacheDtype


@dataclass(frozen=True)
class BlockwiseSettings:
    """Settings of ``blockwise``.

    Attributes:
        local_loss: name of the local loss.
        rho: grouping threshold of Algorithm 1.
        block_units: most units in a block; with ``saturation_stop`` 2 unless said otherwise, else any number.
        adaptive_batch: a batch size per block (the paper's AB-LL); otherwise one for all.
        residency: ``block`` keeps the active block in memory, ``all`` every unit (classic local learning).
        saturation_stop: stop once a finished block no longer improves validation accuracy.
        exit_tolerance: accuracy that may be given up for a smaller exit; None is one standard error.
        cache: ``always`` keeps activations on disk, ``never`` recomputes them; ``auto`` proposes both where the
            storage budget is too small.
        cache_dtype: stored type of activations.
        views: augmented passes that are cached.
        blocks: (first unit, last unit, batch size) of each block; filled in by ``propose``.
        test_batch: images at once when the exit model is tested; filled in by ``propose``.
    """

    name: ClassVar[str] = "blockwise"
    exact: ClassVar[bool] = False

    local_loss: str = "aan"
    rho: float = 0.4
    block_units: int | None = None
    adaptive_batch: bool = True
    residency: Literal["block", "all"] = "block"
    saturation_stop: bool = False
    exit_tolerance: float | None = None
    cache: Literal["auto", "always", "never"] = "auto"
    cache_dtype: CacheDtype = "float16"
    views: int = 1
    blocks: tuple[tuple[int, int, int], ...] = ()
    test_batch: int = 1
