"""The option of strategies that accumulate micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit._core.options import Checked


@dataclass(frozen=True)
class AccumulationOptions(Checked):
    """Accumulation.

    Attributes:
        accumulate: accumulate micro-batches to the batch size, where a whole batch does not fit (off: one step for each
            batch that fits).
    """

    accumulate: bool = True
