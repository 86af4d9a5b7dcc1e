"""Estimates as tables in the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TextIO

from rich.table import Column, Table

from snugfit._core.estimate import KINDS, MemoryEstimate, StepEstimate
from snugfit._quantities import format_bytes
from snugfit._report.formatting import NONE, count, size
from snugfit._report.tables import make_console, make_table, print_line


def print_estimate(found: MemoryEstimate, file: TextIO | None = None) -> None:
    """Print what a step needs, what would lower it, and why; to stderr by default."""
    console = make_console(file)
    console.print(_kinds(found))
    for step in found.steps:
        console.print()
        console.print(_lower(step))
    console.print()
    for line in lines(found):
        print_line(console, line)


def estimate_text(found: MemoryEstimate) -> str:
    """What :func:`print_estimate` prints, as text."""
    stream = io.StringIO()
    print_estimate(found, stream)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def lines(found: MemoryEstimate) -> Iterator[str]:
    """Why, what fits, and what the figures are."""
    yield from found.notes
    extra = format_bytes(found.process_extra_bytes)
    if found.memory_bytes is not None:
        budget = format_bytes(found.memory_bytes)
        fits = f"{found.largest_batch} images" if found.largest_batch else "not even the smallest batch"
        yield f"The largest power of two, up to 1024, that fits {budget}, of which {extra} are for the rest, is {fits}."
    yield f"Figures are {found.metric}. A process takes up to {extra} more."


def _kinds(found: MemoryEstimate) -> Table:
    """Bytes by kind, at the peak and where each is largest, which is not known of temporaries."""
    heads = [head for step in found.steps for head in (f"batch {step.batch_size},\nat the peak", "at most")]
    rows = []
    for kind, name in KINDS.items():
        sizes = [size(each.get(kind)) for step in found.steps for each in (step.at_peak, step.whole)]
        rows.append((name, *sizes))
    rows.append(("peak", *(text for step in found.steps for text in (size(step.peak_bytes), ""))))
    if any(step.measured_bytes for step in found.steps):
        rows.append(("measured", *(text for step in found.steps for text in (size(step.measured_bytes), ""))))
    shape = "x".join(map(str, found.input_shape))
    title = f"{found.model}, {count(found.parameters)} parameters, input {shape}, {found.optimizer}"
    return make_table(title, ["memory of a training step", *heads], rows)


def _lower(step: StepEstimate) -> Table:
    """Changes and their peaks, and whether they fit a budget."""
    columns = [Column("", no_wrap=True), Column("peak", justify="right", no_wrap=True)]
    columns += [Column("fits")] * (step.fits is not None) + [Column("why", ratio=1)]
    rows = [
        (each.name, size(each.peak_bytes), *([_fits(each.fits)] if step.fits is not None else []), each.why)
        for each in step.lower
    ]
    fits = {None: "", True: ", which fits", False: ", which does not fit"}[step.fits]
    title = f"what would lower the {format_bytes(step.peak_bytes)} at batch {step.batch_size}{fits}; each by itself"
    return make_table(title, columns, rows)


def _fits(fits: bool | None) -> str:
    return NONE if fits is None else "yes" if fits else "no"
