"""What a user asks for, as typed groups of options: flags on the command line, keywords in Python."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from snugfit._core.budget import Aim, TimeRatio
from snugfit._core.options import Checked, Count, Names, Range, Share, Size, Text, Workers
from snugfit._core.registry import STRATEGIES
from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import OptimizerName, Precision, ScheduleName, TaskName

CacheDtype = Literal["float32", "float16", "bfloat16", "uint8"]
FeedbackRule = Literal["dfa", "drtp", "pepita"]
Scheme = Literal["elastic", "full", "head", "bn+bias", "prunetrain", "rep-net", "bias+head"]
Trained = Literal["sidenet", "head", "bias+head", "full"]
"""What trains of a pre-trained model: a side network and the head, the head, all biases and the head, or everything."""
ImportanceMetric = Literal["contribution", "weight", "gradient"]
"""``contribution`` is ElasticTrainer's own; it compares with the others in its Figure 20."""
PruneImportance = Literal["reconstruction", "activation", "filter"]
Choice = Literal["auto", "on", "off"]
WeightStorage = Literal["auto", "float32", "int8"]
WeightUpdate = Literal["all-reduce", "gateway"]
TileSizes = Literal["equal", "speed"]
Rest = Literal["gateway", "replicated"]
"""Where the layers behind the tiled ones are computed: by rank 0, or by every process."""
Split = Literal["train", "val", "test", "all"]
ExportFormat = Literal["safetensors", "onnx", "both"]
Pixels = Annotated[int, Range(1, 65_536)]
Positive = Annotated[float, Range(above=0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Device = Annotated[str, Text("cpu, cuda or cuda:N", re.compile(r"cpu|cuda(:\d{1,3})?").fullmatch)]
Prune = Annotated[
    str,
    Text(
        "auto, on, off or a share of channels between 0 and 1",
        lambda text: text in get_args(Choice) or 0 < float(text) < 1,
    ),
]
Tiles = Annotated[
    str, Text("auto, or tiles down and across like 2x3", re.compile(r"auto|[1-9]\d{0,3}x[1-9]\d{0,3}").fullmatch)
]
Groups = Annotated[
    str,
    Text(
        "auto, one, every, or groups of layers like 0-4 | 4-11 | 11-16",
        re.compile(r"auto|one|every|\s*\d+-\d+\s*(\|\s*\d+-\d+\s*)*").fullmatch,
    ),
]


def prune_ratio(prune: str) -> float | None:
    """Share of channels to remove in (0, 1), where one is asked for; None for auto, on and off."""
    return None if prune in get_args(Choice) else float(prune)


@dataclass(frozen=True)
class ModelOptions(Checked):
    """Which network.

    Attributes:
        model: a name (``vgg16``), ``torchvision:NAME``, ``timm:NAME`` or ``module:function`` of your own.
        weights: safetensors (or weights-only ``.pth``) file to start from.
        image_size: side of the square input in pixels; the data set's own by default.
    """

    model: str = "vgg16"
    weights: str | None = None
    image_size: Pixels | None = None


@dataclass(frozen=True)
class DataOptions(Checked):
    """Which images.

    Attributes:
        data: a data set's name, or ``folder:PATH`` with one folder per class; to detect, a folder of images with boxes
            (YOLO or COCO), a ``data.yaml`` or an ``instances_*.json``.
        task: classify images, or detect objects in them.
        data_dir: where data sets are (``SNUGFIT_DATA`` otherwise).
        classes: expected number of classes; an error is raised when the data has another number.
        max_train: use at most this many training images.
        max_val: use at most this many validation (and test) images.
        workers: threads that decode images; 0 decodes in the thread that trains.
    """

    data: str = "digits"
    task: TaskName = "classify"
    data_dir: str | None = None
    classes: Count | None = None
    max_train: Count | None = None
    max_val: Count | None = None
    workers: Annotated[int, Range(0, 1024)] = 2


@dataclass(frozen=True)
class BudgetOptions(Checked):
    """What may be used.

    Attributes:
        memory: memory budget, like 100MB (10^6 bytes) or 512MiB (2^20); unlimited by default. From Python, a number of
            bytes from a million on will do.
        storage: disk budget for caches, like 2GB.
        time_ratio: time a training step may take, as a fraction in (0, 1] of one that trains everything; this is
            ElasticTrainer's rho, ``elastic`` keeps to it, and takes 0.5 by default.
        devices: how many devices may take part; with more than one, ``auto`` considers ``tiled`` over as many
            processes, each with the memory budget to itself.
    """

    memory: Size | None = None
    storage: Size | None = None
    time_ratio: TimeRatio | None = None
    devices: Workers = 1


OWN = "python"
"""Stands for a model or data that was passed from Python, and must be passed again to go on."""


@dataclass(frozen=True)
class TrainingOptions(Checked):
    """How to train.

    Attributes:
        epochs: passes over the training images (of every block in ``blockwise``).
        batch_size: effective batch size; what does not fit is accumulated to it.
        batch_limit: largest batch of a block; the batch size by default.
        optimizer: sgd, adamw, or schedulefree (schedule-free AdamW); sgd by default, adamw for ``sidenet``.
        lr: peak learning rate; 0.01 for sgd, 0.001 for adamw and 0.005 for schedulefree by default, 0.0006 for
            ``sidenet``; to detect, 0.0003 for all of them.
        weight_decay: weight decay; 0.0005, but 0 for schedulefree and for ``sidenet``, by default.
        schedule: cosine or constant; cosine by default, constant for schedulefree.
        precision: float32, or bfloat16 through autocast.
        augment: augment training images (crop, flip; to detect, colours too); digits are never flipped.
        crop: whether augmentation crops.
        erase: probability that a rectangle of an augmented training image is erased.
        seed: seed of everything random.
    """

    epochs: Count = 10
    batch_size: Count = 128
    batch_limit: Count | None = None
    optimizer: OptimizerName | None = None
    lr: Positive | None = None
    weight_decay: Annotated[float | None, Range(least=0)] = None
    schedule: ScheduleName | None = None
    precision: Precision = "float32"
    augment: bool = True
    crop: bool = True
    erase: Share = 0.0
    seed: Seed = 0


@dataclass(frozen=True)
class StrategyOptions(Checked):
    """Which way of training, and its settings.

    Attributes:
        strategy: auto, backprop, checkpoint, blockwise, elastic, sidenet, tiled or feedback. ``snugfit plan`` says
            which of them auto considers, and why not the others.
        aim: what auto chooses by, among what fits: time (least seconds to finish), memory (least predicted peak) or
            accuracy (exact gradients of everything first, then what is expected to lose less, then time); time by
            default, accuracy where --weights are given.
        local_loss: local loss of ``blockwise``: aan, classic, linear, lls, lls-m or lls-mxm, with options of its own if
            need be, like ``lls:basis=cosine,mode=paper``; aan by default, or lls-mxm where nothing fits with aan.
        rho: grouping threshold of Algorithm 1 in NeuroFlux.
        block_units: most units in a block; 2 with the saturation stop, any number without.
        adaptive_batch: give every block its own batch size (off: the smallest one everywhere).
        residency: keep only the active ``block`` in memory, or ``all`` units as classic local learning does.
        saturation_stop: stop opening deeper blocks once a block no longer improves validation accuracy.
        exit_tolerance: validation accuracy that may be given up for a smaller exit; one standard error by default.
        cache: keep activations on disk, recompute them (``never``), or recompute only where the storage budget is too
            small for them (``auto``).
        cache_dir: where activation caches go; the run folder by default.
        cache_dtype: stored type of cached activations.
        views: augmented passes that are cached.
        accumulate: let ``backprop`` accumulate micro-batches to the batch size (off: one step per batch that fits).
        feedback_rule: learning rule of ``feedback``: dfa, drtp or pepita.
        scheme: what trains. In ``elastic``: elastic (its default: what matters now), full (everything), head (the
            classifier), bn+bias (norms, biases, classifier) or prunetrain (everything, while channels go). In
            ``sidenet``: rep-net (its default: a side network, classifier), bias+head (biases, classifier) or head.
        importance: what ``elastic`` ranks tensors by: contribution (by how much an update lowers the loss), or to
            compare with, gradient or weight (sums of magnitudes).
        interval: epochs between two selections of ``elastic``, or between two prunings of ``prunetrain``; fewer follow
            training more closely, and rank more often.
        importance_batch: images that ``elastic`` ranks tensors with, drawn anew for every selection; more tell
            importance more surely, and take longer.
        lean: let frozen tensors of ``elastic`` keep no activations, which saves memory (off: torch's own operators).
        lasso: share of the group lasso of ``prunetrain`` in the loss at the start.
        side_width: width of the network that ``sidenet`` adds, as a multiple of Rep-Net's; by default 1, and less only
            where nothing else makes it fit.
        side_lr: peak learning rate of that network, beside --lr for the classifier; 5 times --lr by default.
        prune: whether ``sidenet`` first removes channels of the frozen blocks whose maps need most: auto (only where
            the budget asks for it), on, off, or the share of channels to remove in (0, 1), like 0.5.
        prune_importance: which channels stay: those from which the next layer is rebuilt best (reconstruction), those
            with the largest activations, or with the largest filter weights.
        retrain_epochs: passes over the images in which a pruned network learns to do what it did before.
        retrain_data: images that the frozen network was trained on (a data set's name or folder:PATH), to retrain it
            with after pruning; labels are not used. Your own training images by default.
        sample_wise: run frozen blocks with large maps image by image: auto (where the budget asks for it), on or off.
            It is exact, and takes more time.
        weight_storage: how ``sidenet`` keeps frozen weights in memory: float32, int8 (a quarter of the bytes, rounded),
            or auto (int8 only where the budget asks for it).
        tiles: how many tiles ``tiled`` cuts maps into, down and across, like 2x3; by default as many as there are
            processes, or on one process what the memory budget asks for.
        forward_groups: groups of layers of ``tiled`` between which tiles exchange halos in the forward pass, like
            ``0-4 | 4-11 | 11-16``, or one, every (layer), or auto (what costs least). On one process, between which
            whole maps are kept.
        backward_groups: the same in the backward pass.
        recompute: whether ``tiled`` over several processes computes anew, group by group, the maps that the backward
            pass reads: on, off, or auto (where the budget asks for it). One process always does.
        replicas: shares of the batch in ``tiled``, each of which has tiles of its own: 2 on 8 processes means 4 tiles
            for each half of the batch.
        weight_update: where ``tiled`` updates weights: by all processes (all-reduce), or by the gateway, which sends
            them out: the others then have no optimizer.
        rest: who computes the layers of ``tiled`` behind the tiles: rank 0 (gateway), or every process, each of which
            is sent the whole last map and sends no gradient of it back (replicated).
        cluster: file that ``snugfit cluster doctor --out`` wrote; ``tiled`` chooses groups by these speeds and links,
            and adds the seconds that the network takes. Typical ones otherwise: 100 MB/s, half a millisecond.
        tile_sizes: tiles of ``tiled`` of equal size, or in proportion to the speeds of their devices (speed), as far
            as rows and columns can be; takes --cluster.
        scratch: whether ``tiled`` on one process keeps whole maps in memory-mapped files in the cache folder, where
            they take storage instead of memory: on, off, or auto (where the memory budget asks for it, with BatchNorm
            on batch statistics).
    """

    strategy: Annotated[str, Names(("auto", *STRATEGIES))] = "auto"
    aim: Aim | None = None
    local_loss: str | None = None
    rho: Share = 0.4
    block_units: Count | None = None
    adaptive_batch: bool = True
    residency: Literal["block", "all"] = "block"
    saturation_stop: bool = False
    exit_tolerance: Share | None = None
    cache: Literal["auto", "always", "never"] = "auto"
    cache_dir: str | None = None
    cache_dtype: CacheDtype = "float16"
    views: Count = 1
    accumulate: bool = True
    feedback_rule: FeedbackRule = "dfa"
    scheme: Scheme | None = None
    importance: ImportanceMetric = "contribution"
    interval: Count = 3
    importance_batch: Count = 4
    lean: bool = True
    lasso: Annotated[float, Range(least=0, below=1)] = 0.2
    side_width: Positive | None = None
    side_lr: Positive | None = None
    prune: Prune = "auto"
    prune_importance: PruneImportance = "reconstruction"
    retrain_epochs: Annotated[int, Range(0, 10**9)] = 8
    retrain_data: str | None = None
    sample_wise: Choice = "auto"
    weight_storage: WeightStorage = "auto"
    tiles: Tiles = "auto"
    forward_groups: Groups = "auto"
    backward_groups: Groups = "auto"
    recompute: Choice = "auto"
    replicas: Workers = 1
    weight_update: WeightUpdate = "all-reduce"
    rest: Rest = "gateway"
    cluster: str | None = None
    tile_sizes: TileSizes = "equal"
    scratch: Choice = "auto"


@dataclass(frozen=True)
class TileOptions(Checked):
    """How maps are cut over a cluster that is planned.

    Attributes:
        tiles: tiles down and across, like 2x3; by default as many as there are processes.
        forward_groups: groups of layers between which tiles exchange halos, like `0-4 | 4-11 | 11-16`, or one, every
            (layer), or auto (what costs least).
        backward_groups: the same of the backward pass.
        replicas: shares of the batch, each of which has tiles of its own.
        recompute: whether the maps that the backward pass reads are computed anew (on) or kept (off).
        weight_update: all-reduce, or through the gateway.
        rest: whether the layers behind the tiled ones are computed by the gateway or by every process (replicated).
        tile_sizes: equal, or by the speed of devices, as --cluster tells it.
    """

    tiles: Tiles = "auto"
    forward_groups: Groups = "auto"
    backward_groups: Groups = "auto"
    replicas: Workers = 1
    recompute: Choice = "off"
    weight_update: WeightUpdate = "all-reduce"
    rest: Rest = "gateway"
    tile_sizes: TileSizes = "equal"


@dataclass(frozen=True)
class MachineOptions(Checked):
    """Where to run.

    Attributes:
        device: cpu or cuda[:N]; cuda where there is one.
        threads: compute threads; all cores by default, or OMP_NUM_THREADS.
        out: run folder; a new one under ``runs/`` by default.
        profile_cache: where what is measured of networks on this machine is kept, so that it is measured once: auto (in
            ``snugfit/profiles`` below ``XDG_CACHE_HOME`` or ``~/.cache``), a folder, renew (measure anew, and keep
            that), or off.
    """

    device: Device | None = None
    threads: Workers | None = None
    out: str | None = None
    profile_cache: str = "auto"


@dataclass(frozen=True)
class Request:
    """All options of one run; JSON-able, and kept in the run folder so that a run can be resumed.

    >>> request = Request(model=ModelOptions("resnet18", image_size=32), budget=BudgetOptions(memory="100MB"))
    >>> Request.from_json(request.to_json()) == request
    True
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    budget: BudgetOptions = field(default_factory=BudgetOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    strategy: StrategyOptions = field(default_factory=StrategyOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return dict(to_data(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        """Inverse of :meth:`to_json`."""
        return from_data(cls, data)
