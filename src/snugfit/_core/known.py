"""Names of models, data sets and local losses, checked before torch is imported, which takes seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from snugfit._core.amounts import Sides, height_and_width
from snugfit._core.functions import is_function
from snugfit._core.inputs import shape_of
from snugfit._core.option_groups import FROM_PYTHON, BaseRequest, DataOptions
from snugfit._core.options import ANY_STRATEGY, AUTO, EXACT, data_sets_in
from snugfit._core.registry import LOCAL_LOSSES, MODELS, config_of, strategies
from snugfit.errors import UnknownNameError, UsageError

MODEL_FORMS = ("torchvision:NAME", "timm:NAME", "package.module:function")
DATA_SETS = (
    *("digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "imagenette", "vww", "cub200"),
    *("pets", "dogs", "flowers102"),
)
"""A test compares these names with ``_data/catalog.py``, which imports torch."""
FOLDER = "folder:PATH"
FUNCTION = "package.module:function"
IMAGENET = "imagenet"
"""What ``--weights`` takes in place of a file: the weights that torchvision or timm offers for the model."""
_TORCHVISION_NAMES = {
    "resnet50": "resnet50",
    "vgg16_imagenet": "vgg16",
    "mobilenet_v2": "mobilenet_v2",
    "vit_b_16": "vit_b_16",
}
"""Own models that have torchvision's names and shapes of weights."""
MOST_SYNTHETIC = 10**7
"""Most images without data; each has a label in memory."""


def check_names(request: BaseRequest) -> None:
    """Check the names in a request, and its strategy, as far as possible without torch; raises UsageError."""
    for config in strategies().values():
        config.check_names(request)
    check_foreign_options(request)
    check_strategies(request)
    check_model(request.model.model)
    if request.model.weights == IMAGENET:
        weights_source(request.model.model)
    for name in ("loss", "schedule", "optimizer"):
        if getattr(request.training, name) == FROM_PYTHON:
            raise UsageError(
                f"--{name} python is a function of your own; pass it from Python: snugfit.plan(..., {name}=...)."
            )
    check_shape(request)
    sides = request.model.sides
    if request.data.input_shape is not None:
        sides = shape_of(request.data.input_shape)[1:]
    if sides is not None:
        check_square(request.model.model, sides)
    if request.data.task == "classify" and request.data.data not in (None, FROM_PYTHON):
        check_data_set(request.data.name)
    for name in data_sets_in(request.strategy).values():
        check_data_set(name)


def check_shape(request: BaseRequest) -> None:
    """Check that images of ``--input-shape``, if it is given, are described by it alone; raises UsageError."""
    data, flag = request.data, f"--input-shape {request.data.input_shape}"
    if data.input_shape is None:
        return
    if data.data is not None:
        raise UsageError(f"{flag} is for plans without data; leave it out, or --data {data.data}.")
    if data.task == "detect":
        raise UsageError(f"--task detect reads the boxes of its data; give --data instead of {flag}.")
    if request.model.image_size is not None:
        raise UsageError(f"{flag} is the size of images too; leave out --image-size {request.model.image_size}.")
    if data.classes is None:
        raise UsageError(f"{flag} does not say how many classes there are; add --classes.")
    for limit, count in {"--max-train": data.max_train, "--max-val": data.max_val}.items():
        if count is not None and count > MOST_SYNTHETIC:
            raise UsageError(f"{limit} {count} is above {MOST_SYNTHETIC:,}, the most images with {flag}; lower it.")


def check_square(model: str, sides: Sides) -> None:
    """Refuse rectangles for a model that has a position for each patch of a square; raises UsageError."""
    height, width = height_and_width(sides)
    if height != width and (model == "vit_b_16" or model.startswith("torchvision:vit_")):
        raise UsageError(
            f"{model} takes square images, because each patch has a position, not {height}x{width}; give --image-size "
            "one side, like 224, or take another model."
        )


def require_data(data: DataOptions) -> None:
    """Refuse to train without data; raises UsageError."""
    if data.input_shape is not None:
        raise UsageError(f"training needs data: --data, instead of --input-shape {data.input_shape}.")


def check_strategies(request: BaseRequest) -> None:
    """Check a request against the strategy that it names, or against all that keep its time ratio.

    Raises:
        UsageError: the strategy does not support an option.
    """
    name = request.strategy.strategy
    if name not in ANY_STRATEGY:
        config_of(name).check(request)
    elif request.budget.time_ratio is not None:
        keeping = [each for each in strategies().values() if each.keeps_time_ratio]
        if name == EXACT and not any(each.exact for each in keeping):
            names = " and ".join(each.name for each in keeping)
            raise UsageError(
                f"--time-ratio is for {names}, whose gradients are not exact; leave it out, or use --strategy {AUTO}."
            )
        for config in keeping:
            config.check(request)


