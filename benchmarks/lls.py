"""Claim: LLS and its variants reach the accuracies of the LLS paper's Tables 1 to 3; and which choices validate best.

The rows of the paper are data here, by table; ``choices`` are those that the paper leaves open. Every cell trains as
the paper says (batch 128, schedule-free AdamW at 0.005, appendix A.3) but for a tenth of the training images, which
are kept for validation, for VGG8's dropout of 0.2 in its long runs, and for the epochs and images that were asked for.
The accuracy of a local loss is that of the exit that validates best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program
from benchmarks.store import ResultFile, accuracy, finish, markdown, middle, number, percent, succeeded

TableName = Literal["choices", "table1", "table2", "table3"]


@dataclass(frozen=True)
class Row:
    """One accuracy of the paper, or one choice.

    Attributes:
        method: its name there.
        model, data: what is trained on what.
        flags: how, as settings of ``snugfit train``.
        paper: test accuracy in the paper, in percent.
        epochs: epochs in the paper.
    """

    method: str
    model: str
    data: str
    flags: tuple[tuple[str, str], ...]
    paper: float | None = None
    epochs: int = 100


def _local(loss: str) -> tuple[tuple[str, str], ...]:
    return (("strategy", "blockwise"), ("module_units", "1"), ("local_loss", loss))


BACKPROP = (("strategy", "backprop"),)


def _choices() -> list[Row]:
    pairs = [f"mode={mode},frequencies={rule}" for mode in ("published", "paper") for rule in ("published", "spread")]
    choices = [*pairs, "mode=published,frequencies=published,window=1"]
    return [Row(choice, "smallconv", "cifar10", _local(f"lls:{choice}")) for choice in choices]


def _table1() -> list[Row]:
    paper = {
        ("cosine", "smallconv"): (99.50, 89.57, 75.82, 78.03),
        ("square", "smallconv"): (99.50, 90.54, 77.79, 79.02),
        ("random", "smallconv"): (99.38, 87.30, 74.19, 71.70),
        ("cosine", "vgg8"): (99.52, 93.04, 86.92, 84.85),
        ("square", "vgg8"): (99.54, 93.54, 88.64, 85.62),
        ("random", "vgg8"): (99.70, 93.77, 90.45, 87.09),
    }
    sets = ("mnist", "fashion-mnist", "cifar10", "imagenette")
    return [
        Row(basis, model, data, _local(f"lls:basis={basis}"), value, _epochs(model, data))
        for (basis, model), values in paper.items()
        for data, value in zip(sets, values, strict=True)
    ]


def _table2() -> list[Row]:
    methods = {
        "BP": (BACKPROP, (99.62, 87.57, 62.25)),
        "DFA": ((("strategy", "feedback"), ("feedback_rule", "dfa")), (97.90, 71.53, 44.93)),
        "DRTP": ((("strategy", "feedback"), ("feedback_rule", "drtp")), (98.52, 68.96, None)),
        "PEPITA": ((("strategy", "feedback"), ("feedback_rule", "pepita")), (98.29, 56.33, 27.56)),
        "LLS": (_local("lls"), (99.57, 84.10, 55.32)),
    }
    return [
        Row(name, "smallconvl", data, flags, value)
        for name, (flags, values) in methods.items()
        for data, value in zip(("mnist", "cifar10", "cifar100"), values, strict=True)
    ]


def _table3() -> list[Row]:
    methods = {
        "BP": (BACKPROP, (94.12, 90.92, 73.69, 61.10, 88.49)),
        "Local Losses": (_local("linear"), (91.93, 88.06, 69.26, 54.00, 82.49)),
        "LLS": (_local("lls"), (88.64, 85.62, 58.84, 35.99, 81.91)),
        "LLS-M": (_local("lls-m"), (90.43, 86.60, 62.55, 41.89, 82.71)),
        "LLS-MxM": (_local("lls-mxm"), (90.89, 87.29, 68.81, 51.41, 83.66)),
    }
    sets = ("cifar10", "imagenette", "cifar100", "tiny-imagenet", "vww")
    models = ("vgg8", "vgg8", "vgg8", "vgg8", "mobilenet_v1")
    return [
        Row(name, model, data, flags, value, _epochs(model, data))
        for name, (flags, values) in methods.items()
        for data, model, value in zip(sets, models, values, strict=True)
    ]


def _epochs(model: str, data: str) -> int:
    """Epochs of the paper's runs (appendix A.3)."""
    if model == "mobilenet_v1":
        return 500
    return 300 if model == "vgg8" and data not in ("mnist", "fashion-mnist") else 100


