"""Tables in the terminal: alignment, plans and their candidates."""

from __future__ import annotations

import io
import shlex
import subprocess
from dataclasses import replace

import pytest
from rich.table import Column

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Cost, Phase, Plan
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._report.tables import make_table, plan_text, print_plan, print_tables
from snugfit._report.wrapping import command_lines, wrapped


def test_names_are_to_the_left_and_figures_to_the_right():
    stream = io.StringIO()
    first = make_table(
        "Units\nof a network", ("unit", "bytes", Column("host")), [("a", "1", "x"), ("longer", "100", "yy")]
    )
    print_tables(first, make_table("", ("b",), [("[1]",)]), file=stream)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[:5] == ["Units", "of a network", "unit    bytes  host", "a           1  x", "longer    100  yy"]
    assert lines[5:] == ["", "b", "[1]"]


WORKLOAD = Workload("vgg16", "cifar10", (3, 32, 32), 10, 45_000, 5_000, 10_000)
HARDWARE = Hardware("cpu", "cpu", 2, 4 * 10**9, "Linux", "2.13", enforces=True)
PHASES = tuple(Phase(f"block {i}", 1, 1.0, batch, ("u",)) for i, batch in enumerate((16, 64)))
FITS = Candidate("blockwise", True, predicted=Cost(98_600_000, 100.0, 1021.0, 990_000_000, phases=PHASES))
FAILS = Candidate("backprop", False, reasons=("needs [118.0 MB]",), smallest_bytes=118_000_000, exact=True)


def printed(plan: Plan) -> list[str]:
    stream = io.StringIO()
    print_plan(plan, stream)
    return stream.getvalue().splitlines()


def test_plan_marks_the_choice_and_says_why_not():
    lines = printed(Plan(WORKLOAD, Budget("100MB"), HARDWARE, (FITS, FAILS), 0))
    assert lines[0].startswith("vgg16 on cifar10, budget 100.0 MB of memory")
    chosen = next(line for line in lines if line.startswith("* "))
    assert " ".join(chosen.split()) == "* blockwise yes 98.6 MB 1m40s 17m01s 990.0 MB no batches 16, 64"
    failed = next(line for line in lines if "backprop" in line)
    assert (
        " ".join(failed.split()) == "backprop no \N{EN DASH} \N{EN DASH} \N{EN DASH} \N{EN DASH} yes needs [118.0 MB]"
    )
    assert lines[-1] == "Chosen: blockwise, 98.6 MB at the peak, 17m01s in all."


@pytest.mark.parametrize("rounded", [{"optimizer": OptimizerSettings(state="int8")}, {"weight_dtype": "bfloat16"}])
def test_a_plan_with_rounded_updates_is_exact_in_gradients_alone(rounded):
    exact = Candidate("backprop", True, predicted=FITS.predicted, exact=True)
    work = replace(WORKLOAD, **rounded)
    rows = printed(Plan(work, Budget("100MB"), HARDWARE, (exact, FITS), 0))
    assert " ".join(next(each for each in rows if each.startswith("* ")).split()).startswith(
        "* backprop yes 98.6 MB 1m40s 17m01s 990.0 MB gradients"
    )
    assert "990.0 MB no " in " ".join(next(each for each in rows if "blockwise" in each).split())


def test_a_plan_with_compressed_activations_is_nearly_exact():
    choice = Candidate("backprop", True, predicted=FITS.predicted)
    rows = printed(Plan(replace(WORKLOAD, activations="int4"), Budget("100MB"), HARDWARE, (choice, FITS), 0))
    assert "990.0 MB nearly" in " ".join(" ".join(rows).split())
    assert "990.0 MB no " in " ".join(next(each for each in rows if "blockwise" in each).split())


