"""Activation memory of a training step, block by block: equations 1 to 6 of Yoosefi et al., over records of layers.

``profiling/activation.py`` makes the records, bytes per image. The paper covers the forward pass alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class LayerRecord:
    """One layer of block ``block``, in order of execution.

    Attributes:
        temporary_bytes: alive while it runs forward, without what earlier layers keep for their gradients; M_tmp.
        kept_bytes: kept from here on for the backward pass; grd x M_grd. What an earlier layer already keeps is not
            counted again.
    """

    name: str
    block: int
    temporary_bytes: int
    kept_bytes: int = 0


@dataclass(frozen=True)
class LayerMemory:
    """One layer with the memory kept by earlier layers.

    Attributes:
        cumulative_bytes: kept by earlier layers (equation 3).
        peak_bytes: the most that is alive while it runs: the term in equation 2.
    """

    name: str
    temporary_bytes: int
    kept_bytes: int
    cumulative_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class BlockMemory:
    """One block of layers, in order of execution.

    Attributes:
        temporary_bytes: largest temporary memory of its layers (equation 5).
        cumulative_bytes: kept by all layers up to its last one (equation 6, the current block included).
        peak_bytes: the most that is alive while any of its layers runs (equation 2).
    """

    name: str
    temporary_bytes: int
    cumulative_bytes: int
    peak_bytes: int
    layers: tuple[LayerMemory, ...] = ()


@dataclass(frozen=True)
class ActivationMemory:
    """A network's activation memory; JSON-able. Bytes of layers and blocks are of one image.

    Attributes:
        peak_bytes: M_act, the most that is alive at once (equation 1).
        peak_block: number of the block where that is.
        cumulative_bytes: kept for the backward pass at the end of the forward pass.
        total_bytes: M, with parameters, gradients and optimizer state, for the whole batch (equation 4).
        parameter_bytes: M_par.
    """

    peak_bytes: int
    peak_block: int
    cumulative_bytes: int
    total_bytes: int
    batch: int
    parameter_bytes: int
    blocks: tuple[BlockMemory, ...]

    def sensitive(self) -> tuple[int, ...]:
        """Numbers of the blocks whose temporary memory is above the whole network's cumulative memory (section V)."""
        return tuple(index for index, block in enumerate(self.blocks) if block.temporary_bytes > self.cumulative_bytes)


def add_up(
    names: Sequence[str], records: Sequence[LayerRecord], *, parameter_bytes: int, batch: int = 1
) -> ActivationMemory:
    """Apply equations 1 to 6 to the layers of a network with blocks of these names.

    Raises:
        ValueError: a block has no layer, or a layer belongs to none.
    """
    if {record.block for record in records} != set(range(len(names))):
        raise ValueError("every block must have layers, and every layer a block")
    kept = list(accumulate((record.kept_bytes for record in records), initial=0))
    layers = [
        LayerMemory(each.name, each.temporary_bytes, each.kept_bytes, before, each.temporary_bytes + before)
        for each, before in zip(records, kept, strict=False)
    ]
    blocks = tuple(_block(number, name, records, layers) for number, name in enumerate(names))
    peaks = [block.peak_bytes for block in blocks]
    total = max(peaks) * batch + parameter_bytes
    return ActivationMemory(max(peaks), peaks.index(max(peaks)), kept[-1], total, batch, parameter_bytes, blocks)


def _block(number: int, name: str, records: Sequence[LayerRecord], layers: Sequence[LayerMemory]) -> BlockMemory:
    own = tuple(layer for record, layer in zip(records, layers, strict=True) if record.block == number)
    temporary, peak = (max(layer.temporary_bytes for layer in own), max(layer.peak_bytes for layer in own))
    return BlockMemory(name, temporary, own[-1].cumulative_bytes + own[-1].kept_bytes, peak, own)
