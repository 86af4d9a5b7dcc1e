"""The weight gradient of a convolution on small feature maps, one matrix product per kernel position.

On feature maps of a few pixels oneDNN computes the weight gradient of a wide 3x3 convolution at a fraction of the speed
of a matrix product, partly through its generic GEMM kernel, with a workspace of four to eight times the weights (38-76
MB for 512 to 512 channels). Here each kernel position is one matrix product of the pixels that it touches: nothing is
computed for padding (more than half of the work on 2x2 pixels), and no patches are unfolded.
"""

from __future__ import annotations

from torch import Tensor

SMALL_MAP = 16
"""Up to this many output pixels the gradient is computed here; above, oneDNN is as fast and takes as little memory."""

Pair = tuple[int, ...]
"""Rows and columns, as torch types them."""


def conv_weight_gradient(
    gradient: Tensor, inputs: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Compute the gradient of a convolution's weight, one matrix product per kernel position.

    Args:
        gradient: gradient of the output, (B, K, H', W').
        inputs: the convolution's input, (B, C, H, W).
        kernel, stride, padding, dilation: as in ``nn.Conv2d``, with zero padding and one group.

    Returns:
        (K, C, kernel height, kernel width), in channels_last.
    """
    channels, filters = inputs.shape[1], gradient.shape[1]
    outputs, pixels = gradient.permute(0, 2, 3, 1), inputs.permute(0, 2, 3, 1)
    total = gradient.new_zeros(filters, *kernel, channels)
    copied = outputs[0].numel() + pixels[0].numel()
    images = max(1, total.numel() // copied)  # a tap copies the pixels it touches: never more than the weights take
    taps = [
        [_touched(tap, *sizes) for tap in range(taps)]
        for taps, sizes in zip(
            kernel, zip(inputs.shape[2:], gradient.shape[2:], stride, padding, dilation, strict=True), strict=True
        )
    ]
    for start in range(0, len(inputs), images):
        rows, columns = outputs[start : start + images], pixels[start : start + images]
        for i, (out_y, in_y) in enumerate(taps[0]):
            for j, (out_x, in_x) in enumerate(taps[1]):
                left = rows[:, out_y, out_x].reshape(-1, filters)
                total[:, i, j].addmm_(left.t(), columns[:, in_y, in_x].reshape(-1, channels))
    return total.permute(0, 3, 1, 2)


def _touched(tap: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice]:
    """Along one axis, the outputs for which a tap lies inside the image, and the inputs that it then reads."""
    offset = tap * dilation - padding
    first = max(0, -(offset // stride))
    last = min(outputs, (size - 1 - offset) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last), slice(first * stride + offset, (last - 1) * stride + offset + 1, stride)
