"""The workload: everything that cost depends on except budget and hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from snugfit._core.options import Checked, Range
from snugfit.errors import UsageError

OptimizerName = Literal["sgd", "adamw", "schedulefree"]
ScheduleName = Literal["cosine", "constant"]
Keep = Literal["best", "last"]
Precision = Literal["float32", "bfloat16"]
TaskName = Literal["classify", "detect"]


@dataclass(frozen=True)
class OptimizerSettings(Checked):
    """Optimizer and learning-rate schedule.

    Attributes:
        name: ``sgd`` (momentum 0.9, Nesterov off), ``adamw``, or ``schedulefree`` (schedule-free AdamW, which averages
            weights instead of lowering the learning rate).
        lr: peak learning rate.
        weight_decay: L2 penalty (``sgd``) or decoupled decay (the others).
        schedule: ``cosine`` (per step, to zero) or ``constant``; ``schedulefree`` requires ``constant``.
        warmup_epochs: epochs, or parts of them, in which the learning rate first rises per step to its peak.
    """

    name: OptimizerName = "sgd"
    lr: Annotated[float, Range(above=0)] = 0.01
    momentum: Annotated[float, Range(least=0, below=1)] = 0.9
    weight_decay: Annotated[float, Range(least=0)] = 5e-4
    schedule: ScheduleName = "cosine"
    warmup_epochs: Annotated[float, Range(least=0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.averages and self.schedule != "constant":
            raise UsageError(f"--optimizer schedulefree has no --schedule {self.schedule}; leave out --schedule.")
        if self.averages and self.warmup_epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} is not supported with --optimizer schedulefree; leave it out, "
                "or use sgd or adamw."
            )

    @property
    def state_per_parameter(self) -> int:
        """Tensors of optimizer state per parameter."""
        return int(self.momentum > 0) if self.name == "sgd" else 2

    @property
    def averages(self) -> bool:
        """Whether evaluation uses averaged weights."""
        return self.name == "schedulefree"


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
        precision: ``float32``, or ``bfloat16`` through autocast.
        augment: whether training images are augmented.
        seed: seed of initialisation, shuffling and augmentation.
        task: prediction for an image: its class, or boxes of objects.
        anchors: widths and heights of anchor boxes, as fractions of the image's sides.
        most_boxes: most boxes of an image; targets of a batch are padded to it.
        label_smoothing: share of each target that cross entropies spread evenly over all classes.
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
    augment: bool = True
    seed: int = 0
    task: TaskName = "classify"
    anchors: tuple[tuple[float, float], ...] = ()
    most_boxes: int = 0
    label_smoothing: float = 0.0

    @property
    def effective_batch(self) -> int:
        """Images of a step: the batch size, or all training images if there are fewer."""
        return min(self.batch_size, self.train_count)

    def __post_init__(self) -> None:
        if self.task == "detect" and not (self.anchors and self.most_boxes):
            raise UsageError("detection needs anchors, and at least one box in an image.")
        for name in ("epochs", "batch_size", "batch_limit", "classes", "train_count"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}.")
