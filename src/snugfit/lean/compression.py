"""Feature maps kept for the backward pass in 8 or 4 bits per value, as in ActNN (Chen et al., ICML 2021).

256 consecutive values in memory share their minimum and a scale, and are rounded stochastically to evenly spaced codes
between minimum and maximum. The decoded values have an error of at most (max - min) / (2^bits - 1), and their
expectation is the exact value. So a gradient that is linear in one kept tensor has no bias: the weight gradient of a
convolution or linear layer, and the gradient of BatchNorm's gamma. The gradient of BatchNorm's input contains a product
of two kept values. Its bias comes from a value's product with itself, one of the N that are summed per channel: it is
at most 1 / N of the squared error. Operators that are curved in what they keep, such as GELU, softmax or Sigmoid, have
a bias of second order in the error. A ReLU must not be computed from rounded values, in which small positive ones may
be 0: :func:`snugfit.lean.use_lean` makes it keep exact bits, and poolings too. The forward pass is exact, except where
``torch.utils.checkpoint`` starts again from a kept tensor.
"""

from __future__ import annotations

import weakref
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from snugfit.lean.optimizer_state import BLOCK, scale_count
from snugfit.lean.saved_tensors import Layout, memory_order

Bits = Literal[4, 8]
SMALLEST = 16 * BLOCK
"""Tensors of fewer values are kept as they are."""
_ROWS = 240
"""Groups that are coded at once, so that several passes over them stay in the processor's cache."""
_SPREAD = 1 + 2**-20
"""Factor of the scale, so that rounding in float32 never makes a code one too large."""
_NOISE_BITS = 16
_TINY = torch.finfo(torch.float32).tiny


class Codes(NamedTuple):
    """Values in 8 or 4 bits.

    Attributes:
        codes: uint8, (G, 256), or (G, 128) with two codes of 4 bits; the second half of a group is in the upper bits.
        least: smallest value of each group, (G, 1), float32.
        scales: distance of two codes in each group, (G, 1), float32.
    """

    codes: Tensor
    least: Tensor
    scales: Tensor


