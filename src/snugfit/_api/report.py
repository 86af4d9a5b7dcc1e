"""A run's page, with pictures of what it learned where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from snugfit._engine.figure_data import heat_maps, projection, spectra
from snugfit._engine.finished_run import Source
from snugfit._report.page import require_page, write_report
from snugfit._report.pictures import Pictures
from snugfit.errors import UnusableInputError, UsageError


def draw_report(
    run: str | Path,
    *,
    pictures: bool = False,
    data: str | None = None,
    data_dir: str | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    unit: str | None = None,
    classes: Sequence[int] = (0, 1),
    images: int = 6,
) -> dict[str, Any]:
    """Draw ``report.html`` in a run folder.

    >>> import snugfit
    >>> snugfit.draw_report("runs/first")
    {'report': 'runs/first/report.html'}

    Args:
        run: run folder.
        pictures: add what the run allows of: spectra of the basis and of activations (LLS, Figure 2), t-SNE of the
            learned M (Figure 3), Grad-CAM heat maps (Figure 4). They take the data set; the rest of the page does not.
        data, data_dir: data set whose test images the pictures are made with; the one of the run by default.
        model: the module that was trained, where it was passed from Python.
        unit: whose basis and M are shown; by default the middle unit's basis, and the M of the last.
        classes: labels whose spectra are shown.
        images: how many heat maps.

    Returns:
        ``report``, the page's path; and with pictures ``missing``, a line for each that cannot be drawn.

    Raises:
        CheckpointError: the folder holds no finished run.
        UsageError: there is no such unit, class or number of images, or the page cannot be written.
    """
    require_page(Path(run))  # before pictures are made, which takes a while
    if not pictures:
        return {"report": str(write_report(Path(run)))}
    made = make_pictures(run, data, data_dir, model, unit, classes, images)
    return {"report": str(write_report(Path(run), made)), "missing": list(made.missing.values())}


def make_pictures(
    run: str | Path,
    data: str | None = None,
    data_dir: str | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    unit: str | None = None,
    classes: Sequence[int] = (0, 1),
    images: int = 6,
) -> Pictures:
    """The pictures as arrays; arguments and errors as in :func:`draw_report`."""
    source = Source(Path(run), data, data_dir, model)
    _check(source, unit, classes, images)
    made: dict[str, Any] = {}
    missing = {}
    for name, words, make in (
        ("spectra", "spectra of the basis", lambda: spectra(source, unit, tuple(classes))),
        ("projection", "t-SNE of M", lambda: projection(source, unit)),
        ("heat_maps", "Grad-CAM", lambda: heat_maps(source, images)),
    ):
        try:
            made[name] = make()
        except (UnusableInputError, UsageError) as error:
            missing[name] = f"No {words}: {' '.join(str(error).split())}"
    return Pictures(**made, missing=missing)


def _check(source: Source, unit: str | None, classes: Sequence[int], images: int) -> None:
    """Refuse at once what no run could show."""
    known = len(source.architecture.class_names)
    if unit is not None and source.record.exits:
        source.unit(unit, default=0)
    if not classes or not all(0 <= label < known for label in classes):
        raise UsageError(f"classes are one or more labels from 0 to {known - 1}, not {list(classes)}.")
    if images < 1:
        raise UsageError(f"images must be at least 1, not {images}.")
