"""Draw a run's page, optionally with pictures of what the model learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from snugfit._core.options import from_keywords
from snugfit._engine.figure_data import PictureOptions, make_pictures
from snugfit._report.page import require_page, write_report


def draw_report(
    run: str | Path,
    *,
    pictures: bool = False,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    **options: Any,
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
    chosen = from_keywords(PictureOptions, options)
    require_page(Path(run))  # before pictures are made, which takes a while
    if not pictures:
        return {"report": str(write_report(Path(run)))}
    made = make_pictures(Path(run), chosen, model)
    return {"report": str(write_report(Path(run), made)), "missing": list(made.missing.values())}
