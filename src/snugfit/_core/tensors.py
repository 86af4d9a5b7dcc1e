"""What each operator of a network takes when its gradient passes, and each tensor when it trains.

The tensor-level computing graph of ElasticTrainer (section 3.2, section 5): operators in order of execution, each with
the trainable tensors that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """A map that is kept for the backward pass.

    Attributes:
        map: number of the map; the same map is kept once, however many operators and tensors need it.
        bytes: its bytes per sample.
    """

    map: int
    bytes: int


@dataclass(frozen=True)
class TensorFacts:
    """One trainable tensor.

    Attributes:
        name: parameter name in the model.
        parameters: number of its elements.
        bytes: its bytes.
        seconds: time of its gradient, for the profile's batch, beside what its operator takes anyway.
        update_seconds: time of the optimizer's step on it, whatever the batch.
        macs: multiply-accumulates of its gradient, per sample.
        saved: what is kept only because it trains.
        scratch_bytes: the most that computing its gradient takes on the way, per sample.
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
    """The most that an operator takes on the way, per sample, beside what it reads, gives and keeps.

    Attributes:
        alone: in its forward pass, where no gradient passes.
        forward, backward: in its two passes where one does.
    """

    alone: int = 0
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class OperatorFacts:
    """One operator: a layer, or a function between layers.

    Attributes:
        name: layer's name in the model, or the function's.
        kind: class of the layer, or the function's name.
        inputs: numbers of the operators whose outputs it reads; -1 for the network's input.
        map: number of the map that it gives; an operator in place, or one that gives a view, gives its input's.
        output_bytes: bytes of its output per sample.
        forward_seconds: time of its forward pass without gradients, for the profile's batch.
        pass_seconds: extra time when a gradient passes through it: in the forward pass, and in the backward pass down
            to its inputs.
        macs: multiply-accumulates of its forward pass, per sample; passing a gradient takes as many.
        saved: what is kept because a gradient passes through it.
        tensors: the trainable tensors that it reads, in the layer's own order.
        entry: number of the operator whose output entered the unit that it belongs to, -1 for the network's input: that
            output stays in memory while the unit runs.
        handed: those of ``inputs`` whose gradient lies in the memory of its output's: views and sums make no other.
        scratch: what it takes on the way.
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
    tensors: tuple[TensorFacts, ...] = ()
    entry: int = -1
    handed: tuple[int, ...] = ()
    scratch: Scratch = Scratch()


@dataclass(frozen=True)
class StepSeconds:
    """Whole training steps, measured one after the other in turns; medians.

    Attributes:
        batch: samples of a step.
        stock: everything trains, with torch's own operators (T_full of ElasticTrainer).
        full: everything trains, with the operators that the strategy uses.
        head: the classifier alone trains, with these.
    """

    batch: int
    stock: float
    full: float
    head: float


@dataclass(frozen=True)
class TensorProfile:
    """Every operator of a network in order of execution, measured at one batch.

    Attributes:
        batch: samples of the batch that was timed.
        operators: the operators.
        steps: whole steps, which the sum over operators is held against; None where the budget refuses them.
        seconds: time that profiling took.
        input_bytes: bytes of the network's input per sample.
    """

    batch: int
    operators: tuple[OperatorFacts, ...]
    steps: StepSeconds | None = None
    seconds: float = 0.0
    input_bytes: int = 0

    @property
    def tensors(self) -> tuple[TensorFacts, ...]:
        """All trainable tensors in order of execution, the input's first."""
        return tuple(tensor for operator in self.operators for tensor in operator.tensors)
