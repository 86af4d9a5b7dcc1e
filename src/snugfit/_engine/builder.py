"""From a request to data, chain, workload and strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from snugfit import _data as datasets
from snugfit import _models as models
from snugfit._chain import Chain, UnitStore, initialise_by_reset, release, spill_module
from snugfit._chain.propagation import needs_values, run_on_meta
from snugfit._core.amounts import height_and_width
from snugfit._core.known import check_shape, check_strategies
from snugfit._core.option_groups import FROM_PYTHON
from snugfit._core.options import ANY_STRATEGY, data_sets_in
from snugfit._core.registry import config_of, considered, find_config, strategies, strategy_class, why_not
from snugfit._core.request import Request
from snugfit._core.strategy_config import StrategyConfig
from snugfit._core.workload import BATCH_SIZE, FINE_TUNING_BATCH_SIZE, OptimizerSettings, Workload
from snugfit._data import Batches, ImageSet, Splits, Transform
from snugfit._data.decoded import DecodedFile
from snugfit._data.device_transform import Placement
from snugfit._data.prepared import AsIs
from snugfit._data.synthetic import synthetic_splits
from snugfit._data.transform import Mixing
from snugfit._engine.loading import Architecture, ModuleOrFactory, build_on_meta, module_of, on_meta
from snugfit._engine.process import choose_device
from snugfit._engine.tasks import rules_of
from snugfit._planner import StrategySelection
from snugfit._training.initial_weights import load_initial_weights
from snugfit._training.own_optimizer import OwnOptimizer
from snugfit._training.own_parts import FUNCTIONS, OwnParts
from snugfit._training.seeding import derive_seed
from snugfit._training.strategy import Strategy, TrainingData
from snugfit.errors import DataError, ModelError, UsageError, is_out_of_memory
from snugfit.memory.process import library_import

_DEFAULTS = {
    "sgd": OptimizerSettings("sgd", lr=0.01),
    "adamw": OptimizerSettings("adamw", lr=0.001),
    "schedulefree": OptimizerSettings("schedulefree", lr=0.005, weight_decay=0.0, schedule="constant"),
    "python": OptimizerSettings("python", lr=1.0, momentum=0.0, weight_decay=0.0),
}

PRETRAINED = 0.1
"""Learning rate for pre-trained weights, as a share of that for random ones. After 4 epochs of flowers at 96 pixels
MobileNetV2 classifies 80 % of the test images correctly with 0.001, and 45 % with 0.01 (one run each)."""


@dataclass(frozen=True)
class Assembly:
    """Everything that a plan needs except hardware and budget.

    Attributes:
        chain: the network, on the meta device.
        module: the caller's own module, if one was passed.
        others: training images of other data sets that options name, by option; prepared like those of the splits.
        own: functions that the caller passed.
    """

    request: Request
    splits: Splits
    chain: Chain
    workload: Workload
    module: nn.Module | None = None
    others: Mapping[str, ImageSet] = field(default_factory=dict)
    own: OwnParts = field(default_factory=OwnParts)

    @property
    def architecture(self) -> Architecture:
        """The data from which the model is rebuilt later."""
        splits, workload = self.splits, self.workload
        return Architecture(
            model=self.request.model.model,
            class_names=splits.class_names,
            input_shape=splits.image_shape,
            mean=splits.mean,
            std=splits.std,
            data=splits.name,
            border=splits.border,
            as_is=splits.as_is,
            inputs=splits.inputs,
            task=workload.task,
            anchors=workload.anchors,
        )

    def training_data(self, placement: Placement | None = None, decoded: DecodedFile | None = None) -> TrainingData:
        """The splits as batches.

        Args:
            placement: where images are transformed; on the host by default.
            decoded: where pixels of photos are kept that are read in every epoch.
        """
        splits, seed, batches = self.splits, self.workload.seed, rules_of(self.workload.task).batches
        training = self.request.training
        kind = AsIs if splits.as_is else Transform
        transform = kind(splits.mean, splits.std, splits.flip, training.erase, training.crop)
        train = batches(splits.train, transform, seed=seed, augment=self.workload.augment)
        if self.workload.mixed:
            train.mixing = Mixing(self.workload.classes, training.mixup, training.cutmix)
        val = batches(splits.val, transform, seed=seed)
        test = None if splits.test is None else batches(splits.test, transform, seed=seed)
        for each in filter(None, (train, val, test)):
            each.placement = placement
        if decoded is not None and self.workload.epochs > 1:
            splits.train.keep_decoded(decoded)
            splits.val.keep_decoded(decoded)
        return TrainingData(
            train=train,
            val=val,
            test=test,
            class_names=splits.class_names,
            others={name: Batches(images, transform, seed=seed) for name, images in self.others.items()},
        )

    def store_initial_weights(self, store: UnitStore) -> None:
        """Write the initial weights, a unit at a time.

        They come from the caller's module, from the weights file, or are random. snugfit's own models are initialised
        unit by unit; any other is built once, since its constructor may initialise it differently.
        """
        name, path = self.request.model.model, self.request.model.weights
        shape, inputs = self.splits.image_shape, self.splits.inputs
        if self.module is not None:
            if any(parameter.is_meta for parameter in self.module.parameters()):
                raise UsageError("an earlier run emptied this module; pass a new one, or a function that makes it.")
            spill_module(Chain.from_any_module(self.module, shape, name, inputs).all_units, store)
        elif name in models.names():
            for index, unit in enumerate(self.chain.all_units):
                initialise_by_reset(unit, derive_seed(self.workload.seed, "weights", index), models.resets(name))
                store.save(index, unit)
                release(unit)
        else:
            torch.manual_seed(derive_seed(self.workload.seed, "weights"))
            module = models.build(name, self.workload.classes, min(shape[1:]), shape[0])
            spill_module(Chain.from_any_module(module, shape, name, inputs).all_units, store)
        if path is not None:
            load_initial_weights(Path(path), self.chain, store)


def load_splits(request: Request) -> Splits:
    """The data set that a request names, or synthetic images of the shape that it gives."""
    options = request.data
    if options.input_shape is not None:
        return synthetic_splits(options)
    load = rules_of(options.task).load
    return load(options.name, data_dir=options.data_dir, workers=options.workers, **_division(request))


def _division(request: Request) -> dict[str, Any]:
    """How the data set is read and divided."""
    options = request.data
    return {
        "image_size": request.model.sides,
        "classes": options.classes,
        "max_train": options.max_train,
        "max_val": options.max_val,
        "seed": request.training.seed,
    }


def own_splits(data: Any, request: Request) -> Splits | None:
    """Splits of data passed from Python: Splits, a Dataset, or a tuple of them; None for a name, or without data."""
    if data is None or isinstance(data, (str, Path)):
        return None
    if isinstance(data, Splits):
        _require_as_divided(data, request)
        return data
    if request.data.task == "detect":
        raise UsageError("boxes are read from files: give the name of a folder, or snugfit.load_boxed(...).")
    parts = data if isinstance(data, tuple) else (data,)
    if not 1 <= len(parts) <= 3:
        raise UsageError("data must be a name, a Dataset, or a tuple of two or three: training, validation, test.")
    with library_import():  # PIL
        from snugfit._data.user import from_dataset
    return from_dataset(*parts, **_division(request))


def _require_as_divided(splits: Splits, request: Request) -> None:
    """Refuse options of how data is read and divided that differ from how it has been.

    Raises:
        UsageError: there is such an option.
    """
    options, sides = request.data, request.model.sides
    others = [part for part in (splits.val, splits.test) if part is not None]
    unlike = {
        "image_size": sides is not None and height_and_width(sides) != tuple(splits.image_shape[1:]),
        "max_train": options.max_train is not None and options.max_train < len(splits.train),
        "max_val": options.max_val is not None and any(options.max_val < len(part) for part in others),
        "classes": options.classes not in (None, len(splits.class_names)),
    }
    ignored = [name for name, differs in unlike.items() if differs]
    if ignored:
        raise UsageError(
            f"the data was read and divided before, with other values of {', '.join(ignored)}: give them to "
            "snugfit.from_dataset, or pass the data sets themselves."
        )


def for_data(request: Request, splits: Splits | None) -> Request:
    """The request with the task of data that was passed from Python; several labels need not be named."""
    if splits is None or request.data.task != "classify" or not splits.train.has_several_labels:
        return request
    return replace(request, data=replace(request.data, task="multi-label"))


def assemble(
    request: Request,
    splits: Splits | None = None,
    module: ModuleOrFactory | None = None,
    own: OwnParts | None = None,
) -> Assembly:
    """Load the data, trace the model, and describe the work; weights do not exist yet.

    Data, module and functions are those that the request names, unless the caller passed them from Python.
    """
    own = own or OwnParts()
    for name, what in FUNCTIONS.items():
        named = getattr(request.training, name)
        if (named == FROM_PYTHON) != (getattr(own, name) is not None):
            raise UsageError(f"{name}={named!r} is {what} from Python: pass the function itself as {name}=.")
    splits = splits or load_splits(request)
    name, shape = request.model.model, splits.image_shape
    if module is None:
        made = build_on_meta(name, len(splits.class_names), shape)
        chain = Chain.from_any_module(made, shape, name, splits.inputs)
    else:
        module = module_of(module, derive_seed(request.training.seed, "weights"))
        name = type(module).__name__
        if not splits.inputs:
            _require_float32(module, name, shape)
        chain = on_meta(Chain.from_any_module(module, shape, name, splits.inputs))
    chain.loss = own.loss
    facts = rules_of(request.data.task).facts(request, chain, splits)
    workload = replace(_workload(request, splits, facts), model=name, metrics=tuple(sorted(own.metrics)))
    if own.optimizer is not None:
        device = choose_device(request.machine.device)
        chain.optimizer = rules = OwnOptimizer(own.optimizer, chain.to_module().named_parameters(), device)
        workload = replace(workload, optimizer=replace(workload.optimizer, own_state=rules.share))
    named = data_sets_in(request.strategy)
    others = {option: _images_like(request, other, option, shape) for option, other in named.items()}
    return Assembly(request, splits, chain, workload, module, others, own)


def _images_like(request: Request, name: str, option: str, shape: tuple[int, int, int]) -> ImageSet:
    """Training images of the data set that an option names; raises DataError for another shape than (C, H, W)."""
    options = request.data
    found = datasets.load(name, data_dir=options.data_dir, image_size=shape[1:], workers=options.workers)
    if found.image_shape != shape:
        flag = "--" + option.replace("_", "-")
        raise DataError(f"{flag} {name} has images of {found.image_shape}, the network takes {shape}.")
    return found.train


def _workload(request: Request, splits: Splits, facts: dict[str, Any]) -> Workload:
    training = request.training
    if splits.as_is and training.erase:
        raise UsageError(f"--erase {training.erase:g} augments, and as_is=True uses images as they are; leave one out.")
    if splits.inputs and training.mixes is not None:
        raise UsageError(
            f"{training.mixes} mixes images, and the items of {splits.name} have several inputs; leave it out."
        )
    if training.patience is not None and not len(splits.val):
        raise UsageError(
            f"--patience {training.patience} needs validation images, and {splits.name} has none; leave it out, or add "
            "some."
        )
    workload = Workload(
        model=request.model.model,
        data=splits.name,
        input_shape=splits.image_shape,
        classes=len(splits.class_names),
        train_count=len(splits.train),
        val_count=len(splits.val),
        test_count=0 if splits.test is None else len(splits.test),
        epochs=training.epochs,
        optimizer=optimizer_of(request),
        keep=training.keep,
        precision=training.precision,
        activations=training.activations,
        weight_dtype=training.weight_dtype or "float32",
        augment=training.augment and not splits.as_is,
        seed=training.seed,
        label_smoothing=training.label_smoothing,
        clip_norm=training.clip_norm,
        mixed=training.mixes is not None,
        inputs=splits.inputs,
        patience=training.patience,
        pretrained=request.model.weights is not None,
        **facts,
    )
    size = training.batch_size or (FINE_TUNING_BATCH_SIZE if workload.fine_tunes_few else BATCH_SIZE)
    return replace(workload, batch_size=size, batch_limit=training.batch_limit or size)


def require_optimizer_name(given: object, names: str, otherwise: str) -> None:
    """Check that an optimizer from Python is a name, one of ``names``, or None; ``otherwise`` says what to do.

    Raises:
        UsageError: it is an object.
    """
    if not isinstance(given, str | None):
        kind = type(given).__name__
        raise UsageError(f"optimizer= takes {names}, not {kind}: gradients are applied one by one. {otherwise}")


def _require_float32(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a module with weights of another type that does not convert images (B, *shape), by a ModelError."""
    types = {each.dtype for each in module.parameters() if each.is_floating_point()} - {torch.float32}
    if not types:
        return
    try:
        run_on_meta(module, shape, False, lambda images: module(images.float()))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if not needs_values(error):
            raise ModelError(
                f"{name} has weights in {str(types.pop()).removeprefix('torch.')}, and does not run on images in "
                "float32; pass it in float32, as model.float(). precision= and weight_dtype= choose what training "
                "computes in and stores."
            ) from error


