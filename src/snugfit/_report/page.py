"""The HTML page of a run: one file in the run folder, drawn from the record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from snugfit._core.record import Record
from snugfit._report.metrics import read_metrics
from snugfit._storage.files import replacing
from snugfit._storage.manifest import check_files, listing
from snugfit._storage.outputs import require_file
from snugfit._storage.run_folder import read_record

if TYPE_CHECKING:
    from snugfit._report.pictures import Pictures


def write_report(run_dir: Path, pictures: Pictures | None = None) -> Path:
    """Draw ``report.html`` from a run folder's ``record.json`` and ``metrics.csv``, optionally with pictures.

    Raises:
        CheckpointError: ``record.json`` is missing or damaged.
        UsageError, OutOfStorageError: the page cannot be written.
    """
    run_dir = Path(run_dir)
    record = require_page(run_dir)
    from snugfit._report.run_page import render  # imports matplotlib

    page = render(record, read_metrics(run_dir / "metrics.csv"), pictures)
    path = run_dir / "report.html"
    with listing(run_dir) as manifest, replacing(path, manifest) as file:
        file.write(page.encode("utf-8", errors="replace"))
    return path


def require_page(run_dir: Path) -> Record:
    """The record of a finished run, in whose folder the page can be written.

    Raises:
        CheckpointError: ``record.json`` is missing or damaged.
        UsageError, OutOfStorageError: the page cannot be written.
    """
    record = read_record(run_dir)
    check_files(run_dir, "metrics.csv")
    require_file(run_dir / "report.html", "Make the run folder writable.")
    return record
