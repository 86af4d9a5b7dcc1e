"""Write a trained model for other runtimes, and check that ONNX Runtime agrees with PyTorch."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snugfit._core.option_groups import PLAIN_ONNX, OnnxOptions
from snugfit._core.serial import to_data
from snugfit._engine.inference import RunImages, run_images, task_of_run
from snugfit._engine.loading import Architecture, ModuleOrFactory, load
from snugfit._storage.digests import FileDigest, sync_file
from snugfit._storage.manifest import MANIFEST_FILE, listing
from snugfit._storage.outputs import require_file, require_folder
from snugfit._storage.tensor_file import MODEL_FILE
from snugfit._storage.write_errors import storage_errors
from snugfit._training.task import measure
from snugfit.errors import DataError, ModelError, UnusableInputError, UsageError, first_line

ONNX_FILE = "model.onnx"
TOLERANCE = 1e-3
"""Largest difference of logits between PyTorch and ONNX Runtime, relative to the largest logit."""

_METADATA = ("class_names", "mean", "std", "border", "model", "data", "task", "anchors")
INT8_FILE = "model.int8.onnx"
CALIBRATION_IMAGES = 256
"""Training images, evenly spaced, whose feature maps set the ranges of the 8 bits."""
_FATAL = 4


def export(
    folder: Path,
    out: Path | None,
    format: str,
    check: bool,
    model: ModuleOrFactory | None = None,
    options: OnnxOptions = PLAIN_ONNX,
) -> dict[str, Any]:
    """Export the trained model of a run; see :func:`snugfit.export`."""
    options.check(format)
    target = folder if out is None else out
    if out is not None or folder.is_dir():
        _require_target(folder, target)
    module, architecture = load(folder, model), Architecture.read(folder)
    if architecture.inputs and format != "safetensors":
        raise ModelError("the network takes several inputs, and ONNX export takes one image; use --format safetensors.")
    target.mkdir(parents=True, exist_ok=True)
    files, difference, found = list[str](), None, {}
    with TemporaryDirectory(dir=target, prefix=".export-") as scratch:
        draft, path = Path(scratch, ONNX_FILE), target / ONNX_FILE
        if format != "safetensors":
            _write_onnx(module, architecture, draft, options.free_size)
            difference = onnx_difference(module, architecture.input_shape, draft, options.free_size) if check else None
        if target.resolve() != folder.resolve():
            architecture.write(target)
        if format != "onnx":
            destination = target / MODEL_FILE
            if destination.resolve() != (folder / MODEL_FILE).resolve():
                with storage_errors(destination):
                    copied = Path(shutil.copyfile(folder / MODEL_FILE, Path(scratch, MODEL_FILE)))
                _place(copied, destination)
            files.append(str(destination))
        if format != "safetensors":
            _place(draft, path)
            files.append(str(path))
        if options.int8:
            draft, smaller = Path(scratch, INT8_FILE), target / INT8_FILE
            found = {"int8": write_int8(folder, path, draft, options)}
            _place(draft, smaller)
            files.append(str(smaller))
    return {"files": files, "onnx_max_difference": difference, **found}


def _require_target(folder: Path, target: Path) -> None:
    if target.resolve() != folder.resolve() and (target / MANIFEST_FILE).exists():
        raise UsageError(f"{target} is another run, whose model this would replace; choose another --out.")
    require_folder(target)
    for name in (MODEL_FILE, ONNX_FILE, INT8_FILE, "architecture.json") if target.is_dir() else ():
        require_file(target / name)


def _place(draft: Path, path: Path) -> None:
    """Give a complete file its name, which an older one has until then; in a run folder its manifest lists it."""
    with storage_errors(path), draft.open("rb") as file:
        sync_file(file)
    with listing(path.parent) as manifest:
        if manifest is not None:
            manifest.commit(draft, path, FileDigest.of(draft))
        else:
            draft.replace(path)


def _write_onnx(module: nn.Module, architecture: Architecture, path: Path, free_size: bool) -> None:
    """Write the model; its metadata holds normalisation, class names and task, as JSON texts."""
    try:
        import onnx

        import_module("onnxscript")
    except ImportError as error:
        raise ModelError('ONNX export needs more packages: pip install "snugfit[export]".') from error
    example = torch.randn(2, *architecture.input_shape)
    module(example)  # a module that builds parts at its first use must not do so while it is traced
    dynamic: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=65536)}
    if free_size:
        _require_free_size(module, architecture.input_shape)
        dynamic |= {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    try:
        with without_output():
            torch.onnx.export(
                module,
                (example,),
                path,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=(dynamic,),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ModelError(
            f"torch.onnx cannot export {type(module).__name__}, whose forward pass may depend on data; "
            "use --format safetensors."
        ) from error
    written = onnx.load(path)
    known = to_data(architecture)
    onnx.helper.set_model_props(written, {key: json.dumps(known[key]) for key in _METADATA})
    with storage_errors(path):
        onnx.save(written, path)


def _larger(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Another size of images, whose height and width differ."""
    channels, height, width = shape
    return channels, height + 32, width + 64


@torch.no_grad()
def _require_free_size(module: nn.Module, shape: tuple[int, int, int]) -> None:
    """Refuse a network that takes images of one size alone; raises ModelError."""
    larger = _larger(shape)
    try:
        module(torch.zeros(1, *larger))
    except Exception as error:
        sizes = " x ".join(map(str, shape[1:]))
        raise ModelError(
            f"--free-size: the network takes images of {sizes} alone, since it fails on images of "
            f"{larger[1]} x {larger[2]}; leave it out."
        ) from error


