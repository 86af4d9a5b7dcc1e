"""Time and memory of each operator when a gradient passes, and of each tensor when it trains.

The tensor-level computing graph of ElasticTrainer (section 3.2, section 5): operators in order of execution, each with
the trainable tensors that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """A feature map that is kept for the backward pass.

    Attributes:
        map: number of the feature map; it is kept once for all operators and tensors that need it.
        bytes: its bytes per sample.
    """

    map: int
    bytes: int


@dataclass(frozen=True)
class TensorStats:
    """One trainable tensor.

    Attributes:
        name: parameter name in the model.
        parameters: number of its elements.
        bytes: its bytes.
        seconds: additional time of its gradient, for the profile's batch.
        update_seconds: time of its optimizer step, independent of the batch.
        macs: multiply-accumulates of its gradient, per sample.
        saved: feature maps that are kept only because it trains.
        scratch_bytes: peak of temporary memory during its gradient, per sample.
    """

    name: str
    parameters: int
    bytes: int
    seconds: float
    update_seconds: float
    macs: int = 0
    saved: tuple[Saved, ...] = ()
    scratch_bytes: int = 0


@dataclass(frozen=True)
class Scratch:
    """Peak bytes of an operator's temporary memory per sample, without its inputs, outputs and kept tensors.

    Attributes:
        alone: in a forward pass without gradients.
        forward, backward: in the two passes with a gradient.
    """

    alone: int = 0
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class OperatorStats:
    """One operator: a layer, or a function between layers.

    Attributes:
        name: layer's name in the model, or the function's.
        kind: class of the layer, or the function's name.
        inputs: numbers of the operators whose outputs it reads; -1 for the network's input.
        map: number of its output feature map; in-place operators and views return that of their input.
        output_bytes: bytes of its output per sample.
        forward_seconds: time of its forward pass without gradients, for the profile's batch.
        pass_seconds: extra time when a gradient passes through it: in the forward pass, and in the backward pass down
            to its inputs.
        macs: multiply-accumulates of its forward pass, per sample; passing a gradient takes as many.
        saved: feature maps that are kept because a gradient passes through it.
        tensors: the trainable tensors that it reads, in the layer's order.
        entry: number of the operator whose output is the input of its unit, -1 for the network's input; that output
            stays in memory while the unit runs.
        handed: those of ``inputs`` whose gradients share memory with that of the output, as for views and sums.
        scratch: its temporary memory.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    map: int
    output_bytes: int
    forward_seconds: float
    pass_seconds: float
    macs: int = 0
    saved: tuple[Saved, ...] = ()
    tensors: tuple[TensorStats, ...] = ()
    entry: int = -1
    handed: tuple[int, ...] = ()
    scratch: Scratch = Scratch()


@dataclass(frozen=True)
class StepSeconds:
    """Median times of whole training steps, measured alternately.

    Attributes:
        batch: samples of a step.
        stock: full training with torch's own operators (T_full of ElasticTrainer).
        full: full training with the strategy's operators.
        head: training of only the classifier, with the strategy's operators.
    """

    batch: int
    stock: float
    full: float
    head: float


@dataclass(frozen=True)
class TensorProfile:
    """Every operator of a network in order of execution, measured at one batch.

    Attributes:
        batch: samples of the timed batch.
        operators: the operators.
        steps: whole steps, to calibrate the sum over operators; None if they do not fit the budget.
        seconds: duration of profiling.
        input_bytes: bytes of the network's input per sample.
    """

    batch: int
    operators: tuple[OperatorStats, ...]
    steps: StepSeconds | None = None
    seconds: float = 0.0
    input_bytes: int = 0

    @property
    def tensors(self) -> tuple[TensorStats, ...]:
        """All trainable tensors in order of execution, the input's first."""
        return tuple(tensor for operator in self.operators for tensor in operator.tensors)
