"""The workload: everything that cost depends on except budget and hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from snugfit._core.inputs import Input
from snugfit._core.options import Checked, Range
from snugfit.errors import UsageError

OptimizerName = Literal["sgd", "adamw", "schedulefree"]
GivenOptimizer = Literal[OptimizerName, "python"]
"""``python`` is a function that was passed from Python."""
ScheduleName = Literal["cosine", "constant", "step", "one-cycle", "python"]
OptimizerState = Literal["float32", "bfloat16", "int8"]
Activations = Literal["exact", "paged", "int8", "int4"]
WeightDtype = Literal["float32", "bfloat16"]
LossName = Literal["cross-entropy", "focal", "python"]
"""``python`` is a function that was passed from Python."""
Keep = Literal["best", "last"]
Precision = Literal["float32", "bfloat16", "float16"]
TaskName = Literal["classify", "multi-label", "detect"]
_STATE_SHARES: dict[OptimizerState, float] = {"float32": 1, "bfloat16": 1 / 2, "int8": (1 + 4 / 256) / 4}
"""Bytes of a kept value, with its share of a scale, per byte in float32."""
BATCH_SIZE = 128
"""Images of a step by default."""
FINE_TUNING_BATCH_SIZE = 16
"""Images of a step by default if pre-trained weights are fine-tuned on few images: an epoch then has enough steps."""
FEW_IMAGES = 1000
"""Training images below which fine-tuning has defaults of its own; measured with 300 and 900 images."""


@dataclass(frozen=True)
class OptimizerSettings(Checked):
    """Optimizer and learning-rate schedule.

    Attributes:
        name: ``sgd`` (momentum 0.9, Nesterov off), ``adamw``, or ``schedulefree`` (schedule-free AdamW, which averages
            weights instead of lowering the learning rate), or ``python`` (a function that was passed from Python).
        lr: peak learning rate; 1 for ``python``, whose parameters have their own.
        weight_decay: L2 penalty (``sgd``) or decoupled decay (the others).
        schedule: ``cosine`` (per step, to zero), ``constant``, ``step`` (a tenth from half, a hundredth from three
            quarters of the steps on), ``one-cycle`` (up, then down), or ``python`` (a function that was passed from
            Python); ``schedulefree`` requires ``constant``.
        warmup_epochs: epochs, or parts of them, in which the learning rate first rises per step to its peak.
        state: type in which momentum and moments are kept between steps; ``int8`` has a scale for each 256 values.
        ema: decay per step of a moving average of the weights, in float32, which is evaluated; None without one.
        own_state: bytes of state per byte of trained weights, for ``python``.
    """

    name: GivenOptimizer = "sgd"
    lr: Annotated[float, Range(above=0)] = 0.01
    momentum: Annotated[float, Range(least=0, below=1)] = 0.9
    weight_decay: Annotated[float, Range(least=0)] = 5e-4
    schedule: ScheduleName = "cosine"
    warmup_epochs: Annotated[float, Range(least=0)] = 0.0
    state: OptimizerState = "float32"
    ema: Annotated[float | None, Range(above=0, below=1)] = None
    own_state: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.averages and self.schedule != "constant":
            raise UsageError(f"--optimizer schedulefree has no --schedule {self.schedule}; leave out --schedule.")
        if self.averages and self.warmup_epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} is not supported with --optimizer schedulefree; leave it out, "
                "or use sgd or adamw."
            )
        if self.schedule in ("one-cycle", "python") and self.warmup_epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} is not supported with --schedule {self.schedule}, which rises "
                "by itself; leave it out."
            )
        if self.averages and self.ema is not None:
            raise UsageError(
                f"--optimizer schedulefree averages weights by itself; leave out --ema {self.ema:g}, or use sgd or "
                "adamw."
            )
        if self.averages and self.state != "float32":
            raise UsageError(
                f"--optimizer-state {self.state} is not supported with --optimizer schedulefree, whose state is "
                "weights; use sgd or adamw."
            )
        if self.name == "python" and self.state != "float32":
            raise UsageError(
                f"--optimizer-state {self.state} is for sgd and adamw, not for an optimizer of your own; leave it out."
            )

    @property
    def state_per_parameter(self) -> float:
        """Bytes of optimizer state per byte of trained weights: 1 for momentum, 2 for AdamW, 1 more for an average."""
        return self._moments * _STATE_SHARES[self.state] + self.own_state + (self.ema is not None)

    @property
    def _moments(self) -> int:
        return {"sgd": int(self.momentum > 0), "python": 0}.get(self.name, 2)

    @property
    def rounds(self) -> bool:
        """Whether state is rounded after every step, so that updates are not exact."""
        return self.state != "float32" and self._moments > 0

    @property
    def averages(self) -> bool:
        """Whether evaluation uses averaged weights."""
        return self.name == "schedulefree"


def check_weight_dtype(weight_dtype: str | None, optimizer: str | None) -> None:
    """Refuse lowered weights with an optimizer that averages them or rounds as it likes; raises UsageError."""
    if weight_dtype not in (None, "float32") and optimizer == "python":
        raise UsageError(
            f"--weight-dtype {weight_dtype} is for sgd and adamw, not for an optimizer of your own; leave it out."
        )
    if weight_dtype not in (None, "float32") and optimizer == "schedulefree":
        raise UsageError(
            f"--weight-dtype {weight_dtype} is not supported with --optimizer schedulefree, which averages weights; "
            "use sgd or adamw."
        )


@dataclass(frozen=True)
class Workload:
    """Model, data shapes and counts, optimizer, epochs and precision.

    Attributes:
        model, data: names, as given.
        input_shape: channels, height, width of one image.
        train_count, val_count, test_count: images in each split.
        epochs: passes over the training split (per block in ``blockwise``).
        batch_size: effective batch; smaller batches that fit are accumulated to it.
        batch_limit: largest batch of a block (Algorithm 1's B in NeuroFlux).
        keep: the epoch whose weights are kept: the best on validation images, or the last.
        patience: epochs without a better validation accuracy after which training ends; None trains all epochs.
        precision: ``float32``, or ``bfloat16`` or ``float16`` through autocast.
        activations: what feature maps are kept in for the backward pass: ``exact`` or ``paged`` (also on disk), or
            ``int8`` or ``int4`` with a minimum and a scale for each 256 values.
        weight_dtype: type in which trained weights of convolutions and linear layers are kept.
        augment: whether training images are augmented.
        metrics: names of metrics that were passed from Python.
        inputs: what the network takes, if it is several inputs; ``input_shape`` is then that of their values, 1x1xN.
        pretrained: whether training starts from pre-trained weights.
        mixed: whether the images of a step are mixed, so that targets are probabilities of classes.
        seed: seed of initialisation, shuffling and augmentation.
        task: prediction for an image: its class, whether it has each class, or boxes of objects.
        anchors: widths and heights of anchor boxes, as fractions of the image's sides.
        most_boxes: most boxes of an image; targets of a batch are padded to it.
        label_smoothing: share of each target that cross entropies spread evenly over all classes.
        class_weights: weight of each class in the network's cross entropy; empty if all count the same.
        loss: the network's loss to classify; of several labels the binary one of this name.
        focal_gamma: exponent of the focal loss.
        clip_norm: largest norm of all gradients of a step together, to which they are scaled; None without clipping.
    """

    model: str
    data: str
    input_shape: tuple[int, int, int]
    classes: int
    train_count: int
    val_count: int
    test_count: int
    epochs: int = 10
    batch_size: int = 128
    batch_limit: int = 128
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    keep: Keep = "best"
    precision: Precision = "float32"
    activations: Activations = "exact"
    weight_dtype: WeightDtype = "float32"
    augment: bool = True
    seed: int = 0
    task: TaskName = "classify"
    anchors: tuple[tuple[float, float], ...] = ()
    most_boxes: int = 0
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    loss: LossName = "cross-entropy"
    focal_gamma: float = 2.0
    clip_norm: float | None = None
    patience: int | None = None
    mixed: bool = False
    metrics: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    pretrained: bool = False

    @property
    def fine_tunes_few(self) -> bool:
        """Whether pre-trained weights are fine-tuned on few images."""
        return self.pretrained and self.train_count < FEW_IMAGES

    @property
    def rounded_flags(self) -> tuple[str, ...]:
        """The flags by which updates are rounded at random, so that they are not exact."""
        state = (f"--optimizer-state {self.optimizer.state}",) if self.optimizer.rounds else ()
        weights = (f"--weight-dtype {self.weight_dtype}",) if self.weight_dtype != "float32" else ()
        return (*state, *weights)

    @property
    def effective_batch(self) -> int:
        """Images of a step: the batch size, or all training images if there are fewer."""
        return min(self.batch_size, self.train_count)

    def step_images(self, micro_batch: int, micro_batches: int) -> int:
        """Images of a step of so many micro-batches, the largest of which has ``micro_batch`` images."""
        return micro_batch if micro_batches == 1 else min(micro_batch * micro_batches, self.effective_batch)

    @property
    def holds_gradients(self) -> bool:
        """Whether all gradients of a step are needed before any is applied: to clip them, or to skip the step."""
        return self.clip_norm is not None or self.precision == "float16"

    @property
    def compresses(self) -> bool:
        """Whether kept feature maps are rounded, so that gradients are not exact."""
        return self.activations in ("int8", "int4")

    def __post_init__(self) -> None:
        if self.task == "detect" and not (self.anchors and self.most_boxes):
            raise UsageError("detection needs anchors, and at least one box in an image.")
        check_weight_dtype(self.weight_dtype, self.optimizer.name)
        for name in ("epochs", "batch_size", "batch_limit", "classes", "train_count"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}.")
