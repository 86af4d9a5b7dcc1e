"""What each part of blockwise training contributes: auxiliary networks, batch per block, residency, and rho.

The variants are those of the NeuroFlux paper: classic local learning, each of its two ideas alone, both together, and
the grouping threshold from 10 to 70 %. The tables give each run's time and memory, and every unit's memory and largest
batch by auxiliary network (Figures 4 to 6).
"""

from __future__ import annotations

from benchmarks.common import DEFAULTS, Cell, Options, Settings, alternate, program, smallest_named
from benchmarks.store import ResultFile, finish, markdown, mb, middle, number, succeeded

FIXED: Settings = {"adaptive_batch": False, "residency": "all"}
VARIANTS: dict[str, Settings] = {
    "classic LL": {"local_loss": "classic", **FIXED},
    "adaptive auxiliary networks only": {"local_loss": "aan", **FIXED},
    "adaptive batch only": {"local_loss": "classic"},
    "both (blockwise)": {"local_loss": "aan"},
    "linear auxiliaries": {"local_loss": "linear"},
    "both, one batch size": {"local_loss": "aan", "adaptive_batch": False},
    "both, saturation stop": {"local_loss": "aan", "saturation_stop": True},
    **{f"rho {percent} %": {"local_loss": "aan", "rho": percent / 100} for percent in range(10, 80, 10)},
}
EXAMPLE_BATCH = 30
"""Batch size of the paper's Figure 5."""

app = program("ablations")


@app.default
def main(
    *,
    model: str = "vgg16",
    budgets: tuple[int, ...] = (150, 300),
    variants: tuple[str, ...] = tuple(VARIANTS),
    max_train: int | None = 2560,
    max_val: int | None = 1000,
    epochs: int = 3,
    seeds: tuple[int, ...] = (0,),
    options: Options = DEFAULTS,
) -> None:
    """Train variants of blockwise that each lack or change one part.

    For example: python -m benchmarks.ablations --budgets 200 --variants "classic LL" "both (blockwise)" --seeds 0 1 2

    Args:
        model: model to train.
        budgets: memory budgets in MB.
        variants: names of the variants.
        max_train: training images.
        max_val: validation (and test) images.
        epochs: epochs.
        seeds: seeds; tables give medians over them.
        options: what every benchmark takes.
    """
    results = ResultFile("ablations", options)
    shared = options.settings(
        model=model, strategy="blockwise", module_units="1", max_train=max_train, max_val=max_val, epochs=epochs
    )
    cells = [(budget, variant) for budget in budgets for variant in variants]
    for index, (budget, variant) in alternate(cells, len(seeds)):
        settings = {**shared, "seed": seeds[index], "memory": f"{budget}MB", **VARIANTS[variant]}
        results.train(settings, variant=variant)
    finish(results, render)


def render(cells: list[Cell]) -> str:
    """Per model and budget: a row per variant; then every unit's memory."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["settings"]["model"], cell["settings"]["memory"]), []).append(cell)
    parts = [_group_part(model, memory, group) for (model, memory), group in groups.items()]
    return "\n\n".join([*parts, *(_unit_part(model, memory, group) for (model, memory), group in groups.items())])


def _group_part(model: str, memory: str, cells: list[Cell]) -> str:
    settings = cells[0]["settings"]
    seeds = len({cell["settings"]["seed"] for cell in cells})
    title = (
        f"**{model}** at {memory}, {settings['data']}, {settings['max_train'] or 'all'} training images, "
        f"epochs: {settings['epochs']}, seeds: {seeds}"
    )
    header = ("variant", "batch per block", "seconds", "training s/epoch", "peak (MB)", "cache (MB)")
    names = [name for name in VARIANTS if any(cell["variant"] == name for cell in cells)]
    return f"{title}\n\n" + markdown(header, [_row(name, [c for c in cells if c["variant"] == name]) for name in names])


def _row(variant: str, cells: list[Cell]) -> list[str]:
    done = succeeded(cells)
    if not done:
        smallest = smallest_named(cells[-1])
        reason = f"needs {mb(smallest)} MB" if smallest else f"failed, exit {cells[-1]['exit_code']}"
        return [variant, reason, *["-"] * 4]
    records = [cell["record"] for cell in done]
    return [
        variant,
        ", ".join(str(phase["batch_size"]) for phase in records[-1]["phases"] if phase["units"]),
        number(middle(cell["seconds"] for cell in done), 1),
        number(middle(cell["training_seconds"] / cell["settings"]["epochs"] for cell in done), 1),
        mb(max(record["measured"]["peak_bytes"] for record in records)),
        mb(middle(record["measured"]["storage_bytes"] for record in records)),
    ]


def _unit_part(model: str, memory: str, cells: list[Cell]) -> str:
    """Memory of each unit at batch 30 and its largest batch, as profiled, per auxiliary network."""
    lines = {cell["settings"]["local_loss"]: unit_lines(cell) for cell in succeeded(cells)}
    if not lines:
        return ""
    budget, limit = float(memory.removesuffix("MB")) * 1e6, cells[0]["settings"]["batch_size"]
    units = list(dict.fromkeys(unit for each in lines.values() for unit in each))
    header = [
        "unit",
        *(f"{loss}: {what}" for loss in lines for what in (f"MB at batch {EXAMPLE_BATCH}", "largest batch")),
    ]
    rows = [
        [unit, *(text for each in lines.values() for text in _unit_cells(each.get(unit), budget))] for unit in units
    ]
    title = f"Units of **{model}** in {memory}, as profiled (batches beyond the limit of {limit} are not used):"
    return f"{title}\n\n{markdown(header, rows)}"


def unit_lines(cell: Cell) -> dict[str, tuple[float, float]]:
    """Fixed bytes and bytes per image of every unit that was measured, by its name."""
    return {
        name.removeprefix("unit:"): (line["fixed_bytes"] + line["residual_bytes"], line["sample_bytes"])
        for name, line in cell["record"]["lines"].items()
    }


def _unit_cells(line: tuple[float, float] | None, budget: float) -> list[str]:
    if line is None:
        return ["-", "-"]
    fixed, sample = line
    return [mb(fixed + EXAMPLE_BATCH * sample), str(max(int((budget - fixed) / sample), 0)) if sample else "-"]


if __name__ == "__main__":
    app()