TABLES: dict[str, list[Row]] = {
    "choices": _choices(), "table1": _table1(), "table2": _table2(), "table3": _table3(),
}  # fmt: skip

app = program("lls")


@app.default
def main(
    table: TableName = "table1",
    *,
    models: tuple[str, ...] = (),
    sets: tuple[str, ...] = (),
    methods: tuple[str, ...] = (),
    epochs: int | None = None,
    max_train: int | None = None,
    seeds: tuple[int, ...] = (0,),
    options: Options = DEFAULTS,
) -> None:
    """Train the rows of one of the paper's tables.

    For example: python -m benchmarks.lls table1 --models smallconv --sets cifar10 --epochs 20

    Args:
        table: choices, table1, table2 or table3.
        models: only rows of these models.
        sets: only rows of these data sets.
        methods: only rows of these methods.
        epochs: epochs; those of the paper by default.
        max_train: training images; all by default.
        seeds: seeds; the paper ran five.
        options: what every benchmark takes; its ``data`` is not used.
    """
    results = ResultFile("lls", options)
    rows = [
        row for row in TABLES[table]
        if (not models or row.model in models) and (not sets or row.data in sets)
        and (not methods or row.method in methods)
    ]  # fmt: skip
    for seed in seeds:
        for row in rows:
            settings = settings_of(row, options, epochs=epochs or row.epochs, max_train=max_train, seed=seed)
            results.train(settings, arm=table, method=row.method)
    finish(results, render)


def settings_of(row: Row, options: Options, *, epochs: int, max_train: int | None, seed: int) -> Settings:
    """Flags of a row's run: the paper's data augmentation and optimizer (appendix A.3)."""
    small = row.model.startswith("smallconv")
    light = small and row.data.startswith("cifar")
    return options.settings(
        model=row.model, epochs=epochs, max_train=max_train, seed=seed, optimizer="schedulefree", exit_tolerance=0,
        crop=not light, erase=None if small or "mnist" in row.data else 0.2, **dict(row.flags),
    ) | {"data": row.data}  # fmt: skip


def render(cells: list[Cell]) -> str:
    """One part per table that was run."""
    parts = []
    for table, rows in TABLES.items():
        of_table = [cell for cell in succeeded(cells) if cell["arm"] == table]
        if of_table:
            shown = _choices_rows(of_table) if table == "choices" else _table_rows(rows, of_table)
            parts.append(f"**{table}**\n\n{shown}")
    return "\n\n".join(parts) or "no finished run"


def _choices_rows(cells: list[Cell]) -> str:
    """Validation accuracies alone: what is chosen here must not have seen the test images."""
    keys = ("epochs", "max_train", "seed")
    rows = [
        (
            cell["method"],
            *(cell["settings"]["max_train"] or "all" if key == "max_train" else cell["settings"][key] for key in keys),
            percent(cell["record"]["exits"][-1]["val_accuracy"], 2), percent(cell["record"]["accuracy"]["val"], 2),
        )
        for cell in cells
    ]  # fmt: skip
    header = ("lls options", "epochs", "images", "seed", "validation, whole network", "validation, best exit")
    return markdown(header, rows)


def _table_rows(rows: list[Row], cells: list[Cell]) -> str:
    groups: dict[tuple[str, str, str, int, int | None], list[Cell]] = {}
    for cell in cells:
        settings = cell["settings"]
        key = (cell["method"], settings["model"], settings["data"], settings["epochs"], settings["max_train"])
        groups.setdefault(key, []).append(cell)
    lines = [_line(rows, *key, found) for key, found in groups.items()]
    header = ("method", "model", "data", "epochs", "images", "seeds", "test accuracy", "paper", "paper's epochs",
              "difference (points)")  # fmt: skip
    return markdown(header, lines)


def _line(
    rows: list[Row], method: str, model: str, data: str, epochs: int, images: int | None, cells: list[Cell]
) -> list[str]:
    row = next(row for row in rows if (row.method, row.model, row.data) == (method, model, data))
    found = middle(accuracy(cell) for cell in cells)
    paper = row.paper
    gap = None if found is None or paper is None else 100 * found - paper
    shown = [method, model, data, epochs, images or "all", len(cells), percent(found, 2)]
    return [*map(str, shown), "-" if paper is None else f"{paper} %", str(row.epochs), number(gap)]


if __name__ == "__main__":
    app()
