"""An estimate: how much memory a training step needs, what for, and what would lower it, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from snugfit._core.amounts import parse_batches
from snugfit._core.inputs import Input, parse_inputs, shape_of
from snugfit._core.options import Checked, Common, Count, InputShapes, Size, Text, Workers
from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import (
    OptimizerName,
    OptimizerSettings,
    OptimizerState,
    WeightDtype,
    check_weight_dtype,
)
from snugfit._quantities import format_bytes

METRIC = "peak bytes of live tensors in a training step, counted on the meta device"
PROCESS_EXTRA_BYTES = 35_000_000
"""What a process takes beyond its tensors, at most, in 95 % of the committed runs of ``backprop``
(``benchmarks/results``): kernels' code and workspace, data in flight and heap fragments, at any size of network. The
most was 60 MB, with photos in memory while they are decoded."""

KINDS = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients of parameters",
    "optimizer_state": "optimizer state",
    "batch": "inputs and labels",
    "activations": "activations kept for the backward pass",
    "temporaries": "temporaries",
}
"""Kinds of memory (``memory.tensors.Kind``) in words, in the order in which they are shown. Temporaries are gradients
of feature maps, results that no backward pass needs, copies and counted workspace."""

BatchSizes = Annotated[str, Text("whole numbers of images, like 32 or 32,64,128", parse_batches)]


@dataclass(frozen=True)
class EstimateOptions(Checked):
    """What is estimated.

    Attributes:
        input_shape: shape of one image: channels, height and width, like 3x224x224. For a network of several inputs the
            shape of each, without the batch, like image=3x224x224,ids=16xint64,age=float32. The last part is a type,
            float32 by default; a type alone is that of a number. Names are keywords of the forward pass, or left out.
        classes: outputs of a model that is given by name; 10 by default.
        batch_size: images of a step, one number or several with commas.
        memory: memory budget, like 2GB: add the largest power of two of images, up to 1024, that fits, and say
            what fits.
        optimizer: sgd (with momentum), adamw or schedulefree.
        optimizer_state: type of sgd's momentum and adamw's moments between steps: float32, bfloat16 or int8.
        precision: float32, or bfloat16 through autocast.
        weight_dtype: type in which trained weights of convolutions and linear layers are kept: float32 or bfloat16.
        measure: run real steps too, with synthetic images and weights, and add their peak, measured in this process.
        threads: compute threads of --measure; all cores by default, or OMP_NUM_THREADS.
    """

    input_shape: Annotated[InputShapes, Common("SHAPE", "like 3x224x224, or inputs 3x9x9,16xint64; required")]
    classes: Annotated[Count | None, Common("N", "outputs of a model that is given by name; 10 by default")] = None
    batch_size: Annotated[BatchSizes, Common("N", "images of a step, like 32 or 32,64; 128 by default")] = "128"
    memory: Annotated[Size | None, Common("SIZE", "also say what fits this budget, like 2GB")] = None
    optimizer: Annotated[OptimizerName, Common("NAME", "sgd (by default), adamw or schedulefree")] = "sgd"
    optimizer_state: OptimizerState = "float32"
    precision: Literal["float32", "bfloat16"] = "float32"
    weight_dtype: WeightDtype = "float32"
    measure: Annotated[bool, Common("", "also run real steps, and measure their peak")] = False
    threads: Workers | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.settings
        check_weight_dtype(self.weight_dtype, self.optimizer)

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What the network takes, if it is several inputs."""
        return parse_inputs(self.input_shape)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image, or (1, 1, N) of the values of several inputs."""
        return shape_of(self.input_shape)

    @property
    def settings(self) -> OptimizerSettings:
        """The optimizer."""
        schedule: Any = "constant" if self.optimizer == "schedulefree" else "cosine"
        return OptimizerSettings(self.optimizer, schedule=schedule, state=self.optimizer_state)


@dataclass(frozen=True)
class Reduction:
    """A change to a step, and its peak.

    Attributes:
        name: what changes.
        peak_bytes: peak of live tensors with the change; None if it cannot be applied.
        why: what it does, what it costs and how to get it, or why it cannot be applied.
        fits: whether it is expected to fit the memory budget; None without one.
    """

    name: str
    peak_bytes: int | None
    why: str
    fits: bool | None = None


@dataclass(frozen=True)
class StepEstimate:
    """A training step at one batch size: forward and backward pass of the whole batch, all gradients, then the update.

    Attributes:
        peak_bytes: peak of live tensors.
        layer: where the peak is: a module's name, ``loss`` or ``update``.
        during: in which pass.
        at_peak: bytes of every kind at the peak; they sum to it.
        whole: bytes of every kind but temporaries where it is largest. The peak may be below their sum: activations are
            freed as gradients of weights come.
        fits: whether it is expected to fit the memory budget; None without one.
        measured_bytes: peak of the process in real steps, above what it had before; None if not measured.
        lower: what would lower the peak.
    """

    batch_size: int
    peak_bytes: int
    layer: str
    during: Literal["forward", "backward", "update"]
    at_peak: dict[str, int]
    whole: dict[str, int]
    lower: tuple[Reduction, ...]
    fits: bool | None = None
    measured_bytes: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """How much memory training needs, by batch size.

    Attributes:
        steps: one per batch size, in the order given; then the largest power of two that fits, if a budget was given.
        notes: why, in short lines.
        input_shape: channels, height and width of one image; of several inputs 1x1xN, for their N values.
        metric: what all predicted bytes are.
        process_extra_bytes: upper bound on what a process takes beyond that.
        divided: whether the network can be divided into units, which recomputation and most strategies need.
        memory_bytes: the budget; None if not given.
        largest_batch: the largest power of two, up to 1024, that is expected to fit; 0 if none does, None without a
            budget.
        inputs: what the network takes, if it is several inputs.
    """

    model: str
    input_shape: tuple[int, ...]
    parameters: int
    optimizer: str
    steps: tuple[StepEstimate, ...]
    notes: tuple[str, ...] = ()
    metric: str = METRIC
    process_extra_bytes: int = PROCESS_EXTRA_BYTES
    divided: bool = True
    memory_bytes: int | None = None
    largest_batch: int | None = None
    inputs: tuple[Input, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The peak at the first batch size."""
        return self.steps[0].peak_bytes

    def summary(self) -> str:
        """The answer in one line."""
        peaks = ", ".join(f"{format_bytes(each.peak_bytes)} at batch {each.batch_size}" for each in self.steps)
        return f"{self.model}: {peaks}"

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return dict(to_data(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MemoryEstimate:
        """Inverse of :meth:`to_json`."""
        return from_data(cls, data)
