"""Tables and summary of the claim about plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from statistics import mean

from benchmarks.common import INFEASIBLE, Cell
from benchmarks.store import markdown, mb, middle, number, percent

TIGHT = 1.15
"""Target: predicted over measured peak, in 95 % of the cells."""
KEPT = ("strategy", "model", "budget", "enforced", "predicted", "measured", "accuracy", "settings", "overhead_seconds")
PHASE = (
    *("name", "batch_size", "steps", "predicted_seconds", "seconds"),
    *("predicted_peak_bytes", "predicted_kept_bytes", "measured_peak_bytes"),
)
CHECKED = ("backprop", "checkpoint", "blockwise")
"""Strategies of which every refusal must be confirmed."""


def slim_record(record: Cell) -> Cell:
    """What the tables need of a record."""
    phases = [{key: phase[key] for key in PHASE if key in phase} for phase in record["phases"]]
    return {**{key: record[key] for key in KEPT}, "phases": phases}


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b of two equally long rankings, in [-1, 1]; None where one of them ranks nothing.

    Pairs that agree in order less those that do not, over the geometric mean of the pairs that each tells apart.
    """
    agreement = told_first = told_second = 0
    for (a, x), (b, y) in combinations(zip(first, second, strict=True), 2):
        one, two = (a > b) - (a < b), (x > y) - (x < y)
        agreement += one * two
        told_first += abs(one)
        told_second += abs(two)
    return agreement / sqrt(told_first * told_second) if told_first and told_second else None


def training_seconds(record: Cell) -> tuple[float, float]:
    """Predicted and measured seconds of the phases that train."""
    phases = [phase for phase in record["phases"] if phase["steps"]]
    return sum(phase["predicted_seconds"] for phase in phases), sum(phase["seconds"] for phase in phases)


def render(cells: list[Cell]) -> str:
    """All tables for which there are results."""
    parts = []
    matrix = [cell for cell in cells if cell["arm"] in ("plan", "train", "refused")]
    if matrix:
        parts += [_matrix(matrix), "\n".join(f"- {line}" for line in conclusions(matrix))]
    timed = [cell for cell in cells if cell["arm"] == "speed"]
    if timed:
        parts.append(_speed(timed))
    return "\n\n".join(parts)


def _key(cell: Cell) -> tuple[str, str, str]:
    return cell["settings"]["model"], cell["settings"]["strategy"], cell["settings"]["memory"]


def _matrix(cells: list[Cell]) -> str:
    by_arm: dict[tuple[str, ...], Cell] = {(cell["arm"], *_key(cell)): cell for cell in cells}
    rows = dict.fromkeys(_key(cell)[:2] for cell in sorted(cells, key=_key))
    budgets = sorted({_key(cell)[2] for cell in cells}, key=_bytes)
    table = [[*row, *(_entry(by_arm, (*row, budget)) for budget in budgets)] for row in rows]
    intro = (
        "Predicted and measured peak in MB, then predicted and measured seconds of the training phases. *no*: said not "
        "to fit, and refused memory at its smallest setting; *no?*: said not to fit, and not confirmed; -: does not "
        "serve.\n\n"
    )
    return intro + markdown(("model", "strategy", *budgets), table)


def _bytes(budget: str) -> float:
    return float(budget.removesuffix("GB")) * 1e9 if budget.endswith("GB") else float(budget.removesuffix("MB")) * 1e6


def _entry(by_arm: dict[tuple[str, ...], Cell], key: tuple[str, str, str]) -> str:
    planned, trained = by_arm.get(("plan", *key)), by_arm.get(("train", *key))
    if planned is None:
        return ""
    if is_unserved(planned):
        return "-"
    if planned["exit_code"] == INFEASIBLE:
        return "no" if _confirmed(by_arm.get(("refused", *key))) else "no?"
    if trained is None or "record" not in trained:
        code = (trained or planned)["exit_code"]
        return "timed out" if code is None else f"exit {code}"
    record = trained["record"]
    seconds = " / ".join(number(value, 1) for value in training_seconds(record))
    return f"{mb(record['predicted']['peak_bytes'])} / {mb(record['measured']['peak_bytes'])}, {seconds} s"


