"""The smallest budgets of exact training: plain, with recomputation, and with activations on disk, too."""

from __future__ import annotations

from benchmarks.budgets import measure
from benchmarks.common import DEFAULTS, Cell, Options, program, smallest_named
from benchmarks.store import ResultFile, finish, markdown, mb, number, succeeded

ARMS = (("backprop", "exact"), ("checkpoint", "exact"), ("checkpoint", "paged"))

app = program("paging")


@app.default
def main(
    *,
    models: tuple[str, ...] = ("mobilenet_v2", "resnet18"),
    image_size: int | None = 224,
    max_train: int = 16,
    max_val: int = 8,
    options: Options = DEFAULTS,
) -> None:
    """Train at the smallest budget that the error of a far smaller budget names.

    For example: python -m benchmarks.paging --batch-size 8 --threads 1

    Args:
        models: models to train.
        image_size: side of the images; the data set's own by default.
        max_train: training images.
        max_val: validation (and test) images.
        options: what every benchmark takes.
    """
    results = ResultFile("paging", options)
    for model in models:
        for strategy, activations in ARMS:
            settings = options.settings(
                model=model, image_size=image_size, strategy=strategy, activations=activations, memory="30MB",
                optimizer_state="float32", max_train=max_train, max_val=max_val, epochs=1,
            )  # fmt: skip
            measure(settings, results)
    finish(results, render)


def render(cells: list[Cell]) -> str:
    """A row per network and kind of activations."""
    header = (
        "model", "pixels", "strategy", "activations", "smallest budget (MB)", "predicted (MB)", "measured (MB)",
        "images at once", "on disk, predicted (MB)", "measured (MB)", "seconds of an image",
    )  # fmt: skip
    named = {_arm(cell): smallest_named(cell) for cell in cells if not cell.get("named")}
    trained = {_arm(cell): cell for cell in succeeded(cells) if cell.get("named")}
    return markdown(header, [_row(arm, smallest, trained.get(arm)) for arm, smallest in named.items()])


def _arm(cell: Cell) -> tuple[str, ...]:
    settings = cell["settings"]
    return tuple(str(settings.get(name, "-")) for name in ("model", "image_size", "strategy", "activations"))


def _row(arm: tuple[str, ...], smallest: int | None, cell: Cell | None) -> list[str]:
    if cell is None:
        return [*arm, mb(smallest), "failed", *["-"] * 5]
    record = cell["record"]
    predicted, measured, phase = record["predicted"], record["measured"], record["phases"][0]
    return [
        *arm,
        mb(smallest),
        mb(predicted["peak_bytes"]),
        mb(measured["peak_bytes"]),
        str(phase["batch_size"]),
        mb(predicted["storage_bytes"]),
        mb(measured["storage_bytes"]),
        number(phase["seconds"] / cell["settings"]["max_train"]),
    ]


if __name__ == "__main__":
    app()
