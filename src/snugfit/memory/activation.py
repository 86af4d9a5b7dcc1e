"""Activation memory of a training step, block by block: equations 1 to 6 of Yoosefi et al., over records of layers.

``profiling/activation.py`` makes the records: bytes per image by the rule of the paper, or bytes of a whole batch from
the real lifetimes of tensors. The paper covers the forward pass alone; a record may also contain
the bytes of its layer's backward pass.
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
        backward_bytes: alive while it runs backward, without what it and earlier layers keep; None if it does
            not run backward, or if that is left out, as in the paper.
    """

    name: str
    block: int
    temporary_bytes: int
    kept_bytes: int = 0
    backward_bytes: int | None = None


@dataclass(frozen=True)
class LayerMemory:
    """One layer with the memory kept by earlier layers.

    Attributes:
        cumulative_bytes: kept by earlier layers (equation 3).
        peak_bytes: the most that is alive while it runs, forward or backward: the term in equation 2.
        backward: whether that is in its backward pass.
    """

    name: str
    temporary_bytes: int
    kept_bytes: int
    cumulative_bytes: int
    peak_bytes: int
    backward: bool = False


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
    """A network's activation memory; JSON-able.

    Attributes:
        peak_bytes: M_act, the most that is alive at once (equation 1).
        peak_block: number of the block where that is.
        cumulative_bytes: kept for the backward pass at the end of the forward pass.
        total_bytes: M, with parameters, gradients and optimizer state, for the whole batch (equation 4).
        images: number of images that the bytes of layers and blocks refer to: 1 or ``batch``.
        parameter_bytes: M_par.
    """

    peak_bytes: int
    peak_block: int
    cumulative_bytes: int
    total_bytes: int
    batch: int
    images: int
    parameter_bytes: int
    blocks: tuple[BlockMemory, ...]

    def sensitive(self) -> tuple[int, ...]:
        """Numbers of the blocks whose temporary memory is above the whole network's cumulative memory (section V)."""
        return tuple(index for index, block in enumerate(self.blocks) if block.temporary_bytes > self.cumulative_bytes)


def add_up(
    names: Sequence[str], records: Sequence[LayerRecord], *, parameter_bytes: int, batch: int = 1, images: int = 1
) -> ActivationMemory:
    """Apply equations 1 to 6 to the layers of a network with blocks of these names.

    ``parameter_bytes`` are those of weights, and of gradients and optimizer state where they count; the records' bytes
    refer to ``images`` images, which divide the ``batch`` of a step.

    Raises:
        ValueError: a block has no layer, a layer belongs to none, or ``images`` does not divide ``batch``.
    """
    if {record.block for record in records} != set(range(len(names))):
        raise ValueError("every block must have layers, and every layer a block")
    if batch < 1 or batch % images:
        raise ValueError(f"bytes of {images} images do not make up a batch of {batch}")
    kept = list(accumulate((record.kept_bytes for record in records), initial=0))
    layers = [_layer(record, before, upto) for record, before, upto in zip(records, kept, kept[1:], strict=False)]
    blocks = tuple(_block(number, name, records, layers) for number, name in enumerate(names))
    peaks = [block.peak_bytes for block in blocks]
    total = max(peaks) * (batch // images) + parameter_bytes
    return ActivationMemory(
        max(peaks), peaks.index(max(peaks)), kept[-1], total, batch, images, parameter_bytes, blocks
    )


def _layer(record: LayerRecord, before: int, upto: int) -> LayerMemory:
    """Equation 2's term for one layer; in its backward pass its own saved tensors are still alive."""
    forward = record.temporary_bytes + before
    backward = 0 if record.backward_bytes is None else record.backward_bytes + upto
    return LayerMemory(
        record.name, record.temporary_bytes, record.kept_bytes, before, max(forward, backward), backward > forward
    )


def _block(number: int, name: str, records: Sequence[LayerRecord], layers: Sequence[LayerMemory]) -> BlockMemory:
    own = tuple(layer for record, layer in zip(records, layers, strict=True) if record.block == number)
    temporary, peak = (max(layer.temporary_bytes for layer in own), max(layer.peak_bytes for layer in own))
    return BlockMemory(name, temporary, own[-1].cumulative_bytes + own[-1].kept_bytes, peak, own)
