"""Cost of the learning signal: multiply-accumulates and parameters of each method (LLS, Table 3).

The learning signal is the gradient of a loss with respect to the output of every layer, dL/dh. Backpropagation gets it
from the input gradients of layers 2 to L. A local loss gets it for one unit from everything after the unit's forward
pass, up to the gradient of the unit's feature map. If a unit holds several layers (a residual block, a depthwise and a
pointwise convolution), its other layers still need the input gradients inside the unit, which count here as in
backpropagation. Gradients of the network's own weights are needed in every method, and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from snugfit.local.assignment import Layout
from snugfit.local.macs import input_gradient_macs
from snugfit.local.registry import LOCAL_LOSSES

if TYPE_CHECKING:
    from snugfit._chain import Chain

BACKPROP = "backprop"


class Signal(NamedTuple):
    """Multiply-accumulates per sample of the learning signal, and parameters trained in addition to the network's."""

    macs: int
    additional_parameters: int


def learning_signal(chain: Chain, classes: int, local_losses: Iterable[str] | None = None) -> dict[str, Signal]:
    """The learning signal by method: backpropagation, and a local loss on every unit.

    Backpropagation takes the forward MACs of all layers but the first. A local loss takes its own
    (:meth:`~snugfit.local.LocalLoss.signal_macs`) and, inside each unit, those of all layers but the unit's first. The
    last unit of ``aan`` and ``classic`` learns from the network's own head: it counts the head's input gradients, as
    backpropagation does, and no parameters. Nothing is allocated.

    Args:
        chain: the network.
        classes: number of classes.
        local_losses: names, optionally with options; every registered one by default.

    Raises:
        UnknownNameError, UsageError: there is no such local loss.
    """
    inside = sum(input_gradient_macs(unit.module, unit.input_shape) for unit in chain.units)
    signals = {BACKPROP: Signal(input_gradient_macs(chain.to_module(), chain.input_shape), 0)}
    for name in LOCAL_LOSSES if local_losses is None else local_losses:
        layout = Layout.of(chain, name, classes)
        losses = [layout.make_loss(index) for index in range(len(layout))]
        macs = sum(loss.signal_macs(layout.unit_shape(index)) for index, loss in enumerate(losses))
        signals[name] = Signal(inside + macs, sum(loss.additional_parameters for loss in losses))
    return signals