def encode(values: Tensor, bits: Bits) -> Codes:
    """Round values (N,), float32 or bfloat16, stochastically to codes per group of 256.

    With m and M the extremes of a group, the decoded value differs from x by less than (M - m) / (2^bits - 1), times
    1 + 2^-20, plus rounding of M - m and x in float32. It is one of the two code values around x. Its expectation is x
    to 2^-17 of their distance. All of a constant group stays exact. Groups with NaN or infinite values, and groups with
    M - m above float32's range, decode to values of which some are not finite. Torch's generator draws noise for 61,440
    values, which is shifted at random (modulo 1) for the next ones, so that any two errors are independent.
    """
    groups, where = scale_count(len(values)), values.device
    empty = torch.empty(groups, BLOCK * bits // 8, dtype=torch.uint8, device=where)
    found = Codes(empty, *(torch.empty(groups, 1, device=where) for _ in range(2)))
    work = _WorkSpace.of(min(groups, _ROWS), where)
    if values.is_meta or not groups:
        return found
    whole, shifts = len(values) // BLOCK, torch.randint(-(2**15), 2**15, (groups // _ROWS + 2,)).tolist()
    rows = values[: whole * BLOCK].view(whole, BLOCK)
    for start, shift in zip(range(0, whole, _ROWS), shifts, strict=False):
        piece = slice(start, min(start + _ROWS, whole))
        work.noise.add_(shift)
        _encode_rows(rows[piece], Codes(*(each[piece] for each in found)), work)
    if whole < groups:  # the last group is filled with its last value, which leaves its range as it is
        last = torch.cat([values[whole * BLOCK :], values[-1:].expand(groups * BLOCK - len(values))])
        work.noise.add_(shifts[-1])
        _encode_rows(last.view(1, BLOCK), Codes(*(each[whole:] for each in found)), work)
    return found


class _WorkSpace(NamedTuple):
    """Scaled values and integers of rows (R, 256), and noise: uniform int16."""

    scaled: Tensor
    integers: Tensor
    noise: Tensor

    @classmethod
    def of(cls, rows: int, device: torch.device) -> _WorkSpace:
        drawn = torch.empty(rows, BLOCK * _NOISE_BITS // 64, dtype=torch.int64, device=device).random_(-(2**63), None)
        scaled = torch.empty(rows, BLOCK, device=device)
        return cls(scaled, torch.empty_like(scaled, dtype=torch.int16), drawn.view(torch.int16))


def _encode_rows(rows: Tensor, found: Codes, work: _WorkSpace) -> None:
    """Fill codes of rows (R, 256)."""
    top = 255.0 if found.codes.shape[1] == BLOCK else 15.0
    scaled, integers, noise = (each[: len(rows)] for each in work)
    found.least.copy_(rows.amin(1, keepdim=True))
    found.scales.copy_(rows.amax(1, keepdim=True)).sub_(found.least).mul_(_SPREAD / top)
    torch.sub(rows, found.least, out=scaled).mul_(found.scales.clamp_min(_TINY).reciprocal_())
    # noise in (0, 1), symmetric around a half; conversion to integers truncates
    scaled.add_(noise, alpha=2.0**-_NOISE_BITS).add_(0.5 + 2.0 ** -(_NOISE_BITS + 1))
    integers.copy_(scaled)
    if top == 255.0:
        found.codes.copy_(integers)
    else:
        low, high = integers.split(BLOCK // 2, 1)
        found.codes.copy_(low.add_(high, alpha=16))


def decode(kept: Codes, values: Tensor) -> None:
    """Fill ``values`` (N,), float32 or bfloat16, from what :func:`encode` made of as many."""
    if values.is_meta:
        return
    for start in range(0, len(kept.codes), _ROWS):
        codes, least, scales = (each[start : start + _ROWS] for each in kept)
        part = values[start * BLOCK : (start + _ROWS) * BLOCK]
        direct = values.dtype == torch.float32 and len(part) == len(codes) * BLOCK
        rows = part.view(-1, BLOCK) if direct else torch.empty(len(codes), BLOCK, device=values.device)
        if codes.shape[1] == BLOCK:
            rows.copy_(codes)
        else:
            rows[:, : BLOCK // 2].copy_(codes & 15)
            rows[:, BLOCK // 2 :].copy_(codes >> 4)
        rows.mul_(scales).add_(least)
        if not direct:
            part.copy_(rows.view(-1)[: len(part)])


class _Kept:
    """The codes of a stretch of memory; other layouts of the same memory share them."""

    def __init__(self, values: Tensor, bits: Bits) -> None:
        self.codes, self.storage = encode(values, bits), weakref.ref(values.untyped_storage())


class CompressedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context for a forward pass whose feature maps are kept in ``bits`` per value, 8 or 4, by whatever operator.

    It may be entered again for the next pass. Feature maps are the float32 and bfloat16 tensors of 4096 values or more
    that were computed with a gradient; a tensor that several operators keep is stored once. Images, weights, views and
    lowered copies of weights, and tensors of other types are kept as they are. In backward, each use restores its own
    copy.
    """

    def __init__(self, bits: Bits) -> None:
        known: weakref.WeakValueDictionary[tuple[object, ...], _Kept] = weakref.WeakValueDictionary()

        def pack(tensor: Tensor) -> Tensor | tuple[_Kept, Layout]:
            if not _is_feature_map(tensor):
                return tensor
            dense = memory_order(tensor)
            layout = Layout.of(tensor if dense is not None else tensor.contiguous())
            if dense is None:
                return _Kept(tensor.detach().contiguous().view(-1), bits), layout
            storage = tensor.untyped_storage()
            key = (storage._cdata, tensor.storage_offset(), tensor.numel(), tensor._version)
            found = known.get(key)
            if found is None or found.storage() is None:
                found = known[key] = _Kept(dense.detach(), bits)
            return found, layout

        super().__init__(pack, _unpack)


def _unpack(kept: Tensor | tuple[_Kept, Layout]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    values = kept[1].empty()
    decode(kept[0].codes, values.as_strided((values.numel(),), (1,)))
    return values


def _is_feature_map(tensor: Tensor) -> bool:
    """Whether to compress a tensor of any shape."""
    if tensor.dtype not in (torch.float32, torch.bfloat16) or tensor.numel() < SMALLEST:
        return False
    if tensor.grad_fn is None or isinstance(tensor._base, nn.Parameter):
        return False
    if _is_from_a_leaf(tensor):  # a transposed or lowered weight
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()  # not expanded


def _is_from_a_leaf(tensor: Tensor) -> bool:
    """Whether a tensor of any shape was made from a parameter alone, by operators with one input."""
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is not None and not node.next_functions
