"""The weight with which a layer that lost inputs best reproduces its output: ridge regression, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST = 2048
"""Largest number of inputs per output (channels times kernel) that is solved for: its normal equations are 32 MiB."""

_POSITIONS = 512
"""Pixels sampled from each image, because neighbours are similar."""


class Regression:
    """Least squares for one convolution or linear layer, added up image by image in float64.

    Args:
        layer: the layer; the ridge draws the solution to its current weight.
        seed: for the sampling of pixels.
    """

    def __init__(self, layer: nn.Conv2d | nn.Linear, seed: int = 0) -> None:
        self.layer = layer
        outputs, features = layer.weight.shape[0], layer.weight[0].numel()
        sizes = ((features, features), (features, outputs), (features,), (outputs,))
        zeros = [torch.zeros(size, dtype=torch.float64, device=layer.weight.device) for size in sizes]
        self.products, self.targets, self.input_sum, self.target_sum = zeros
        self.count = 0
        self._generator = torch.Generator().manual_seed(seed)

    @staticmethod
    def serves(layer: nn.Module) -> bool:
        """Whether a layer's kind and size are supported."""
        if isinstance(layer, nn.Conv2d):
            plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
            return plain and layer.weight[0].numel() <= LARGEST
        return isinstance(layer, nn.Linear) and layer.in_features <= LARGEST

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Add the layer's inputs and target outputs, both (B, ...) as in its forward pass."""
        for image, target in zip(inputs, targets, strict=True):
            x, y = self._rows(image, target)
            x, y = x.double(), y.double()
            self.products.addmm_(x.T, x)
            self.targets.addmm_(x.T, y)
            self.input_sum += x.sum(0)
            self.target_sum += y.sum(0)
            self.count += len(x)

    @property
    def moments(self) -> Tensor:
        """Summed products of the centred inputs, (features, features)."""
        return self.products - torch.outer(self.input_sum, self.input_sum) / self.count

    def solve(self, ridge: float, intercept: bool) -> tuple[Tensor, Tensor]:
        """Compute the weight, in the layer's shape, and what to add to its outputs, (outputs,): zero without intercept.

        Args:
            ridge: weight of the squared distance from the current weight, in units of the inputs' mean square.
            intercept: whether outputs may be shifted.
        """
        before = self.layer.weight.detach().flatten(1).T.double()
        scale = 1.0 / self.count if intercept else 0.0
        products = self.moments if intercept else self.products
        targets = self.targets - scale * torch.outer(self.input_sum, self.target_sum)
        penalty = ridge * products.diagonal().mean().clamp_min(1e-30)
        penalised = products + penalty * torch.eye(len(products), dtype=products.dtype, device=products.device)
        weight = before + torch.linalg.solve(penalised, targets - products @ before)
        shift = scale * (self.target_sum - self.input_sum @ weight)
        return weight.T.reshape(self.layer.weight.shape).to(self.layer.weight), shift.to(self.layer.weight)

    def _rows(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of single outputs, (N, features), and those outputs, (N, outputs)."""
        if isinstance(self.layer, nn.Linear):
            return image.reshape(-1, image.shape[-1]), target.reshape(-1, target.shape[-1])
        height, width = target.shape[1:]
        at = torch.randperm(height * width, generator=self._generator)[:_POSITIONS].to(image.device)
        rows, columns = at // width, at % width
        (stride, dilation, kernel) = (self.layer.stride, self.layer.dilation, self.layer.kernel_size)
        top, left = (int(padding) for padding in self.layer.padding)
        padded = F.pad(image, (left, left, top, top))
        taps = [torch.arange(k, device=image.device) * d for k, d in zip(kernel, dilation, strict=True)]
        down = (rows * stride[0])[:, None, None] + taps[0][:, None]
        right = (columns * stride[1])[:, None, None] + taps[1]
        patches = padded[:, down, right]  # (C, N, k, k)
        return patches.transpose(0, 1).flatten(1), target[:, rows, columns].T
