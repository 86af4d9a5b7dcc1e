"""Assign a local loss to every unit of a chain (NeuroFlux section 5.2, Profiler)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, fx, nn

from snugfit._chain import averaged_side, split_tail
from snugfit.local.auxiliary import is_initial
from snugfit.local.base import ConvShape, LayerShape, LocalLoss, LocalOutput, NetworkStats, UnitShape
from snugfit.local.macs import input_gradient_macs
from snugfit.local.registry import build_local_loss

if TYPE_CHECKING:
    from snugfit._chain import Chain, ConvFact, Unit

_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}


def parts(unit: nn.Module, loss: LocalLoss) -> tuple[nn.Module, nn.Module]:
    """Split a unit into the part whose output its local loss reads, and the rest; they share its layers."""
    if loss.before_pool and isinstance(unit, fx.GraphModule):
        return split_tail(unit)
    return unit, nn.Identity()


class HeadLoss(LocalLoss):
    """The network's own head as the last unit's local loss."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def additional_parameters(self) -> int:
        """No parameters, because the head is the network's."""
        return 0

    def signal_macs(self, unit: UnitShape) -> int:
        """MACs of the head's input gradients, as in backpropagation; its forward pass is the network's own."""
        return input_gradient_macs(self.head, unit.output_shape, reach_input=True)

    def predict(self, features: Tensor) -> Tensor:
        """Logits (B, classes) of the network."""
        logits: Tensor = self.head(features)
        return logits


class DetachedHeadLoss(HeadLoss):
    """A local loss for the last unit, together with the network's head, which learns from detached features.

    The loss is the sum of both; neither sees the other's gradient. ``tail`` are the pools and dropouts between the
    unit's feature map and the head.
    """

    before_pool: ClassVar[bool] = True

    def __init__(self, head: nn.Module, local: LocalLoss, tail: nn.Module) -> None:
        super().__init__(head)
        self.local, self.tail = local, tail
        self.gives_up_gradient = local.gives_up_gradient

    @property
    def additional_parameters(self) -> int:
        """Parameters of the local loss."""
        return self.local.additional_parameters

    def signal_macs(self, unit: UnitShape) -> int:
        """MACs of the local loss; the head passes no gradient back."""
        return self.local.signal_macs(unit)

    def predict(self, features: Tensor) -> Tensor:
        """Logits (B, classes) of the network."""
        return super().predict(self.tail(features))

    def forward(self, features: Tensor, labels: Tensor) -> LocalOutput:
        """Sum (scalar) of the local loss and the head's cross entropy, and the head's logits (B, classes)."""
        of_head = super().forward(features.detach(), labels)
        return LocalOutput(of_head.loss + self.local(features, labels).loss, of_head.logits)


def layer_shape(unit: Unit) -> LayerShape | None:
    """What a local loss of an earlier unit needs to imitate a unit; None if it makes no feature map by convolutions.

    Convolutions that follow each other are the layer, and the longest such run counts: a shortcut's is a shorter one.
    """
    runs: list[list[ConvFact]] = []
    for conv in unit.convs:
        ends = (run for run in runs if _follows(conv, run[-1]))
        if (run := next(ends, None)) is not None:
            run.append(conv)
        else:
            runs.append([conv])
    if not runs or len(unit.output_shape) != 3:
        return None
    longest = max(runs, key=len)
    convs = tuple(ConvShape(each.out_channels, each.kernel, 1 < each.groups == each.in_channels) for each in longest)
    return LayerShape(convs, (unit.output_shape[1], unit.output_shape[2]), _is_residual(unit.module))


def _follows(conv: ConvFact, before: ConvFact) -> bool:
    return (conv.in_channels, conv.input_size) == (before.out_channels, before.output_size)


def _is_residual(module: fx.GraphModule) -> bool:
    """Whether a unit adds two feature maps."""
    added = (node for node in module.graph.nodes if node.target in _ADDITIONS)
    return any(len(node.all_input_nodes) == 2 for node in added)


