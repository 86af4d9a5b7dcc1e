"""Write an exported model with weights and feature maps in 8 bits, by ONNX Runtime, and measure its accuracy."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snugfit._core.option_groups import OnnxOptions
from snugfit._engine.inference import RunImages, run_images, task_of_run
from snugfit._training.task import measure
from snugfit.errors import DataError, ModelError, first_line

INT8_FILE = "model.int8.onnx"
CALIBRATION_IMAGES = 256
"""Training images, evenly spaced, whose feature maps set the ranges of the 8 bits."""
_FATAL = 4


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
        with without_notices(), TemporaryDirectory() as scratch:
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
def without_notices() -> Iterator[None]:
    """Warnings of torch.onnx and the quantiser, which concern their own developers, are not printed inside."""
    loggers = [logging.getLogger(name) for name in (None, "torch.onnx")]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


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
