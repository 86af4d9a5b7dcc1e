"""Use a trained model: load, evaluate, predict and export it, and draw its report.

Each function imports what it needs, because training needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from snugfit._core.keywords import ExportKeywords, PictureKeywords, with_keywords
from snugfit._core.option_groups import PLAIN_ONNX, ExportFormat, OnnxOptions, PictureOptions, Split
from snugfit._core.options import Count, checked, from_keywords
from snugfit._engine import loading
from snugfit.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack


def load(run: str | Path, model: nn.Module | Callable[[], nn.Module] | None = None) -> nn.Module:
    """Load the trained model of a run: a plain module in evaluation mode, cut at the exit that was chosen.

    >>> import snugfit, torch
    >>> model = snugfit.load("runs/first")
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])

    Args:
        run: run folder.
        model: the module (or a function that makes it) that was trained, if it was passed from Python; it is not
            changed.

    Raises:
        CheckpointError: the folder is incomplete or its weights are damaged or belong to another model.
    """
    return loading.load(Path(run), model)


def evaluate(
    run: str | Path,
    data: str | None = None,
    data_dir: str | None = None,
    split: Split | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
) -> dict[str, Any]:
    """Measure a trained model on a split of its own data set, or of another with the same classes.

    >>> import snugfit
    >>> found = snugfit.evaluate("runs/first")
    >>> found["split"], 0 <= found["accuracy"] <= found["top5"] <= 1, len(found["per_class"])
    ('test', True, 10)

    Args:
        run: run folder.
        data, data_dir: data set; the one of the run by default.
        split: ``train``, ``val``, ``test`` or ``all``; default ``test``, or ``all`` for a folder other than the run's.
        model: the module that was trained, if it was passed from Python.

    Returns:
        ``split``, ``accuracy`` and ``top5`` in [0, 1], ``count``, ``per_class`` accuracies by name, ``confusion``. Of a
        model that detects, ``map50`` (which is ``accuracy`` too) and ``per_class`` average precisions instead; of one
        that gives several labels, ``map`` and ``per_class``.

    Raises:
        DataError: the data has no such split, or other classes.
    """
    from snugfit._engine import inference

    return inference.measured(Path(run), data, data_dir, split, model)


def predict(
    run: str | Path,
    images: str | Path,
    top: int | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Classify an image, or every image below a folder; give it labels, or find the objects in it.

    >>> import snugfit
    >>> for path, name, probability in snugfit.predict("runs/first", "photos"):
    ...     print(path, 0 < probability <= 1)
    photos/0.png True
    photos/1.png True
    photos/2.png True

    Args:
        run: run folder.
        images: file or folder.
        top: how many classes to give for each image, 1 by default; of several labels by default all with a probability
            of at least 0.5; or the most boxes, all by default.
        model: the module that was trained, if it was passed from Python.

    Yields:
        Path, class name and probability; ``top`` rows per image. For objects, those with a score of at least 0.25, each
        followed by left, top, right and bottom in pixels of the upright image.

    Raises:
        DataError: there are no images; or, after all others are classified, that some cannot be decoded.
    """
    from snugfit._engine import inference

    yield from inference.predicted(Path(run), Path(images), checked("top", Count | None, top), model)


def export(
    run: str | Path,
    out: str | Path | None = None,
    format: ExportFormat = "both",
    check: bool = True,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    **options: Unpack[ExportKeywords],
) -> dict[str, Any]:
    """Export the trained model of a run, with its class names and normalisation: ``architecture.json``, ONNX metadata.

    >>> import snugfit
    >>> snugfit.export("runs/first", "deploy", format="safetensors")
    {'files': ['deploy/model.safetensors'], 'onnx_max_difference': None}

    Args:
        run: run folder.
        out: folder to write to; the run folder by default.
        format: ``safetensors``, ``onnx`` (dynamic batch) or ``both``.
        check: compare ONNX Runtime's outputs with PyTorch's on random images.
        model: the module that was trained, if it was passed from Python.
        **options: ``free_size`` lets ONNX images have any size. ``int8`` also writes ``model.int8.onnx``, quantised by
            ONNX Runtime, and measures it on the run's data set or ``data`` (and ``data_dir``).

    Returns:
        ``files`` written, and ``onnx_max_difference`` of the logits if it was checked. With ``int8`` also a dictionary
        of that name: ``bytes`` of the file, ``accuracy`` and ``float_accuracy`` on ``count`` images of ``split``.

    Raises:
        UsageError: unknown format, or options that need another one.
        ModelError: the export extra is not installed, the outputs differ, the network takes images of one size alone,
            or ONNX Runtime cannot quantise it.
    """
    checked("format", ExportFormat, format)
    checked("check", bool, check)
    from snugfit._engine import exporting

    target = None if out is None else Path(out)
    return exporting.export(Path(run), target, format, check, model, from_keywords(OnnxOptions, options))


vars(export)["__signature__"] = with_keywords(export, vars(PLAIN_ONNX))


def draw_report(
    run: str | Path,
    *,
    pictures: bool = False,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    **options: Unpack[PictureKeywords],
) -> dict[str, Any]:
    """Draw ``report.html`` in a run folder.

    >>> import snugfit
    >>> snugfit.draw_report("runs/first")
    {'report': 'runs/first/report.html'}

    Args:
        run: run folder.
        pictures: add spectra of the basis and of activations (LLS, Figure 2), t-SNE of the learned M (Figure 3), and
            Grad-CAM heat maps (Figure 4). They need the data set; the rest of the page does not.
        model: the module that was trained, if it was passed from Python.
        **options: of the pictures. ``data`` and ``data_dir``: data set whose test images they are made with, the one of
            the run by default; ``unit``: whose basis and M are shown, by default the middle unit's basis and the M of
            the last; ``classes``: labels whose spectra are shown, (0, 1) by default; ``images``: how many heat maps, 6
            by default.

    Returns:
        ``report``, the page's path; and with pictures ``missing``, a line for each picture that the run does not allow.

    Raises:
        CheckpointError: the folder holds no finished run.
        UsageError: there is no such option, unit, class or number of images, or the page cannot be written.
    """
    from snugfit._engine.figure_data import make_pictures
    from snugfit._report.page import require_page, write_report

    chosen = from_keywords(PictureOptions, options)
    if options and not pictures:
        names = ", ".join(f"{name}=" for name in options)
        raise UsageError(f"{names} given for a report without pictures; add pictures=True.")
    require_page(Path(run))  # before pictures are made, which takes a while
    if not pictures:
        return {"report": str(write_report(Path(run)))}
    made = make_pictures(Path(run), chosen, model)
    return {"report": str(write_report(Path(run), made)), "missing": list(made.missing.values())}


vars(draw_report)["__signature__"] = with_keywords(draw_report, vars(PictureOptions()))
