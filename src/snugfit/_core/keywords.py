"""Options as typed keywords, for editors and type checkers, and as signatures where code runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class PlanKeywords(TypedDict, total=False):
    """Keywords of :func:`snugfit.plan`: the flags of the command line, with underscores.

    A value may be what the flag's text means: 100_000_000 for ``100MB``, ``(3, 32, 32)`` for ``3x32x32``. Options of
    strategies from other packages are not among them, and are accepted.
    """

    weights: str | Path | None
    image_size: int | str | tuple[int, int] | None
    input_shape: str | Sequence[Any] | Mapping[str, Any] | None
    task: Literal["classify", "multi-label", "detect"]
    data_dir: str | Path | None
    classes: int | None
    max_train: int | None
    max_val: int | None
    workers: int | str
    memory: str | int | None
    total_memory: str | int | None
    storage: str | int | None
    time_ratio: float | None
    devices: int
    host_memory: str | int | None
    epochs: int
    batch_size: int | None
    batch_limit: int | None
    optimizer: Literal["sgd", "adamw", "schedulefree"] | Callable[[list[tuple[str, Any]]], Any] | None
    optimizer_state: Literal["float32", "bfloat16", "int8"] | None
    lr: float | None
    weight_decay: float | None
    schedule: Literal["cosine", "constant", "step", "one-cycle"] | Callable[[int, int], float] | None
    warmup_epochs: float
    clip_norm: float | None
    ema: float | None
    keep: Literal["best", "last"]
    patience: int | None
    precision: Literal["float32", "bfloat16", "float16"]
    activations: Literal["exact", "paged", "int8", "int4"]
    weight_dtype: Literal["float32", "bfloat16"] | None
    augment: bool
    crop: bool
    erase: float
    mixup: float | None
    cutmix: float | None
    label_smoothing: float
    class_weights: str | Sequence[float] | None
    loss: Literal["cross-entropy", "focal"] | Callable[[Any, Any], Any]
    focal_gamma: float | None
    metrics: Mapping[str, Any]
    seed: int
    strategy: str
    aim: Literal["time", "memory", "accuracy"] | None
    accumulate: bool
    batch_norm: Literal["exact", "micro"] | None
    local_loss: str
    module_units: str | int
    rho: float
    block_units: int | None
    adaptive_batch: bool
    residency: Literal["block", "all"]
    saturation_stop: bool
    exit_tolerance: float | None
    cache: Literal["auto", "always", "never"]
    cache_dtype: Literal["float32", "float16", "bfloat16", "uint8"]
    views: int
    scheme: Literal["elastic", "full", "head", "bn+bias", "prunetrain", "rep-net", "bias+head"] | None
    importance: Literal["contribution", "weight", "gradient"]
    interval: int
    importance_batch: int
    lean: bool
    lasso: float
    side_width: float | None
    side_lr: float | None
    prune: str | float
    prune_importance: Literal["reconstruction", "activation", "filter"]
    retrain_epochs: int
    retrain_data: str | None
    sample_wise: Literal["auto", "on", "off"]
    weight_storage: Literal["auto", "float32", "int8"]
    tiles: str
    forward_groups: str
    backward_groups: str
    replicas: int
    recompute: Literal["auto", "on", "off"]
    weight_update: Literal["all-reduce", "gateway"]
    rest: Literal["gateway", "replicated"]
    tile_sizes: Literal["equal", "speed"]
    cluster: str | Path | None
    scratch: Literal["auto", "on", "off"]
    feedback_rule: Literal["dfa", "drtp", "pepita"]
    device: str | None
    threads: int | None
    out: str | Path | None
    cache_dir: str | Path | None
    profile_cache: str | Path
    profile_time: str | None


class LoopKeywords(TypedDict, total=False):
    """Keywords of :func:`snugfit.fit`, beside its example and memory: those of ``_api.loop.LoopOptions``."""

    batch_size: int
    optimizer: Literal["sgd", "adamw"]
    optimizer_state: Literal["float32", "bfloat16", "int8"] | None
    lr: float | None
    weight_decay: float | None
    keep_freed: bool | None


class EstimateKeywords(TypedDict, total=False):
    """Keywords of :func:`snugfit.estimate`, beside its input: those of ``_core.estimate.EstimateOptions``."""

    classes: int | None
    batch_size: int | str | Sequence[int]
    memory: str | int | None
    optimizer: Literal["sgd", "adamw", "schedulefree"]
    optimizer_state: Literal["float32", "bfloat16", "int8"]
    precision: Literal["float32", "bfloat16"]
    weight_dtype: Literal["float32", "bfloat16"]
    measure: bool
    threads: int | None


class ResumeKeywords(TypedDict, total=False):
    """Keywords of :func:`snugfit.resume`, beside model and data: those of ``_training.own_parts.OwnParts``."""

    loss: Callable[[Any, Any], Any] | None
    schedule: Callable[[int, int], float] | None
    optimizer: Callable[[list[tuple[str, Any]]], Any] | None
    metrics: Mapping[str, Any]


class ExportKeywords(TypedDict, total=False):
    """Keywords of :func:`snugfit.export` for ONNX files: those of ``_core.option_groups.OnnxOptions``."""

    free_size: bool
    int8: bool
    data: str | None
    data_dir: str | None


class PictureKeywords(TypedDict, total=False):
    """Keywords of :func:`snugfit.draw_report` for pictures: those of ``_core.option_groups.PictureOptions``."""

    data: str | None
    data_dir: str | None
    unit: str | None
    classes: Sequence[int]
    images: int


class SplitKeywords(TypedDict, total=False):
    """Keywords of :func:`snugfit.load_boxed`: those of ``_data.split.SplitOptions``."""

    image_size: int | str | tuple[int, int] | None
    classes: int | None
    max_train: int | None
    max_val: int | None
    val_fraction: float
    seed: int


class DatasetKeywords(SplitKeywords, total=False):
    """Keywords of :func:`snugfit.from_dataset`: those of ``_data.user.DatasetOptions``."""

    class_names: Sequence[str] | None
    name: str
    mean: Sequence[float] | None
    std: Sequence[float] | None
    flip: bool
    as_is: bool
    inputs: Sequence[str]


def with_keywords(function: Callable[..., Any], defaults: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a function with options and their defaults, for completion and help where code runs."""
    own = inspect.signature(function)
    named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in sorted(defaults.items())
        if name not in own.parameters
    ]
    return own.replace(parameters=[*named, *options])
