"""Plans and profiles as tables for the terminal."""

from __future__ import annotations

from typing import TextIO

from rich.table import Table
from rich.text import Text

from snugfit._core.command import as_typed
from snugfit._core.plan import Candidate, Plan
from snugfit._core.profile import Profile
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report.console_lines import make_console
from snugfit._report.formatting import NONE, count, duration, size


def print_plan(plan: Plan, file: TextIO | None = None) -> None:
    """Print every candidate, then the choice, why, and the command that runs it; to stderr by default."""
    console = make_console(file)
    console.print(plan_table(plan))
    console.print(choice_line(plan), soft_wrap=True)
    for sentence in plan.explanation:
        console.print(Text(sentence), soft_wrap=True)
    if plan.command:
        console.print(Text.assemble("Run it: ", (as_typed(plan.command), "bold")), soft_wrap=True)


def print_profile(profile: Profile, file: TextIO | None = None) -> None:
    """Print what every unit needs; to stderr by default."""
    make_console(file).print(profile_table(profile))


def plan_table(plan: Plan) -> Table:
    """A row per candidate: whether it fits, what it would cost, and why not; bytes sent where there are any."""
    title = f"{plan.workload.model} on {plan.workload.data}, budget {plan.budget}"
    table = _table(title)
    table.add_column("strategy", no_wrap=True)
    table.add_column("fits")
    sends = any(candidate.predicted and candidate.predicted.sent_bytes for candidate in plan.candidates)
    for head in ("predicted\npeak", "time per\nepoch", "time\nin all", "storage", *(["sent"] if sends else [])):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("exact")
    table.add_column("why not, or notes", ratio=1, min_width=16)
    for index, candidate in enumerate(plan.candidates):
        cells = _cells(candidate, chosen=index == plan.chosen, sends=sends)
        table.add_row(*cells, style="" if candidate.feasible else "dim")
    return table


def choice_line(plan: Plan) -> Text:
    """The candidate that would run, or that none fits."""
    choice = plan.choice
    if choice is None:
        smallest = min((c.smallest_bytes for c in plan.candidates if c.smallest_bytes), default=None)
        rest = "" if smallest is None else f" The smallest memory budget that would do is {format_bytes(smallest)}."
        return Text(f"Nothing fits this budget.{rest}", "red")
    cost = choice.predicted
    line = Text.assemble("Chosen: ", (choice.strategy, "bold green"))
    if cost is not None:
        line.append(f", {format_bytes(cost.peak_bytes)} at the peak, {format_seconds(cost.seconds)} in all")
    return line.append(".")


def profile_table(profile: Profile) -> Table:
    """A row per unit: parameters, multiply-accumulates, bytes and seconds of one sample."""
    table = _table("Units, per sample")
    table.add_column("", justify="right")
    table.add_column("unit")
    for head in ("parameters", "MACs", "output", "saved for backward", "forward time"):
        table.add_column(head, justify="right")
    for number, unit in enumerate(profile.units, 1):
        table.add_row(
            str(number), Text(unit.name), count(unit.parameters), count(unit.macs), format_bytes(unit.output_bytes),
            format_bytes(unit.saved_bytes), _short(unit.seconds),
        )  # fmt: skip
    units = profile.units
    table.add_section()
    table.add_row(
        "", "all", count(sum(u.parameters for u in units)), count(sum(u.macs for u in units)),
        format_bytes(sum(u.output_bytes for u in units)), format_bytes(sum(u.saved_bytes for u in units)),
        _short(sum(u.seconds for u in units)),
    )  # fmt: skip
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title, "bold"), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")


def _cells(candidate: Candidate, *, chosen: bool, sends: bool) -> list[Text | str]:
    cost = candidate.predicted
    timed = cost if candidate.feasible else None
    sent = [size(cost.sent_bytes if cost else None)] if sends else []
    return [
        Text(("* " if chosen else "  ") + candidate.strategy, "bold green" if chosen else ""),
        Text("yes", "green") if candidate.feasible else Text("no", "red") if candidate.considered else NONE,
        size(cost.peak_bytes if cost else None),
        duration(timed.seconds_per_epoch if timed else None),
        duration(timed.seconds if timed else None),
        size(cost.storage_bytes if cost else None),
        *sent,
        "yes" if candidate.exact else "no",
        Text(_notes(candidate)),
    ]


def _notes(candidate: Candidate) -> str:
    if candidate.reasons:
        return "; ".join(candidate.reasons)
    return ", ".join(filter(None, (_batches(candidate.batches), *candidate.terms)))


def _batches(batches: tuple[int, ...]) -> str:
    if len(set(batches)) == 1:
        return f"batch {batches[0]}" + (f" in {len(batches)} phases" if len(batches) > 1 else "")
    return f"batches {', '.join(map(str, batches))}" if batches else ""


def _short(seconds: float) -> str:
    if seconds <= 0:
        return NONE
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else format_seconds(seconds)