def is_unserved(planned: Cell) -> bool:
    """Whether a strategy cannot serve the model, whatever the budget: an error, or reasons that name no bytes."""
    if planned["exit_code"] == INFEASIBLE:
        return bool(planned["candidate"]["smallest_bytes"] is None)
    return bool(planned.get("error", {}).get("type") == "ModelError")


def _confirmed(cell: Cell | None) -> bool:
    return bool(cell and cell["exit_code"] == 0 and cell["outcome"].get("refused"))


def conclusions(cells: list[Cell]) -> list[str]:
    """What the cells say of the claim, one sentence each."""
    planned = [cell for cell in cells if cell["arm"] == "plan"]
    trained = [cell for cell in cells if cell["arm"] == "train"]
    runs = [cell["record"] for cell in trained if "record" in cell]
    refused = {_key(cell): cell for cell in cells if cell["arm"] == "refused"}
    infeasible = [_key(cell) for cell in planned if cell["exit_code"] == INFEASIBLE and not is_unserved(cell)]
    unserved = sum(map(is_unserved, planned))
    pairs = [(run["predicted"]["peak_bytes"], run["measured"]["peak_bytes"]) for run in runs]
    within = sum(run["measured"]["peak_bytes"] <= run["budget"]["memory_bytes"] for run in runs)
    tight = sum(predicted <= TIGHT * measured for predicted, measured in pairs)
    seconds = [training_seconds(run) for run in runs]
    error = middle([abs(predicted / measured - 1) for predicted, measured in seconds if measured])
    taus = rank_agreement(trained)
    must = [key for key in infeasible if key[1] in CHECKED]
    return [
        f"cells: {len(runs)} run, {len(infeasible)} infeasible, {unserved} not served, "
        f"{len(planned) - len(runs) - len(infeasible) - unserved} failed or not run",
        f"measured peak within the budget: {within} of {len(runs)}; within the prediction: "
        f"{sum(measured <= predicted for predicted, measured in pairs)} of {len(runs)} (target: all)",
        f"predicted <= {TIGHT} x measured peak: {percent(tight / len(pairs) if pairs else None)} (target 95 %)",
        f"Kendall's tau of predicted and measured seconds among the strategies of a model and budget (checkpoint "
        f"where it recomputes): "
        f"{number(mean(taus) if taus else None)} on average over {len(taus)} (target 0.8)",
        f"median error of predicted seconds: {percent(error)} (target 15 %)",
        f"infeasible and refused memory at the smallest setting: "
        f"{sum(_confirmed(refused.get(key)) for key in infeasible)} of {len(infeasible)}; of {', '.join(CHECKED)}: "
        f"{sum(_confirmed(refused.get(key)) for key in must)} of {len(must)}",
    ]


def rank_agreement(trained: list[Cell]) -> list[float]:
    """Kendall's tau of every model and budget with at least three strategies that ran.

    A checkpointing that recomputes nothing is backpropagation, step by step: as neither is faster, it is left out.
    """
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for cell in trained:
        if "record" in cell and not _recomputes_nothing(cell["record"]["settings"]):
            model, _, budget = _key(cell)
            groups.setdefault((model, budget), []).append(training_seconds(cell["record"]))
    taus = [kendall_tau(*zip(*group, strict=True)) for group in groups.values() if len(group) >= 3]
    return [tau for tau in taus if tau is not None]


def _recomputes_nothing(settings: Cell) -> bool:
    return "recomputation" in settings and "(" not in settings["recomputation"]


def _speed(cells: list[Cell]) -> str:
    rows, subjects = [], [tuple(cell["settings"][key] for key in ("model", "data", "memory")) for cell in cells]
    for subject in dict.fromkeys(subjects):
        of = [cell for cell, each in zip(cells, subjects, strict=True) if each == subject]
        medians = [
            middle([c["seconds"] for c in of if c["state"] == state and c["exit_code"] == 0])
            for state in ("start", "cold", "cached")
        ]
        start, cold, _ = medians
        apart = None if start is None or cold is None else cold - start
        repeats = len({c["repeat"] for c in of})
        rows.append([*subject, *(number(each, 1) for each in (*medians, apart)), repeats])
    header = (
        "model", "data", "budget", "start-up (s)", "first plan (s)", "second plan (s)", "first without start-up (s)",
        "repetitions",
    )  # fmt: skip
    intro = "**Time of planning itself**, whole commands: with nothing measured before, and asked again."
    return f"{intro}\n\n{markdown(header, rows)}"