@dataclass(frozen=True)
class Layout:
    """A chain divided into modules, each of one or more units, and the local loss of each module.

    Gradients do not cross from one module to the one before it. Units of the chain that are not in use are on the meta
    device.

    Attributes:
        modules: what trains by one local loss each; by default the units themselves.
        sizes: number of units in each module.
        label_smoothing: of every local loss, and of the head's.
    """

    chain: Chain
    local_loss: str
    network: NetworkStats
    modules: tuple[Unit, ...]
    sizes: tuple[int, ...]
    label_smoothing: float = 0.0

    @classmethod
    def of(
        cls, chain: Chain, local_loss: str, classes: int, sizes: Sequence[int] = (), label_smoothing: float = 0.0
    ) -> Layout:
        """Assign local losses to a chain, in modules of so many units; by default one unit each."""
        widths = [conv.out_channels for unit in chain.units for conv in unit.convs]
        network = NetworkStats.from_widths(widths, classes, max(1, len(chain.units) - 1))
        modules = chain.merged(sizes).units if sizes else chain.units
        return cls(chain, local_loss, network, modules, tuple(sizes) or (1,) * len(modules), label_smoothing)

    def __len__(self) -> int:
        return len(self.modules)

    def units(self, index: int) -> range:
        """Numbers of the units of a module."""
        start = sum(self.sizes[:index])
        return range(start, start + self.sizes[index])

    def is_last(self, index: int) -> bool:
        """Whether a module's local loss is the network's own head."""
        return index == len(self) - 1

    def make_loss(self, index: int) -> LocalLoss:
        """The local loss of a module, on the meta device; the last one's holds the chain's head itself."""
        with torch.device("meta"):
            loss = build_local_loss(self.local_loss, self.unit_shape(index), self.network)
        loss.label_smoothing = self.label_smoothing
        return self._with_head(index, loss) if self.is_last(index) else loss

    def _with_head(self, index: int, loss: LocalLoss) -> HeadLoss:
        """The last module's loss: that of the head, in addition to a local loss that trains apart from the head."""
        head = self.chain.head.module
        if loss.detached_head:
            made: HeadLoss = DetachedHeadLoss(head, loss, parts(self.modules[index].module, loss)[1])
        else:
            made = HeadLoss(head)
        made.label_smoothing = self.label_smoothing
        return made

    def unit_shape(self, index: int) -> UnitShape:
        """The statistics of a module's last unit that its local loss needs."""
        last = self.units(index)[-1]
        unit, units = self.chain.units[last], self.chain.units[: last + 1]
        sizes = [each.convs[-1].output_size for each in units if each.convs]
        initial = bool(sizes) and is_initial(self._largest_map, sizes)
        side = self._head_side if self.is_last(index) else None
        inputs = tuple(self.modules[index].input_shape)
        shapes = tuple(unit.output_shape), initial, tuple(unit.map_shape)
        return UnitShape(*shapes, last, self._layers[last + 1], side, inputs)

    @cached_property
    def _head_side(self) -> int | None:
        """Side to which the head averages the last unit's feature map; None if a pool or nothing lies between."""
        unit, head = self.chain.units[-1], self.chain.head
        if unit.map_shape != unit.output_shape:
            return None
        return averaged_side(head.module, tuple(head.input_shape))

    @cached_property
    def _largest_map(self) -> tuple[int, int]:
        """Height and width of the largest output of a convolution."""
        sizes = [conv.output_size for unit in self.chain.units for conv in unit.convs]
        return max(height for height, _ in sizes), max(width for _, width in sizes)

    @cached_property
    def _layers(self) -> list[tuple[LayerShape, ...]]:
        """The convolutional layers from each unit on, and none at the end."""
        shapes = [layer_shape(unit) for unit in self.chain.units]
        return [tuple(each for each in shapes[start:] if each is not None) for start in range(len(shapes) + 1)]

    def exit_parameters(self, index: int) -> int:
        """Parameters of the exit model after a module: all units up to it, and its own classifier."""
        if self.is_last(index):
            return self.chain.parameters
        trunk_parameters = sum(unit.parameters for unit in self.modules[: index + 1])
        return trunk_parameters + sum(
            parameter.numel() for parameter in self.make_loss(index).classifier().parameters()
        )

    def exit_model(self, index: int, loss: LocalLoss | None = None) -> nn.Module:
        """The model cut after a module, with its local loss (by default a new one on the meta device) as classifier.

        What of the loss only training needs is removed from it, in place. After the last module the model is the whole
        network.
        """
        if self.is_last(index):
            return self.chain.to_module()
        loss = (loss or self.make_loss(index)).classifier()
        return ExitModel(trunk(self.chain, self.units(index)[-1], before_pool=loss.before_pool), loss)


class ExitModel(nn.Module):
    """A trunk of units, and the local loss that trained the last one as classifier (NeuroFlux section 5.4)."""

    def __init__(self, trunk: nn.Module, classifier: LocalLoss) -> None:
        super().__init__()
        self.trunk, self.classifier = trunk, classifier

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, classes)."""
        return self.classifier.predict(self.trunk(images))


def trunk(chain: Chain, index: int, *, before_pool: bool = False) -> nn.Module:
    """Build one module from the units ``0..index`` of a chain; parameters are shared and keep their names.

    With ``before_pool`` the final pools and dropouts are left out.
    """
    last = chain.units[index]
    if before_pool:
        body = split_tail(last.module)[0]
        last = replace(last, module=body, output_shape=last.map_shape)
    return replace(chain, units=chain.units[:index], head=last).to_module()
