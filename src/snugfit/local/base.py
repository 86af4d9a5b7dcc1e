"""The interface of local losses, and what they know of their unit and network.

Shapes: B batch, C channels, H height, W width, D flat features, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snugfit.errors import ModelError
from snugfit.local.macs import SAMPLES, loss_macs

MAP_TERMS = 4
"""Operations for each element of a convolution's feature map, before its pool. Table 3 of LLS matches with 4, which its
text does not explain; activation and average pooling, forward and backward, would give this number."""


class ConvShape(NamedTuple):
    """A convolution of a layer: its filters, its kernel's height and width, and whether it is depthwise."""

    filters: int
    kernel: tuple[int, int]
    depthwise: bool = False


@dataclass(frozen=True)
class LayerShape:
    """A layer of the network as a local loss of an earlier unit can imitate it.

    Attributes:
        convs: its convolutions from input to output, without a shortcut's.
        size: height and width of its output.
        residual: whether a shortcut is added.
    """

    convs: tuple[ConvShape, ...]
    size: tuple[int, int]
    residual: bool = False


@dataclass(frozen=True)
class UnitShape:
    """What a local loss needs to know of its unit.

    Attributes:
        output_shape: shape of one sample's output, ``(C, H, W)`` or ``(D,)``.
        initial: whether nothing up to and including its last conv downsamples (:func:`~snugfit.local.is_initial`).
        before_pool: shape of one sample before the final pools and dropouts, if any.
        position: number of the unit, from 0.
        later: the convolutional layers of the network that come after it.
        head_side: shorter side of what the network's head averages the unit's feature map to, if it does that first.
        input_shape: shape of one sample's input of the unit, or of the module that it ends; empty if unknown.
    """

    output_shape: tuple[int, ...]
    initial: bool = False
    before_pool: tuple[int, ...] | None = None
    position: int = 0
    later: tuple[LayerShape, ...] = ()
    head_side: int | None = None
    input_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.output_shape) not in (1, 3) or min(self.output_shape) < 1:
            raise ModelError(
                f"a local loss needs a unit output of shape (C, H, W) or (D,), not {self.output_shape}. "
                "Cut the model where a feature map or a vector crosses."
            )

    @property
    def map_shape(self) -> tuple[int, ...]:
        """Shape of one sample before the final pools and dropouts."""
        return self.before_pool or self.output_shape

    @property
    def flat(self) -> bool:
        """Whether the output is a vector."""
        return len(self.output_shape) == 1


@dataclass(frozen=True)
class NetworkStats:
    """What a local loss needs to know of the whole network.

    Attributes:
        narrowest, widest: smallest and largest number of filters of the network's convs.
        classes: number of classes K.
        units: number of units that train by a local loss, without the last, which has the network's head.
    """

    narrowest: int
    widest: int
    classes: int
    units: int = 1

    @classmethod
    def from_widths(cls, conv_widths: Iterable[int], classes: int, units: int = 1) -> NetworkStats:
        """Collect the statistics from the output channels of every conv; a network without convs counts as one wide."""
        widths = list(conv_widths) or [1]
        return cls(min(widths), max(widths), classes, units)


class LocalOutput(NamedTuple):
    """Scalar mean loss of a batch, and its logits of shape (B, K)."""

    loss: Tensor
    logits: Tensor


class LocalLoss(nn.Module):
    """Loss of one unit, computed from the unit's output alone; it is also the classifier of the exit after that unit.

    A subclass takes ``(unit: UnitShape, network: NetworkStats)``, holds whatever it trains as its own parameters and
    defines :meth:`predict`; it overrides :meth:`forward` where its loss is not the cross entropy (NeuroFlux eq. 3).

    Attributes:
        before_pool: whether it reads the unit's feature map before the final pools and dropouts.
        detached_head: whether it also trains the last unit while the network's head learns from detached features;
            otherwise the head is the last unit's local loss.
        gives_up_gradient: whether the unit may overwrite the gradient that it returns for the features. True if a
            single layer reads the features, and that is not a sum or a view of them.
        pooled_side: if it reads only the average pooling of a feature map (B, C, H, W) to a square, the side of that;
            it then accepts the pooled feature map instead.
        label_smoothing: share of each target that the cross entropy spreads evenly over all classes (Szegedy et al.,
            CVPR 2016, section 7). An override of :meth:`forward` reads it where it applies.
    """

    before_pool: ClassVar[bool] = False
    detached_head: ClassVar[bool] = False
    gives_up_gradient: bool = False
    pooled_side: int | None = None
    label_smoothing: float = 0.0

    @property
    def additional_parameters(self) -> int:
        """Number of parameters that it trains in addition to the network's own."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def signal_macs(self, unit: UnitShape) -> int:
        """Multiply-accumulates per sample for the learning signal at the unit's feature map (LLS, Table 3).

        Everything after the unit's forward pass counts: the loss's own forward pass, its input gradients and the
        gradients of its own weights, from what autograd runs, and :data:`MAP_TERMS` per element of the feature map
        before its pool. A vector has no such terms, because Table 3 would not match for VGG8's linear block. For a
        projection of T latents that is 2KT, or 3KT where the basis trains. Other elementwise operations do not count;
        override it if yours are many.
        """
        terms = MAP_TERMS * math.prod(unit.map_shape) if len(unit.map_shape) == 3 else 0
        objective = Objective(self, (SAMPLES, *unit.input_shape))
        return terms + loss_macs(objective, unit.map_shape if self.before_pool else unit.output_shape)

    def added_loss(self, features: Tensor, inputs: Tensor) -> Tensor | None:
        """A further term of the loss (scalar) from a unit's output and its input, both (B, ...); none by default."""
        return None

    def objective(self, features: Tensor, labels: Tensor, inputs: Tensor) -> LocalOutput:
        """The loss with its added term, and logits (B, K), of features, int64 labels (B,) and the unit's inputs."""
        output: LocalOutput = self(features, labels)
        added = self.added_loss(features, inputs)
        return output if added is None else output._replace(loss=output.loss + added)

    def classifier(self) -> LocalLoss:
        """This loss without what only training needs, removed in place."""
        return self

    def predict(self, features: Tensor) -> Tensor:
        """Turn a unit's output, (B, C, H, W) or (B, D), into logits of shape (B, K) (NeuroFlux eq. 2)."""
        raise NotImplementedError

    def forward(self, features: Tensor, labels: Tensor) -> LocalOutput:
        """Mean cross entropy over the batch, and logits, of features (B, C, H, W) or (B, D) and int64 labels (B,)."""
        logits = self.predict(features)
        return LocalOutput(F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing), logits)


class Objective(nn.Module):
    """The loss of a unit as a function of features (B, ...) alone, with labels and inputs on the meta device."""

    def __init__(self, loss: LocalLoss, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.loss, self.inputs = loss, torch.empty(input_shape, device="meta")
        self.labels = torch.zeros(input_shape[0], dtype=torch.int64, device="meta")

    def forward(self, features: Tensor) -> Tensor:
        """The loss, of shape (1,), of features (B, ...)."""
        return self.loss.objective(features, self.labels, self.inputs).loss.reshape(1)
