"""Vision transformer for ImageNet, with torchvision's state-dict names and shapes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from snugfit.errors import ModelError

PATCH = 16
"""Side of a patch in pixels."""
POSITIONS = "encoder.pos_embedding"
"""Name of the position embeddings in a state dict, the one tensor whose shape depends on the image size."""


class _Patches(nn.Conv2d):
    """A convolution that starts as torchvision's patch embedding does."""

    def reset_parameters(self) -> None:
        fan_in = self.in_channels * self.kernel_size[0] * self.kernel_size[1]
        nn.init.trunc_normal_(self.weight, std=math.sqrt(1 / fan_in))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _Projection(nn.Linear):
    """A linear layer whose bias starts at zero."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)


class _Hidden(nn.Linear):
    """A linear layer of the MLP (Dosovitskiy et al., section 3.1): Xavier's weights, biases next to zero."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.normal_(self.bias, std=1e-6)


class _Classifier(nn.Linear):
    """A linear layer that starts small.

    torchvision's starts at zero, so that the layers before it get no gradient in the first step. Strategies that select
    tensors by their gradients could then not select.
    """

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class SelfAttention(nn.Module):
    """Multi-head self-attention (Dosovitskiy et al., appendix A), with the names of ``nn.MultiheadAttention``.

    ``nn.MultiheadAttention`` itself would be one opaque layer for code that works layer by layer.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = _Projection(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights for queries, keys and values; the output projection has its own."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.in_proj_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        query, key, value = (torch.unflatten(projected[i], -1, (self.heads, -1)).transpose(1, 2) for i in range(3))
        attended = F.scaled_dot_product_attention(query, key, value)  # (batch, heads, tokens, width / heads)
        out: torch.Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out


class EncoderLayer(nn.Module):
    """Attention and an MLP, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = SelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        layers = {"0": _Hidden(width, hidden), "1": nn.GELU(), "3": _Hidden(hidden, width)}  # 2: torchvision's dropout
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        x = x + self.self_attention(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class Encoder(nn.Module):
    """Position embeddings, encoder layers and a LayerNorm."""

    def __init__(self, tokens: int, layers: int, heads: int, width: int, hidden: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width))
        self.layers = nn.Sequential(
            OrderedDict((f"encoder_layer_{index}", EncoderLayer(width, heads, hidden)) for index in range(layers))
        )
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh position embeddings."""
        nn.init.normal_(self.pos_embedding, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        out: torch.Tensor = self.ln(self.layers(x + self.pos_embedding))
        return out


class VisionTransformer(nn.Module):
    """Patches as tokens, a class token, an encoder, and a linear layer on the class token.

    ``layers``, ``heads``, ``width`` and ``hidden`` are encoder layers, attention heads, and widths of tokens and MLPs.

    Raises:
        ModelError: the image does not divide into patches of 16 x 16 pixels.
    """

    def __init__(
        self, classes: int, image_size: int, channels: int, *, layers: int, heads: int, width: int, hidden: int
    ) -> None:
        super().__init__()
        if image_size % PATCH:
            nearest = max(1, round(image_size / PATCH)) * PATCH
            raise ModelError(
                f"a vision transformer takes images whose side is a multiple of {PATCH} pixels, not {image_size}; "
                f"use --image-size {nearest}."
            )
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.conv_proj = _Patches(channels, width, PATCH, PATCH)
        self.encoder = Encoder((image_size // PATCH) ** 2 + 1, layers, heads, width, hidden)
        self.heads = nn.Sequential(OrderedDict(head=_Classifier(width, classes)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A fresh class token."""
        nn.init.zeros_(self.class_token)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        token = self.class_token.expand(x.shape[0], -1, -1)
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        encoded = self.encoder(torch.cat([token, patches], dim=1))
        logits: torch.Tensor = self.heads(encoded[:, 0])
        return logits


def image_size_of(position_embedding: Sequence[int]) -> int | None:
    """Side in pixels of the images of position embeddings of this shape (1, tokens, width), or None."""
    patches = position_embedding[1] - 1 if len(position_embedding) == 3 else 0
    side = math.isqrt(max(patches, 0))
    return side * PATCH if side and side * side == patches else None


def vit_b_16(classes: int, image_size: int, channels: int) -> nn.Module:
    """ViT-B/16 (Dosovitskiy et al., 2021, arXiv:2010.11929, Table 1): 86,567,656 parameters at 224 for 1000 classes."""
    return VisionTransformer(classes, image_size, channels, layers=12, heads=12, width=768, hidden=3072)


MODELS = {"vit_b_16": vit_b_16}