def optimizer_of(request: Request) -> OptimizerSettings:
    """The optimizer: what the request says, else the task's learning rate, the strategy's and the common defaults."""
    training, config = request.training, find_config(request.strategy.strategy)
    name = training.optimizer or config.default_optimizer or "sgd"
    default = config.optimizers.get(name, _DEFAULTS[name])
    own_rates = name == FROM_PYTHON
    if request.model.weights is not None and name not in config.optimizers and not own_rates:
        default = replace(default, lr=PRETRAINED * default.lr)
    given = {name: getattr(training, name) for name in ("lr", "weight_decay", "schedule", "warmup_epochs", "ema")}
    if given["lr"] is None and not own_rates:
        given["lr"] = rules_of(request.data.task).lr
    given["state"] = training.optimizer_state
    return replace(default, **{name: value for name, value in given.items() if value is not None})


def check_options(request: Request) -> None:
    """Check the shape of images, options of considered strategies, and names in those of others; raises UsageError."""
    check_shape(request)
    for config in set(strategies().values()).difference(considered(request)):
        config.check_names(request)
    for config in considered(request):
        check = getattr(strategy_class(config.name), "check_options", None)
        if check is not None:
            check(request.strategy)


def make_strategies(request: Request) -> StrategySelection:
    """The strategies to consider, with the request's settings: those that serve it if it names none."""
    check_strategies(request)
    name = request.strategy.strategy
    if name not in ANY_STRATEGY:
        return StrategySelection([_configured(config_of(name), request)])
    chosen: list[Strategy] = []
    standby: list[Strategy] = []
    left_out: dict[str, str] = {}
    for config in strategies().values():
        reason = why_not(config, request)
        if reason:
            left_out[config.name] = reason
        else:
            (standby if config.is_last_resort(request) else chosen).append(_configured(config, request))
    return StrategySelection(chosen, standby, left_out)


def _configured(config: StrategyConfig, request: Request) -> Strategy:
    """A strategy with the options of the request that it has; an option without a value leaves it its default."""
    kind: Any = resolve_name(config.implementation)
    known = {item.name for item in fields(kind)}
    options = {item.name: getattr(request.strategy, item.name) for item in fields(config.options)}
    given = {key: value for key, value in options.items() if key in known and value is not None}
    made: Strategy = kind(**given, **config.settings(request))
    return made
