"""Tables in the terminal: alignment, plans and their candidates."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.table import Column

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Cost, Phase, Plan
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._report.tables import make_table, plan_text, print_plan, print_tables


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
