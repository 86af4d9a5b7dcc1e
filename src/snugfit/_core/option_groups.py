"""Groups of options common to all runs: flags on the command line, keywords in Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from snugfit._core.amounts import Sides, parse_sides
from snugfit._core.budget import Aim, TimeRatio
from snugfit._core.options import (
    AUTO,
    Checked,
    ClassWeights,
    Common,
    Count,
    DecodingThreads,
    ImageSize,
    InputShapes,
    Positive,
    Range,
    Seconds,
    Share,
    Size,
    SizeOrAuto,
    Text,
    Workers,
)
from snugfit._core.workload import (
    Activations,
    GivenOptimizer,
    Keep,
    LossName,
    OptimizerSettings,
    OptimizerState,
    Precision,
    ScheduleName,
    TaskName,
    WeightDtype,
    check_weight_dtype,
)
from snugfit.errors import UsageError

_RUNS = ("plan", "train")
SYNTHETIC = "synthetic images"
"""Name of data of which only the shape is given."""
Trained = Literal["sidenet", "head", "bias+head", "full"]
"""Trained part of a pre-trained model: side network and head, the head, all biases and the head, or everything."""
Split = Literal["train", "val", "test", "all"]
ExportFormat = Literal["safetensors", "onnx", "both"]
Pixels = Annotated[int, Range(1, 65_536)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Device = Annotated[str, Text("cpu, cuda or cuda:N", re.compile(r"cpu|cuda(:\d{1,3})?").fullmatch)]


@dataclass(frozen=True)
class ModelOptions(Checked):
    """The network.

    Attributes:
        model: a name (``vgg16``), ``torchvision:NAME``, ``timm:NAME`` or your own ``module:function``.
        weights: safetensors (or weights-only ``.pth``) file to start from; or imagenet: the weights that torchvision or
            timm, if installed, offers for the model.
        image_size: side of the square input in pixels, or height and width of a rectangle, like 96x160, for images of
            files; the data set's own by default.
    """

    model: Annotated[str, Common("NAME", "network: vgg16, resnet18, timm:NAME or module:function")] = "vgg16"
    weights: Annotated[str | None, Common("FILE", "pre-trained weights to start from, or imagenet", _RUNS)] = None
    image_size: ImageSize | int | None = None

    @property
    def sides(self) -> Sides | None:
        """Side of square images, or height and width; None for those of the data set."""
        return None if self.image_size is None else parse_sides(str(self.image_size))


@dataclass(frozen=True)
class DataOptions(Checked):
    """The images.

    Attributes:
        data: a data set's name, digits by default, ``folder:PATH`` with one folder per class, or your own
            ``module:function`` that returns data sets; for several labels a folder with a ``labels.csv``; to detect, a
            folder of images with boxes (YOLO or COCO), a ``data.yaml`` or an ``instances_*.json``.
        input_shape: shape of one image, like 3x32x32, or of several inputs, like image=3x32x32,ids=16xint64: plan or
            profile without data, with --classes. Counts are those of --max-train (10,000 by default) and --max-val (a
            tenth of that). Not to train.
        task: classify images; multi-label, if an image may have several classes or none; or detect objects in images.
        data_dir: folder of data sets, to which missing ones are downloaded if torchvision is installed; by default
            ``SNUGFIT_DATA``, or ``~/.cache/snugfit/data``.
        classes: expected number of classes; an error is raised when the data has another number.
        max_train: maximum number of training images.
        max_val: maximum number of validation images, and of test images.
        workers: threads that decode images; 0 decodes in the training thread. auto, the default, takes one for each
            core, 2 at least and 8 at most.
    """

    data: Annotated[str | None, Common("NAME", "data set, folder:PATH of classes, or module:function")] = None
    input_shape: Annotated[
        InputShapes | None, Common("SHAPE", "like 3x32x32, or inputs 3x9x9,16xint64, instead of data", ("profile",))
    ] = None
    task: TaskName = "classify"
    data_dir: str | None = None
    classes: Annotated[Count | None, Common("N", "number of classes, with --input-shape", ("profile",))] = None
    max_train: Count | None = None
    max_val: Count | None = None
    workers: DecodingThreads | int = "auto"

    @property
    def name(self) -> str:
        """The data set: digits by default, or synthetic images if only their shape is given."""
        return self.data or ("digits" if self.input_shape is None else SYNTHETIC)


@dataclass(frozen=True)
class BudgetOptions(Checked):
    """The budget.

    Attributes:
        memory: memory budget, like 100MB (10^6 bytes) or 512MiB (2^20); unlimited by default. In Python also a
            number of bytes, at least a million. It counts what a run adds to the processes at rest; on a GPU all that
            the process takes of it, context and libraries included.
        total_memory: budget of all private memory of all processes of the run, those at rest included, like 400MB; or
            auto: what this machine or container has, less what others use. It replaces --memory.
        host_memory: budget of the process's private memory beside a GPU's --memory, pinned pages included, like 2GB.
        storage: disk budget for caches and decoded photos, like 2GB.
        time_ratio: largest step time, as a fraction in (0, 1] of a full training step (rho of ElasticTrainer). Only
            strategies that select tensors keep a time ratio.
        devices: number of devices; with more than one, ``auto`` considers strategies that distribute a network over
            processes, each with the whole memory budget.
    """

    memory: Annotated[Size | None, Common("SIZE", "memory budget, like 100MB; unlimited by default", _RUNS)] = None
    total_memory: SizeOrAuto | None = None
    storage: Size | None = None
    time_ratio: TimeRatio | None = None
    devices: Workers = 1
    host_memory: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_memory is None:
            return
        if self.memory is not None:
            raise UsageError(
                f"--memory {self.memory} and --total-memory {self.total_memory} are two budgets of the same memory; "
                "give --memory for what the run adds, or --total-memory for all its processes."
            )
        if self.devices > 1:
            raise UsageError(
                f"--total-memory counts the processes of one machine, and --devices {self.devices} takes several; "
                "give each its --memory."
            )

    @property
    def limits_memory(self) -> bool:
        """Whether there is a budget of memory."""
        return self.memory is not None or self.total_memory is not None

    def check_trials(self) -> None:
        """Refuse trials in processes of their own, next to the one that plans; raises UsageError."""
        if self.total_memory is not None:
            raise UsageError(
                "trials run next to the process that plans, beyond --total-memory: give --memory, or no --compare."
            )

    def with_memory(self, size: str) -> BudgetOptions:
        """The same with another budget of memory, by the flag that was given."""
        if self.total_memory is None:
            return replace(self, memory=size)
        return replace(self, total_memory=size)


FROM_PYTHON = "python"
"""Name of a model or data passed from Python; to resume, pass it again."""


@dataclass(frozen=True)
class TrainingOptions(Checked):
    """Optimization and data augmentation.

    Attributes:
        epochs: passes over the training images (of every block, where blocks train one after another).
        batch_size: effective batch size; smaller batches that fit are accumulated to it. 128 by default, and 16 with
            --weights and fewer than 1,000 training images.
        batch_limit: largest batch of a block; the batch size by default.
        optimizer: sgd, adamw, or schedulefree (schedule-free AdamW); sgd by default, unless the named strategy has
            another default. In Python also a function that makes one of a parameter group.
        optimizer_state: type of sgd's momentum and adamw's moments between steps: float32, bfloat16 (half the memory)
            or int8 (a quarter). Both round at random, so that updates are no longer exact. float32 by default, and
            int8 if only that makes an exact strategy fit the memory budget. Not for schedulefree.
        lr: peak learning rate; 0.01 for sgd, 0.001 for adamw and 0.005 for schedulefree by default, and a tenth of that
            with --weights, unless the named strategy has another default; to detect, 0.0003 for all of them.
        weight_decay: weight decay; by default 0.0005, and 0 for schedulefree, unless the
            named strategy has another default.
        schedule: course of the learning rate: cosine (to zero), constant, step (a tenth from half of the steps on, a
            hundredth from three quarters on) or one-cycle (up in 30 % of the steps, then down); cosine by default,
            constant for schedulefree. In Python also a function of step and number of steps.
        warmup_epochs: epochs, such as 1 or 0.5, in which the learning rate rises linearly per step to its peak; the
            schedule takes the remaining steps. Every block has its own, where blocks train one after another. Not for
            schedulefree.
        clip_norm: largest norm of all gradients of a step together; larger ones are scaled to it. All gradients are
            then held until the step, as with micro-batches, and not freed one by one. For backprop and checkpoint.
        ema: decay per step, like 0.999, of an exponential moving average of the weights, which is validated, tested and
            saved as the model. It takes as much memory as the weights. For backprop and checkpoint; not for
            schedulefree or weights in bfloat16.
        keep: the epoch whose weights are kept: best (on validation images; the latest of equally good ones) or last.
            Without validation images it is the last. blockwise keeps the last of every block, because a block's
            successors train on its outputs.
        patience: end training after so many epochs without a better validation accuracy. The schedule of the learning
            rate stays that of all epochs, and predicted times are for all of them. For backprop and checkpoint.
        precision: float32, or bfloat16 or float16 through autocast. float16 scales the loss, and skips steps whose
            gradients overflow; all gradients are then held until the step, as with micro-batches. It is for backprop
            and checkpoint, without --activations int8 or int4.
        activations: how feature maps are kept for the backward pass: exact, paged (in a file in the cache folder, or on
            a GPU in host memory, where memory does not suffice; gradients are the same to the bit), int8 (a quarter of
            the memory) or int4 (an eighth). The last two round at random, so that gradients are no longer exact. paged
            is for checkpoint, and the last two are for backprop.
        weight_dtype: type in which trained weights of convolutions and linear layers are kept: float32, or bfloat16
            (half the memory). With bfloat16 each update rounds at random, so that it is no longer exact; the trained
            model is float32. By default float32, and bfloat16 if only that and int8 state make an exact strategy fit
            the budget. For backprop and checkpoint; not for schedulefree.
        augment: augment training images (crop, flip; to detect, colours too); digits are never flipped.
        crop: whether augmentation crops.
        erase: probability that a rectangle of an augmented training image is erased.
        mixup: blend each image of a step and its target with another one, by a share from Beta(a, a) for this a, like
            0.2. For backprop and checkpoint; not to detect, or with class weights.
        cutmix: replace a box of each image of a step by that of another one, and mix their targets by its area, whose
            share is from Beta(a, a) for this a, like 1. With --mixup each step takes one of the two. For backprop and
            checkpoint; not to detect, or with class weights.
        label_smoothing: share of each target that is spread evenly over all classes, in the cross entropies of the
            network and of local losses; not to detect, or for several labels.
        class_weights: weights of the classes in the cross entropy: balanced (in inverse proportion to their training
            images, 1 on average over the images), or a number for each class, like 1,2.5. For backprop and
            checkpoint; not to detect, or for several labels.
        loss: the network's loss: cross-entropy (binary for several labels), or focal, which counts what is classified
            well less. In Python also a function of logits and labels that returns their mean loss. Others than
            cross-entropy are for backprop and checkpoint, without class weights and label smoothing; not to detect.
        focal_gamma: exponent of the focal loss, 2 by default: how much less an image counts that is classified well.
        seed: seed of everything random.
    """

    epochs: Annotated[Count, Common("N", "passes over the training images; 10 by default", _RUNS)] = 10
    batch_size: Annotated[Count | None, Common("N", "images per step; 128 by default")] = None
    batch_limit: Count | None = None
    optimizer: GivenOptimizer | None = None
    optimizer_state: OptimizerState | None = None
    lr: Positive | None = None
    weight_decay: Annotated[float | None, Range(least=0)] = None
    schedule: ScheduleName | None = None
    warmup_epochs: Annotated[float, Range(least=0)] = 0.0
    clip_norm: Positive | None = None
    ema: Annotated[float | None, Range(above=0, below=1)] = None
    keep: Keep = "best"
    patience: Count | None = None
    precision: Precision = "float32"
    activations: Activations = "exact"
    weight_dtype: WeightDtype | None = None
    augment: bool = True
    crop: bool = True
    erase: Share = 0.0
    mixup: Positive | None = None
    cutmix: Positive | None = None
    label_smoothing: Annotated[float, Range(least=0, below=1)] = 0.0
    class_weights: ClassWeights | None = None
    loss: LossName = "cross-entropy"
    focal_gamma: Annotated[float | None, Range(least=0)] = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_epochs and self.warmup_epochs >= self.epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} leaves none of --epochs {self.epochs} for the schedule; "
                "use fewer, or train longer."
            )
        if self.loss != "cross-entropy" and (self.label_smoothing or self.class_weights is not None):
            flag = "--class-weights" if self.class_weights is not None else "--label-smoothing"
            raise UsageError(f"{flag} applies to cross entropy; leave it out with --loss {self.loss}.")
        if self.focal_gamma is not None and self.loss != "focal":
            raise UsageError(f"--focal-gamma {self.focal_gamma:g} is for --loss focal; leave it out, or add that.")
        if self.mixes and self.class_weights is not None:
            raise UsageError(
                f"--class-weights {self.class_weights} weights images of one class, and {self.mixes} mixes classes; "
                "leave one out."
            )
        OptimizerSettings(  # refuses what its schedule, or schedulefree, does not support
            self.optimizer or "sgd",
            schedule=self.schedule or ("constant" if self.optimizer == "schedulefree" else "cosine"),
            warmup_epochs=self.warmup_epochs,
            state=self.optimizer_state or "float32",
            ema=self.ema,
        )
        for flag, value in {"--lr": self.lr, "--weight-decay": self.weight_decay}.items():
            if self.optimizer == FROM_PYTHON and value is not None:
                raise UsageError(f"{flag} {value:g} is not for an optimizer of your own; set it there.")
        check_weight_dtype(self.weight_dtype, self.optimizer)
        if self.precision == "float16" and self.activations in ("int8", "int4"):
            raise UsageError(
                f"--activations {self.activations} rounds feature maps in float32 and bfloat16 only; leave it out, or "
                "use --precision bfloat16."
            )
        if self.ema is not None and self.weight_dtype == "bfloat16":
            raise UsageError(
                f"--ema {self.ema:g} adds less to an average than {self.weight_dtype} resolves; leave it out, or "
                f"--weight-dtype {self.weight_dtype}."
            )

    @property
    def mixes(self) -> str | None:
        """The first flag that mixes images, with its value; None if none does."""
        given = ((name, getattr(self, name)) for name in ("mixup", "cutmix"))
        return next((f"--{name} {alpha:g}" for name, alpha in given if alpha is not None), None)


@dataclass(frozen=True)
class BaseStrategyOptions(Checked):
    """The strategy. Every strategy adds its own options.

    Attributes:
        strategy: auto is the best that fits, and exact the best of those with exact gradients, which is planned in
            less time. ``snugfit plan`` shows which are considered, and why not the others.
        aim: criterion for the best that fits: time (least seconds to finish), memory (least predicted peak) or accuracy
            (least expected loss of accuracy, then time: exact gradients first, or elastic with --weights
            and few training images); time by default, accuracy if --weights are given.
    """

    strategy: Annotated[str, Common("NAME", "way of training: a name, auto (the best that fits) or exact", _RUNS)] = (
        AUTO
    )
    aim: Aim | None = None


@dataclass(frozen=True)
class MachineOptions(Checked):
    """The machine and its folders.

    Attributes:
        device: cpu or cuda[:N]; cuda by default if available.
        threads: compute threads; all cores by default, or OMP_NUM_THREADS.
        out: run folder; a new one under ``runs/`` by default.
        cache_dir: folder of activation caches; the run folder by default.
        profile_cache: cache of measurements of networks on this machine: auto (in ``snugfit/profiles`` below
            ``XDG_CACHE_HOME`` or ``~/.cache``), a folder, renew (measure again and replace the cache), or off.
        profile_time: how long measuring may go on before auto leaves out strategies that were not measured, like 10s;
            it measures on until something fits. By default all are measured, so that the same command plans the same.
    """

    device: Device | None = None
    threads: Workers | None = None
    out: Annotated[str | None, Common("FOLDER", "run folder; a new one under runs/ by default", ("train",))] = None
    cache_dir: str | None = None
    profile_cache: str = "auto"
    profile_time: Seconds | None = None


@dataclass(frozen=True)
class BaseRequest:
    """The options of one run that are independent of strategies."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    budget: BudgetOptions = field(default_factory=BudgetOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    strategy: BaseStrategyOptions = field(default_factory=BaseStrategyOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)

    @property
    def from_python(self) -> bool:
        """Whether model, data or functions were passed from Python, so that no other process can have them."""
        training = self.training
        functions = (training.loss, training.schedule, training.optimizer)
        return FROM_PYTHON in (self.model.model, self.data.data, *functions)

    @property
    def aim(self) -> Aim:
        """The aim of the plan: time by default, accuracy if weights are given."""
        return self.strategy.aim or ("time" if self.model.weights is None else "accuracy")