@torch.no_grad()
def onnx_difference(module: nn.Module, shape: tuple[int, int, int], path: Path, free_size: bool = False) -> float:
    """Largest absolute difference of logits on random images, in batches of 1 and 3; ModelError if it is too large.

    With ``free_size`` the second batch has larger images.
    """
    try:
        session = quiet_session(path)
    except ImportError as error:
        raise ModelError('checking ONNX needs ONNX Runtime: pip install "snugfit[export]".') from error
    except Exception as error:
        raise UnusableInputError(
            f"ONNX Runtime cannot load the exported network: {first_line(error)}; nothing was written."
        ) from error
    worst = 0.0
    for images in (torch.randn(1, *shape), torch.randn(3, *(_larger(shape) if free_size else shape))):
        expected = module(images)
        try:
            (actual,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        except Exception as error:
            taken, fixed = (" x ".join(map(str, each)) for each in (images.shape[2:], shape[1:]))
            reason = f" torch.onnx has fixed {fixed} in it; leave out --free-size." if free_size else ""
            raise ModelError(
                f"ONNX Runtime fails on images of {taken}: {first_line(error)}; nothing was written.{reason}"
            ) from error
        found = torch.from_numpy(actual)
        differences = torch.where(found == expected, 0.0, (found - expected).abs())  # both may be infinite
        difference, largest = float(differences.max()), float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
        if not difference <= TOLERANCE * max(1.0, largest):  # it may be NaN
            raise ModelError(f"ONNX Runtime's logits differ from PyTorch's by {difference:.2g}; nothing was written.")
        worst = max(worst, difference)
    return worst


def write_int8(folder: Path, model: Path, path: Path, options: OnnxOptions) -> dict[str, Any]:
    """Quantise an ONNX file of a run's model, and compare both on its test split, or on validation without one.

    Returns:
        ``bytes`` of the file, ``calibration_images``, ``split``, ``count``, ``accuracy`` and ``float_accuracy``.

    Raises:
        ModelError: ONNX Runtime or its quantiser is missing, or cannot quantise the model.
        DataError: the data set has no images to measure with.
    """
    try:
        quantization: Any = import_module("onnxruntime.quantization")
    except ImportError as error:
        raise ModelError('--int8 needs ONNX Runtime: pip install "snugfit[export]".') from error
    images = run_images(folder, options.data, options.data_dir, "train")
    reader, split = _reader(quantization, images), _measured_split(folder, options)
    try:
        with without_output(), TemporaryDirectory() as scratch:
            prepared = Path(scratch, "model.onnx")
            quantization.quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
            quantization.quantize_static(str(prepared), str(path), reader, per_channel=True)
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot quantise the model: {first_line(error)}. Leave out --int8.") from error
    exact, rounded = (_accuracy(folder, each, split) for each in (model, path))
    figures = {"accuracy": rounded.value, "float_accuracy": exact.value}
    calibration = min(CALIBRATION_IMAGES, len(images.sets[0]))
    sizes = {"bytes": path.stat().st_size, "calibration_images": calibration}
    return {**sizes, "split": split.split, "count": rounded.samples, **figures}


def _reader(quantization: Any, images: RunImages) -> Any:
    """Training images, normalised, as the quantiser reads them: one array (B, C, H, W) after another."""
    parts = _calibration(images)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            batch = next(parts, None)
            return None if batch is None else {"images": batch.contiguous().numpy()}

    return Reader()


def _calibration(images: RunImages) -> Iterator[Tensor]:
    """Batches (B, C, H, W) of evenly spaced images."""
    source = images.sets[0]
    count = min(CALIBRATION_IMAGES, len(source))
    chosen = np.linspace(0, len(source) - 1, count).astype(np.int64)
    for part in np.array_split(chosen, -(-count // images.batch)):
        yield images.transform(source.images(part))


def _measured_split(folder: Path, options: OnnxOptions) -> RunImages:
    try:
        return run_images(folder, options.data, options.data_dir, "test")
    except DataError:
        return run_images(folder, options.data, options.data_dir, "val")


def quiet_session(path: Path) -> Any:
    """A session of ONNX Runtime on the processor, whose errors are raised and not printed as well.

    Raises:
        ImportError: ONNX Runtime is not installed.
    """
    runtime: Any = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = _FATAL
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextmanager
def without_output() -> Iterator[None]:
    """Nothing is printed inside by torch.onnx and the quantiser, to whose own developers it is addressed."""
    below = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(StringIO()):  # torch.export prints graphs that it cannot trace
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(below)


class _Session(nn.Module):
    """An ONNX file as a module: images (B, C, H, W) to its output."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._session = quiet_session(path)

    def forward(self, images: Tensor) -> Tensor:
        """Outputs, (B, K) or (B, A * (5 + K), H, W), of images (B, C, H, W)."""
        return torch.from_numpy(self._session.run(None, {"images": images.contiguous().numpy()})[0])


def _accuracy(folder: Path, path: Path, images: RunImages) -> Any:
    return measure(task_of_run(folder), _Session(path), images.batches(), torch.device("cpu"))