def test_plan_tells_the_rho_and_the_batch_of_a_selection():
    intervals = tuple(Phase(f"interval {i}", 1, 1.0, 8) for i in range(3))
    cost = Cost(98_600_000, 100.0, 1021.0, phases=intervals)
    settings = {"scheme": "elastic", "time_ratio": 0.5}
    elastic = Candidate("elastic", True, settings, cost)
    head = Candidate("elastic", True, {"scheme": "head", "time_ratio": None}, cost)
    plan = Plan(WORKLOAD, Budget("100MB", time_ratio=0.5), HARDWARE, (elastic, head), 0)
    for lines in (printed(plan), plan_text(plan).splitlines()):
        assert lines[0].rstrip().endswith("budget 100.0 MB of memory, time ratio 0.5")
        notes = [" ".join(line.split()) for line in lines if "elastic" in line]
        assert notes[0].endswith("no batch 8, rho 0.5") and notes[1].endswith("no batch 8, scheme head")


def test_plan_without_a_choice_names_the_smallest_budget():
    lines = printed(Plan(WORKLOAD, Budget("10MB"), HARDWARE, (FAILS,), None))
    assert not any(line.startswith("* ") for line in lines)
    assert lines[-1] == "Nothing fits this budget. The smallest memory budget that would do is 118.0 MB."


def test_a_plan_that_no_budget_would_change_blames_none():
    refused = Candidate("blockwise", False, reasons=("needs a network of one input",))
    lines = printed(Plan(WORKLOAD, Budget("10MB"), HARDWARE, (refused,), None))
    assert lines[-1] == "No strategy can train this network as asked."


WORDY = (
    "needs 118.0 MB for one sample with the leanest of its local losses, and nothing else would be smaller than that"
)
NAMES = ("backprop", "checkpoint", "blockwise", "tiled")


def wordy_plan(sent: int | None = None) -> Plan:
    cost = Cost(998_600_000, 100.0, 36_000.0, 990_000_000, sent_bytes=sent or 0, phases=PHASES)
    work = replace(WORKLOAD, weight_dtype="bfloat16")
    fits = tuple(Candidate(name, True, predicted=cost, exact=True) for name in NAMES)
    fails = Candidate("feedback", False, reasons=(WORDY,), smallest_bytes=118_000_000)
    command = ("snugfit", "train", "--model", "vgg16", "--data", "folder:my photos", "--memory", "100MB", "--lr", "0.1")
    explanation = ("Training is from scratch, so sidenet is not considered; pre-trained --weights would open it now.",)
    return Plan(work, Budget("100MB"), HARDWARE, (*fits, fails), 0, explanation=explanation, command=command * 2)


@pytest.mark.parametrize("sent", [None, 10**9])
@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_a_plan_keeps_to_the_terminal_and_cuts_no_word(columns, sent, monkeypatch):
    plan = wordy_plan(sent)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(plan)
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    assert {*WORDY.split(), *plan.explanation[0].split(), *NAMES, "998.6", "10h00m", "gradients"} <= {*words}
    first = next(number for number, line in enumerate(lines) if line.startswith("Run it: "))
    copied = "\n".join(["printf '%s\\n' \\", lines[first].removeprefix("Run it: "), *lines[first + 1 :]])
    assert subprocess.check_output(["sh", "-c", copied], text=True).splitlines() == [*plan.command]


def test_a_plan_as_text_has_100_columns(monkeypatch):
    text = plan_text(wordy_plan())
    assert max(map(len, text.splitlines())) <= 100
    monkeypatch.setenv("COLUMNS", "60")
    assert plan_text(wordy_plan()) == text


def test_lines_in_a_pipe_stay_whole():
    plan = wordy_plan()
    lines = printed(plan)
    assert plan.explanation[0] in lines and lines[-1] == f"Run it: {shlex.join(plan.command)}"
    assert wrapped(WORDY, io.StringIO()) == WORDY


def test_text_for_people_is_broken_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = "/a/path/that/is/longer/than/the/forty/columns/of/this/terminal"
    lines = wrapped(f"error: {WORDY}\ncannot read {path}", io.StringIO()).splitlines()
    assert max(len(line) for line in lines if line != path) <= 40 and path in lines
    assert " ".join(lines).split() == f"error: {WORDY} cannot read {path}".split()


def test_a_command_of_one_word_has_one_line():
    assert [*command_lines("Run it: ", ["snugfit"], 5)] == ["Run it: snugfit"]
