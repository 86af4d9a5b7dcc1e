"""Claim: training steps wait at most 3 % of the time for photos.

Networks train on a folder of photos, which are decoded in the first epoch and read from disk after it. The seconds are
those of the record in which steps waited for their images, and of all training steps.
"""

from __future__ import annotations

from benchmarks.common import DEFAULTS, Cell, Options, program
from benchmarks.store import ResultFile, finish, markdown, number, percent, succeeded

TARGET = 0.03
RUNS = ("mobilenet_v2:96:300MB", "mobilenet_v2:224:600MB")

app = program("photos")


@app.default
def main(
    *,
    folder: str,
    runs: tuple[str, ...] = RUNS,
    max_train: int = 160,
    max_val: int = 60,
    epochs: int = 3,
    options: Options = DEFAULTS,
) -> None:
    """Train on photos, with decoding of every epoch for comparison.

    For example: python -m benchmarks.photos --folder flower_photos --threads 2

    Args:
        folder: photos in folders by class, below --data-dir or SNUGFIT_DATA.
        runs: models, sides in pixels and memory budgets.
        max_train: training images.
        max_val: validation (and test) images.
        epochs: epochs.
        options: what every benchmark takes.
    """
    results = ResultFile("photos", options)
    for each in runs:
        model, side, memory = each.split(":")
        for storage in (None, "1MB"):  # a storage budget of 1 MB leaves no room for pixels
            settings = {
                "data": f"folder:{folder}", "model": model, "image_size": int(side), "memory": memory,
                "strategy": "backprop", "batch_size": 32, "epochs": epochs, "max_train": max_train,
                "max_val": max_val, "storage": storage, "threads": options.threads,
            }  # fmt: skip
            results.train(settings, arm="photos")
    finish(results, render)


def render(cells: list[Cell]) -> str:
    """One row per run."""
    header = (
        "model",
        "pixels",
        "photos are decoded",
        "training (s)",
        "waiting for photos (s)",
        "share",
        "pixels on disk (MB)",
    )
    rows = []
    for cell in succeeded([cell for cell in cells if cell["arm"] == "photos"]):
        measured, settings = cell["record"]["measured"], cell["settings"]
        every = "in every epoch" if settings["storage"] else "once"
        seconds = (cell["training_seconds"], measured["data_seconds"])
        share = percent(seconds[1] / seconds[0])
        kept = number(measured["decoded_bytes"] / 1e6, 1)
        rows.append(
            [settings["model"], str(settings["image_size"]), every, *(number(s, 1) for s in seconds), share, kept]
        )
    return f"{markdown(header, rows)}\n\n- target: at most {percent(TARGET)}"


if __name__ == "__main__":
    app()