def foreign_options(request: BaseRequest) -> dict[str, list[str]]:
    """Options that a request sets and that the strategy it names lacks, with the strategies that have them.

    Values that equal the defaults cannot be told from options that were left out. ``auto`` has all options, and
    ``exact`` those of strategies whose gradients are exact.
    """
    options, name = request.strategy, request.strategy.strategy
    owners = {each.name: [field.name for field in fields(each.options)] for each in strategies().values()}
    named = {each.name for each in strategies().values() if each.name == name or (name == EXACT and each.exact)}
    found = {}
    for option in fields(options) if name != AUTO else ():
        having = [owner for owner, names in owners.items() if option.name in names]
        if having and named.isdisjoint(having) and getattr(options, option.name) != option.default:
            found[option.name] = having
    return found


def check_foreign_options(request: BaseRequest) -> None:
    """Check that a request that names a strategy sets no option of others alone; raises UsageError."""
    for option, having in foreign_options(request).items():
        for owner in having:
            config_of(owner).check_names(request)
        value, flag = getattr(request.strategy, option), option.replace("_", "-")
        shown = f"--no-{flag}" if value is False else f"--{flag}" if value is True else f"--{flag} {value}"
        raise UsageError(
            f"{shown} is an option of {' and '.join(having)}, not of {request.strategy.strategy}; leave it out, or use "
            f"--strategy {' or '.join(having)}."
        )


def check_model(name: str) -> None:
    """Check a model's name; names with a colon, or possibly of torchvision, are checked on import."""
    if name not in (*MODELS.names(), FROM_PYTHON) and ":" not in name and not _torchvision_defines(name):
        raise unknown_model(name, MODELS.names())


def weights_source(model: str) -> tuple[str, str]:
    """The installed package that offers ImageNet weights of a model, and the model's name there.

    Raises:
        UsageError: there is none for this model, or it is not installed.
    """
    kind, _, name = model.partition(":")
    own = _TORCHVISION_NAMES.get(model)
    if kind in ("timm", "torchvision") and name:
        package = kind
    elif own or (model not in MODELS.names() and ":" not in model and _torchvision_defines(model)):
        package, name = "torchvision", own or model
    else:
        raise UsageError(
            f"--weights {IMAGENET} is for {', '.join(_TORCHVISION_NAMES)}, torchvision:NAME and timm:NAME, not for "
            f"{model}; give a file of weights (.safetensors or .pth)."
        )
    if find_spec(package) is None:
        install = keeping_torch('pip install "snugfit[vision]"')
        raise UsageError(
            f"--weights {IMAGENET} of {model} are downloaded by {package}, which is not installed: {install}, or give "
            "a file of weights (.safetensors or .pth)."
        )
    return package, name


def keeping_torch(install: str) -> str:
    """An installation that leaves the torch that is there: torchvision is built for one, and would bring its own.

    >>> keeping_torch('pip install "snugfit[vision]"').partition("==")[0]
    'pip install "snugfit[vision]" torch'
    """
    try:
        return f"{install} torch=={metadata.version('torch').partition('+')[0]}"
    except metadata.PackageNotFoundError:  # a build without metadata
        return install


def unknown_model(name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for an unknown model."""
    return UnknownNameError("model", name, [*known, *MODEL_FORMS])


def check_data_set(name: str, known: Iterable[str] = DATA_SETS) -> None:
    """Check the name of a data set to classify; raises UsageError, also for a path without ``folder:``.

    A function of the user's own is checked on import.
    """
    kind, _, path = name.partition(":")
    if kind == "folder":
        if not path:
            raise UsageError("'folder' needs a path: folder:PATH, with one sub-folder of images per class.")
    elif name.lower() not in known and not is_function(name):
        if Path(name).is_dir():
            raise UsageError(f"'{name}' is a folder; to train on its images write folder:{name}.")
        raise UnknownNameError("data set", name, [*known, FOLDER, FUNCTION])


def check_local_loss(text: str, known: Iterable[str] | None = None) -> None:
    """Check the name of a local loss, which options may follow; raises UnknownNameError."""
    name, known = text.partition(":")[0], LOCAL_LOSSES.names() if known is None else known
    if name not in known:
        raise UnknownNameError("local loss", name, known)


def _torchvision_defines(name: str) -> bool:
    """Whether torchvision is installed and its models define a function of this name; it is not imported."""
    found = find_spec("torchvision")
    folders = (found and found.submodule_search_locations) or ()
    definition = re.compile(rf"^def {re.escape(name)}\(", re.MULTILINE)
    sources = (path for folder in folders for path in Path(folder, "models").rglob("*.py"))
    return any(definition.search(path.read_text(encoding="utf-8")) for path in sources)
