"""The settings of ``blockwise``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from snugfit._core.options import CacheDtype


@dataclass(frozen=True)
class BlockwiseSettings:
    """Settings of ``blockwise``.

    Attributes:
        local_loss: name of the local loss.
        rho: grouping threshold of Algorithm 1.
        block_units: most units in a block; by default 2 with ``saturation_stop``, otherwise any number.
        adaptive_batch: a batch size per block (the paper's AB-LL); otherwise the same for all.
        residency: ``block`` keeps the active block in memory, ``all`` every unit (classic local learning).
        saturation_stop: stop once a block no longer improves validation accuracy.
        exit_tolerance: accuracy to give up for a smaller exit; None is one standard error.
        cache: ``always`` keeps activations on disk, ``never`` recomputes them; ``auto`` also proposes ``never`` if the
            storage budget is too small.
        cache_dtype: stored type of activations.
        views: number of cached augmented passes.
        blocks: (first unit, last unit, batch size) of each block; set by ``propose``.
        test_batch: batch size of the test of the exit model; set by ``propose``.
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
