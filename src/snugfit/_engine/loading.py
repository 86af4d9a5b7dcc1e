"""The model of a run folder, and its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from snugfit import _models as models
from snugfit._chain import Chain, load_state, take_inputs
from snugfit._chain.store import copy_empty
from snugfit._core.amounts import MOST_CHANNELS, MOST_PIXELS
from snugfit._core.inputs import Input, packed_shape
from snugfit._core.known import check_square
from snugfit._core.option_groups import FROM_PYTHON
from snugfit._core.registry import config_of
from snugfit._core.serial import to_data
from snugfit._core.workload import TaskName
from snugfit._storage.files import write_json_atomic
from snugfit._storage.manifest import Manifest, check_files
from snugfit._storage.run_folder import read_data, read_record
from snugfit._storage.tensor_file import MODEL_FILE, map_tensors, read_tensors
from snugfit._training.network import mismatch_errors
from snugfit._upstream import set_tensor
from snugfit.errors import CheckpointError, ModelError, UsageError
from snugfit.memory import is_out_of_memory

ModuleOrFactory = nn.Module | Callable[[], nn.Module]
"""A module that was passed from Python, or a function that makes it."""
_FILE = "architecture.json"


@dataclass(frozen=True)
class Architecture:
    """What is needed to rebuild a trained model and to feed it.

    >>> from pathlib import Path
    >>> architecture = Architecture.read(Path("runs/first"))
    >>> architecture.model, architecture.input_shape, len(architecture.class_names)
    ('smallconv', (1, 8, 8), 10)

    Attributes:
        model: its name; ``python`` for a module that was passed from Python.
        input_shape: channels, height, width.
        mean, std: normalisation of images in [0, 1], per channel.
        border: black pixels on every side that images get, inside ``input_shape``; an image is resized (short side) and
            centre-cropped to what they leave.
        as_is: whether it was trained on tensors that a data set prepared, so that images of files cannot be.
        inputs: what it takes, if it is several inputs.
        task: what it has learned: to ``classify`` images, to give them several labels (``multi-label``), or to
            ``detect`` objects; for that images are resized to the square without cropping.
        anchors: widths and heights that boxes are predicted from, as fractions of the image's sides.
        strategy: the strategy that trained it; empty until training is finished.
        structure: what the strategy changed in the network, such as the exit that it was cut at.
    """

    model: str
    class_names: tuple[str, ...]
    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    data: str
    border: int = 0
    task: TaskName = "classify"
    anchors: tuple[tuple[float, float], ...] = ()
    strategy: str = ""
    structure: dict[str, Any] = field(default_factory=dict)
    as_is: bool = False
    inputs: tuple[Input, ...] = ()

    def require_files(self) -> None:
        """Refuse to read images for the model; raises UsageError."""
        if self.as_is:
            raise UsageError(
                "this run trained on tensors that a data set of yours prepared (as_is=True), and images are prepared "
                "differently here; take the model by snugfit.load, and give it tensors like those."
            )

    def __post_init__(self) -> None:
        channels, height, width = self.input_shape
        one_image = 1 <= channels <= MOST_CHANNELS and 1 <= height <= MOST_PIXELS and 1 <= width <= MOST_PIXELS
        if self.input_shape != packed_shape(self.inputs) if self.inputs else not one_image:
            raise ValueError(f"'input_shape' must be channels, height and width, not {self.input_shape}")
        if not 0 <= 2 * self.border < min(height, width):
            raise ValueError(f"'border' must leave some of {height}x{width} pixels, and is {self.border}")
        if not self.class_names or len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise ValueError("it needs class names, and a mean and a positive deviation of each channel")

    def write(self, folder: Path, manifest: Manifest | None = None) -> None:
        """Store it in a folder; a run's manifest lists it."""
        write_json_atomic(folder / _FILE, to_data(self), manifest)

    @classmethod
    def read(cls, folder: Path) -> Architecture:
        """Read it from a run folder.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return read_data(cls, Path(folder) / _FILE)

    def build(self) -> nn.Module:
        """The full network on the meta device.

        Raises:
            ModelError: the model was passed from Python and has no name to build it by.
        """
        if self.model == FROM_PYTHON:
            raise ModelError(
                "this run trained a module of your own; pass it again, in Python, as model= of snugfit.load, evaluate, "
                "predict or export."
            )
        return build_on_meta(self.model, len(self.class_names), self.input_shape)

    def chain(self, model: ModuleOrFactory | None = None) -> Chain:
        """The full network as a chain on the meta device, which shares nothing with ``model``.

        Raises:
            ModelError: the module was passed from Python and is not given here, or does not run.
        """
        made = self.build() if model is None else module_of(model)
        return on_meta(Chain.from_any_module(made, self.input_shape, self.model, self.inputs))

    def trained(self, chain: Chain, state: Mapping[str, torch.Tensor]) -> nn.Module:
        """The network as its strategy left it, without weights.

        ``chain`` is the full network. Layers from which channels were removed take the shapes of ``state``.

        Raises:
            UnknownNameError: the strategy is not installed.
            LookupError, TypeError, ValueError, RuntimeError: it does not describe a network of these tensors.
        """
        rebuild = config_of(self.strategy).rebuild
        if rebuild is None:
            return chain.to_module()
        module: nn.Module = resolve_name(rebuild)(chain, self.structure, len(self.class_names), state)
        return module


def build_on_meta(name: str, classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """A network by name for images of shape (C, H, W), on the meta device.

    Raises:
        UnknownNameError: no such model.
        UsageError: it takes square images alone.
        ModelError: a package is missing, or the user's function fails or returns no module.
    """
    check_square(name, shape[1:])
    with torch.device("meta"):
        return models.build(name, classes, min(shape[1:]), shape[0])


def module_of(model: ModuleOrFactory, seed: int | None = None) -> nn.Module:
    """The module itself, or what the function makes, with random weights of a seed.

    Raises:
        ModelError: it is neither, or the function makes no module.
    """
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise ModelError(f"model= is {model!r}; pass a module, a function that makes one, or the name of a model.")
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        made = model()
    if not isinstance(made, nn.Module):
        raise ModelError(f"the function that makes the model returned {type(made).__name__}; return the module.")
    return made


def load(folder: Path, model: ModuleOrFactory | None = None) -> nn.Module:
    """The trained model of a run; see :func:`snugfit.load`."""
    read_record(folder)  # an unfinished run, or a damaged record, is an error
    architecture = Architecture.read(folder)
    check_files(folder, MODEL_FILE)
    state = read_tensors(folder / MODEL_FILE)
    chain = architecture.chain(model)
    try:
        module = architecture.trained(chain, state)
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{folder / _FILE} does not describe the model that is saved ({error}). Restore it."
        ) from error
    with mismatch_errors(str(folder / MODEL_FILE), "Restore it from a copy, or train again."):
        load_state(module, state, assign=True)
    _fill_buffers(folder, module)
    take_inputs(module)
    return module.eval()


def _fill_buffers(folder: Path, module: nn.Module) -> None:
    """Give buffers and constants that no state dict holds the values that the run's folder of weights has."""
    empty = {name for name, buffer in module.named_buffers() if buffer.is_meta}
    for path in sorted((folder / "weights").glob("*.safetensors")) if empty else ():
        check_files(folder, f"weights/{path.name}")
        stored = map_tensors(path)
        for name in empty & stored.keys():
            set_tensor(module, name, stored[name].clone())


def on_meta(chain: Chain) -> Chain:
    """A copy of a chain without weights, which shares nothing with the module it was made from."""
    return copy_empty(chain, chain.to_module(), "meta")
