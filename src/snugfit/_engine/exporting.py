"""Write a trained model for other runtimes, and check that ONNX Runtime agrees with PyTorch."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snugfit._core.serial import to_data
from snugfit._engine.loading import Architecture, ModuleOrFactory, load
from snugfit._storage.manifest import listing
from snugfit._storage.outputs import require_file, require_folder
from snugfit._storage.tensor_file import MODEL_FILE
from snugfit.errors import ModelError, UnusableInputError

TOLERANCE = 1e-3
"""Largest difference of logits between PyTorch and ONNX Runtime, relative to the largest logit."""

_METADATA = ("class_names", "mean", "std", "border", "model", "data", "task", "anchors")


def export(
    folder: Path, out: Path | None, format: str, check: bool, model: ModuleOrFactory | None = None
) -> dict[str, Any]:
    """Export the trained model of a run; see :func:`snugfit.export`."""
    target = folder if out is None else out
    if out is not None or folder.is_dir():
        require_folder(target)
        for name in (MODEL_FILE, "model.onnx", "architecture.json") if target.is_dir() else ():
            require_file(target / name)
    module, architecture = load(folder, model), Architecture.read(folder)
    if architecture.inputs and format != "safetensors":
        raise ModelError("the network takes several inputs, and ONNX export takes one image; use --format safetensors.")
    target.mkdir(parents=True, exist_ok=True)
    files, difference = [], None
    if target.resolve() != folder.resolve():
        architecture.write(target)
    if format != "onnx":
        destination = target / MODEL_FILE
        if destination.resolve() != (folder / MODEL_FILE).resolve():
            shutil.copyfile(folder / MODEL_FILE, destination)
        files.append(str(destination))
    if format != "safetensors":
        path = target / "model.onnx"
        with listing(target) as manifest:
            if manifest is not None:
                manifest.remove([path])
            _write_onnx(module, architecture, path)
            if manifest is not None:
                manifest.add(path)
        files.append(str(path))
        difference = onnx_difference(module, architecture.input_shape, path) if check else None
    return {"files": files, "onnx_max_difference": difference}


def _write_onnx(module: nn.Module, architecture: Architecture, path: Path) -> None:
    """Write the model; its metadata holds normalisation, class names and task, as JSON texts."""
    try:
        import onnx

        import_module("onnxscript")
    except ImportError as error:
        raise ModelError('ONNX export needs more packages: pip install "snugfit[export]".') from error
    example = torch.randn(2, *architecture.input_shape)
    module(example)  # a module that builds parts at its first use must not do so while it is traced
    batch = torch.export.Dim("batch", min=1, max=65536)
    try:
        torch.onnx.export(
            module,
            (example,),
            path,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: batch},),
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
    onnx.save(written, path)


@torch.no_grad()
def onnx_difference(module: nn.Module, shape: tuple[int, int, int], path: Path) -> float:
    """Largest absolute difference of logits on random images, in batches of 1 and 3; ModelError if it is too large."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ModelError('checking ONNX needs ONNX Runtime: pip install "snugfit[export]".') from error
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UnusableInputError(f"ONNX Runtime cannot load {path}: {error}") from error
    worst = 0.0
    for batch in (1, 3):
        images = torch.randn(batch, *shape)
        expected = module(images)
        (actual,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        difference = float((torch.from_numpy(actual) - expected).abs().max())
        if difference > TOLERANCE * max(1.0, float(expected.abs().max())):
            raise ModelError(f"ONNX Runtime's logits differ from PyTorch's by {difference:.2g}; {path} is not usable.")
        worst = max(worst, difference)
    return worst
