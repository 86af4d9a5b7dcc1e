"""Tables in the terminal, among them plans, trials and estimates: names to the left, figures to the right, no frame."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from snugfit._core.estimate import KINDS, MemoryEstimate, StepEstimate
from snugfit._core.inputs import described
from snugfit._core.plan import Candidate, Plan
from snugfit._core.record import Trial
from snugfit._core.registry import find_config
from snugfit._core.workload import Workload
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report.formatting import NONE, count, duration, share, size
from snugfit._report.wrapping import command_lines, has_width

PIPE_WIDTH = 120
"""Columns of tables in a file or pipe."""
RUN_IT = "Run it: "
TEXT_WIDTH = 100
"""Columns of a plan as text."""
NARROW = 90
"""Columns below which the table of a plan has its notes below it."""


def make_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """A console on a stream, stderr by default, that shows text as it is: no markup, no emoji, no guessed colours."""
    stream = file or sys.stderr
    if width is None and not has_width(stream):
        width = PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def make_table(
    title: str, columns: Sequence[str | Column], rows: Iterable[Sequence[RenderableType]] = (), style: str = "bold"
) -> Table:
    """A table of text under a title of one or more lines, if any.

    The first column is names, and the others are figures. A ``Column`` has its own layout.
    """
    heads = [
        each if isinstance(each, Column) else Column(each, justify="right" if index else "left")
        for index, each in enumerate(columns)
    ]
    shown = Text(title, style) if title else None
    table = Table(*heads, title=shown, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def print_tables(*tables: Table, file: TextIO | None = None) -> None:
    """Print tables one after the other, with an empty line between them; to stderr by default."""
    console = make_console(file)
    for index, table in enumerate(tables):
        if index:
            console.print()
        console.print(table)


def print_line(console: Console, line: Text | str, *, whole: bool | None = None) -> None:
    """Print a line of any length: broken between words in a terminal, and whole elsewhere unless ``whole`` is given."""
    if not has_width(console.file) if whole is None else whole:
        console.print(line, soft_wrap=True)
    else:
        console.print(line)


def against(used: float | None, budget: int | None) -> Text:
    """``87.1/100.0 MB``, green to red by how full the budget is."""
    if used is None or budget is None:
        return Text(size(used))
    share = used / budget
    number, unit = format_bytes(used).split()
    limit, limit_unit = format_bytes(budget).split()
    text = f"{number}/{limit} {unit}" if unit == limit_unit else f"{number} {unit}/{limit} {limit_unit}"
    return Text(text, "red" if share > 1 else "yellow" if share > 0.97 else "green")


def print_plan(plan: Plan, file: TextIO | None = None, width: int | None = None) -> None:
    """Print every candidate, then the choice, why, and the command that runs it; to stderr by default.

    ``width`` is the number of columns, if not that of the stream.
    """
    console = make_console(file, width)
    whole = width is None and not has_width(console.file)
    console.print(plan_table(plan, console.width))
    notes = _notes_below(plan) if console.width < NARROW else []
    for line in (*notes, choice_line(plan), *map(Text, plan.explanation), *memory_lines(plan)):
        print_line(console, line, whole=whole)
    if plan.command:
        lines = command_lines(RUN_IT, plan.command, sys.maxsize if whole else console.width)
        for number, text in enumerate(lines):
            line = Text(text, "bold")
            if not number:
                line.stylize("not bold", 0, len(RUN_IT))
            console.print(line, soft_wrap=True)


def plan_text(plan: Plan) -> str:
    """What :func:`print_plan` prints, as text."""
    stream = io.StringIO()
    print_plan(plan, stream, TEXT_WIDTH)
    return _without_padding(stream.getvalue())


def as_text(shown: RenderableType) -> str:
    """What a console prints of a table, as text."""
    stream = io.StringIO()
    make_console(stream, TEXT_WIDTH).print(shown)
    return _without_padding(stream.getvalue())


def _without_padding(printed: str) -> str:
    return "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())


def plan_table(plan: Plan, width: int = PIPE_WIDTH) -> Table:
    """A row per candidate: whether it fits, what it would cost, and why not; bytes sent, or on the host, if any are.

    In less than 90 columns it has no notes, and bytes sent replace storage.
    """
    narrow = width < NARROW
    costs = [candidate.predicted for candidate in plan.candidates if candidate.predicted]
    sends, hosts = any(cost.sent_bytes for cost in costs), any(cost.host_bytes for cost in costs)
    heads = (
        ("peak", "epoch\ntime", "time\nin all") if narrow else ("predicted\npeak", "time per\nepoch", "time\nin all")
    )
    bytes_heads = [
        *(["storage"] if not (narrow and sends) else []),
        *(["sent"] if sends else []),
        *(["host"] if hosts else []),
    ]
    columns = [
        Column("strategy", no_wrap=True),
        Column("fits"),
        *(Column(head, justify="right", no_wrap=True) for head in (*heads, *bytes_heads)),
        Column("exact"),
        *([] if narrow else [Column("why not, or notes", ratio=1, min_width=16)]),
    ]
    table = make_table(f"{plan.workload.model} on {plan.workload.data}, budget {plan.budget}", columns)
    if narrow:
        table.padding = (0, 1, 0, 0)
    for index, candidate in enumerate(plan.candidates):
        cells = _cells(candidate, chosen=index == plan.chosen, sizes=bytes_heads, workload=plan.workload)
        notes = [] if narrow else [Text(_notes(candidate))]
        table.add_row(*cells, *notes, style="" if candidate.feasible else "dim")
    return table


def _notes_below(plan: Plan) -> list[Text]:
    """A line for each candidate with notes, where its table has no room for them."""
    noted = ((candidate.strategy, _notes(candidate)) for candidate in plan.candidates)
    return [Text(f"{strategy}: {notes}", "dim") for strategy, notes in noted if notes]


def choice_line(plan: Plan) -> Text:
    """The candidate that would run, or that none fits."""
    choice = plan.choice
    if choice is None:
        if not any(each.smallest_bytes or each.predicted or each.smallest_ratio for each in plan.candidates):
            return Text("No strategy can train this network as asked.", "red")
        smallest = min((c.smallest_bytes for c in plan.candidates if c.smallest_bytes), default=None)
        kind = "memory budget" if plan.budget.total_memory is None else plan.budget.memory_flag
        smallest = None if smallest is None else plan.smallest_budget(smallest)
        rest = "" if smallest is None else f" The smallest {kind} that would do is {format_bytes(smallest)}."
        bound = "what this machine has free" if rest and plan.budget.memory_bytes is None else "this budget"
        return Text(f"Nothing fits {bound}.{rest}", "red")
    cost = choice.predicted
    line = Text.assemble("Chosen: ", (choice.strategy, "bold green"))
    if cost is not None:
        line.append(f", {format_bytes(cost.peak_bytes)} at the peak, {format_seconds(cost.seconds)} in all")
    return line.append(".")


def memory_lines(plan: Plan) -> list[Text]:
    """Memory at rest, what the run adds, their sum and what the machine has; and a warning where it has too little."""
    memory, adds, total = plan.memory, plan.growth_bytes, plan.total_bytes
    if plan.device_memory is not None and plan.choice and plan.choice.predicted:
        return [Text(plan.device_memory.text(int(plan.choice.predicted.peak_bytes)))]
    if memory is None:
        return []
    line = Text(f"Memory in all: {format_bytes(memory.rest_bytes)} at rest")
    if adds is not None:
        kind = "peak" if plan.budget.memory_bytes is None else "budget"
        line.append(f" + {kind} {format_bytes(adds)} = {format_bytes(total or 0)}")
    line.append(f". This machine has {format_bytes(memory.machine.ram_bytes)} of RAM free for the run")
    if memory.machine.group_bytes is not None:
        line.append(f", and its control group leaves {format_bytes(memory.machine.group_bytes)}")
    return [line.append("."), *([Text(f"warning: {warning}", "yellow")] if (warning := plan.machine_warning) else [])]


def print_comparison(trials: Sequence[Trial]) -> None:
    """Print a row per trial to stderr: peak and seconds, predicted and measured, and their ratio."""
    images = max((trial.images for trial in trials), default=0)
    figures = ("predicted\npeak", "measured,\nof budget", "ratio", "predicted\ntime", "measured", "ratio")
    columns = [
        Column("strategy", no_wrap=True),
        *(Column(head, justify="right", no_wrap=True) for head in figures),
        Column("error", ratio=1),
    ]
    rows = [_compared(trial) for trial in trials]
    print_tables(make_table(f"Trials: one epoch over {images} images each", columns, rows))


def _cells(candidate: Candidate, *, chosen: bool, sizes: Sequence[str], workload: Workload) -> list[Text | str]:
    cost = candidate.predicted
    timed = cost if candidate.feasible else None
    amounts = {"storage": cost.storage_bytes, "sent": cost.sent_bytes, "host": cost.host_bytes} if cost else {}
    return [
        Text(("* " if chosen else "  ") + candidate.strategy, "bold green" if chosen else ""),
        Text("yes", "green") if candidate.feasible else Text("no", "red") if candidate.considered else NONE,
        size(cost.peak_bytes if cost else None),
        duration(timed.seconds_per_epoch if timed else None),
        duration(timed.seconds if timed else None),
        *(size(amounts.get(each)) for each in sizes),
        _exactness(candidate, workload),
    ]


def _exactness(candidate: Candidate, workload: Workload) -> str:
    if workload.compresses and workload.activations in find_config(candidate.strategy).activations:
        return "nearly"
    return "no" if not candidate.exact else "gradients" if workload.rounded_flags else "yes"


def _notes(candidate: Candidate) -> str:
    if candidate.reasons:
        return "; ".join(candidate.reasons)
    return ", ".join(filter(None, (_batches(candidate.batches), *candidate.terms)))


def _batches(batches: tuple[int, ...]) -> str:
    if len(set(batches)) == 1:
        return f"batch {batches[0]}" + (f" in {len(batches)} phases" if len(batches) > 1 else "")
    return f"batches {', '.join(map(str, batches))}" if batches else ""


def _compared(trial: Trial) -> list[Text | str]:
    return [
        trial.strategy,
        size(trial.predicted_peak_bytes),
        against(trial.measured_peak_bytes, trial.budget_bytes),
        share(trial.peak_ratio),
        duration(trial.predicted_seconds),
        duration(trial.measured_seconds),
        share(trial.seconds_ratio),
        Text(trial.error or "", "red"),
    ]


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
    if found.inputs:
        yield f"Inputs are {described(found.inputs)}."
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
    given = f"{len(found.inputs)} inputs" if found.inputs else f"input {shape}"
    title = f"{found.model}, {count(found.parameters)} parameters, {given}, {found.optimizer}"
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