@dataclass(frozen=True)
class OnnxOptions(Checked):
    """How ONNX files are written.

    Attributes:
        free_size: let images have any size, where the network takes it; the size of training alone otherwise.
        int8: also write `model.int8.onnx`, with weights and feature maps in 8 bits, by ONNX Runtime's quantiser, and
            measure its accuracy. It needs the data set.
        data: data set for --int8, a name or `folder:PATH`; the run's own by default.
        data_dir: where data sets are for --int8 (`SNUGFIT_DATA` otherwise).
    """

    free_size: Annotated[bool, Common("", "let images of the ONNX file have any size")] = False
    int8: Annotated[bool, Common("", "also write ONNX in 8 bits, and measure its accuracy")] = False
    data: Annotated[str | None, Common("NAME", "data set for --int8; the run's own by default")] = None
    data_dir: str | None = None

    def check(self, format: str) -> None:
        """Check these options with the files to write; raises UsageError."""
        if format == "safetensors" and (self.free_size or self.int8):
            flag = "--int8" if self.int8 else "--free-size"
            raise UsageError(f"{flag} is for ONNX; leave it out, or --format safetensors.")
        if not self.int8 and (self.data, self.data_dir) != (None, None):
            raise UsageError("--data and --data-dir of an export are for --int8; add it, or leave them out.")


PLAIN_ONNX = OnnxOptions()
"""ONNX files as they are by default."""


@dataclass(frozen=True)
class PictureOptions:
    """Options of pictures; see :func:`snugfit.draw_report`."""

    data: str | None = None
    data_dir: str | None = None
    unit: str | None = None
    classes: Sequence[int] = (0, 1)
    images: int = 6
