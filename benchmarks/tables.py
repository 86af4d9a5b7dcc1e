"""Write the tables of docs/benchmarks/ and docs/reliability.md from the result files, and nothing else there.

A claim's text stands in its page; ``<!-- tables: CLAIM -->`` and ``<!-- end: CLAIM -->`` enclose what is written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import (
    ablations,
    accuracy,
    boards,
    budget_truth,
    budgets,
    clusterfaults,
    coupling,
    elastic_tables,
    exits,
    floors,
    kept_maps,
    lls,
    memory,
    mutants,
    newcomer,
    optimizer_state,
    overhead,
    paging,
    peers_tables,
    photos,
    planner_tables,
    resumes,
    sidenet_tables,
    soak,
    speed_tables,
    tilecosts,
    tiled_tables,
    tilescaling,
)
from benchmarks.common import ROOT, Cell, program
from benchmarks.fuzz import tally
from benchmarks.store import RESULTS, load, note

RENDER: dict[str, Callable[[list[Cell]], str]] = {
    "budgets": budgets.render,
    "speed": speed_tables.render,
    "accuracy": accuracy.render,
    "ablations": ablations.render,
    "coupling": coupling.render,
    "exits": exits.render,
    "overhead": overhead.render,
    "photos": photos.render,
    "lls": lls.render,
    "memory": memory.render,
    "optimizer_state": optimizer_state.render,
    "kept_maps": kept_maps.render,
    "paging": paging.render,
    "elastic": elastic_tables.render,
    "sidenet": sidenet_tables.render,
    "tiled": tiled_tables.render,
    "tilecosts": tilecosts.render,
    "tilescaling": tilescaling.render,
    "planner": planner_tables.render,
    "peers": peers_tables.render,
    "boards": boards.render,
    "floors": floors.render,
}
RELIABILITY: dict[str, Callable[[list[Cell]], str]] = {
    "soak": soak.render,
    "resumes": resumes.render,
    "clusterfaults": clusterfaults.render,
    "budget_truth": budget_truth.render,
    "fuzz": tally.render,
    "mutants": mutants.render,
}
QUESTIONS = {
    "budgets": ("budgets", "planner", "overhead", "boards"),
    "smallest_memory": ("floors", "peers", "memory", "optimizer_state", "kept_maps", "paging"),
    "speed": ("speed", "photos"),
    "accuracy": ("accuracy", "ablations", "coupling", "exits", "lls"),
    "fine_tuning": ("elastic", "sidenet"),
    "tiles": ("tiled", "tilecosts", "tilescaling"),
}
"""Pages below docs/benchmarks/, and the claims on each."""
PAGES = {
    **{f"benchmarks/{page}.md": {claim: RENDER[claim] for claim in claims} for page, claims in QUESTIONS.items()},
    "adoption.md": {"newcomer": newcomer.render},
    "reliability.md": RELIABILITY,
}
_NAME = re.compile(r"(?P<claim>[a-z_]+)_(?P<hardware>[a-z0-9-]+)_(?P<date>\d{4}-\d\d-\d\d)")

app = program("tables")


@app.default
def main(*, docs: Path = ROOT / "docs", results: Path = RESULTS, check: bool = False) -> int:
    """Write every claim's tables into its page.

    Args:
        docs: folder of the pages.
        results: folder of result files; the newest of each claim and machine counts.
        check: write nothing, and exit 1 where a page is not up to date.
    """
    return max([_write(docs / name, claims, results, check=check) for name, claims in PAGES.items()])


def _write(page: Path, claims: Iterable[str], results: Path, *, check: bool) -> int:
    text = page.read_text()
    fresh, root = text, "../../" if page.parent.name == "benchmarks" else "../"
    for claim in claims:
        fresh = replace_section(fresh, claim, section(claim, results).replace("](../", f"]({root}"))
    if check:
        note(
            f"{page.name} is up to date"
            if fresh == text
            else f"{page.name} is out of date: python -m benchmarks.tables"
        )
        return int(fresh != text)
    page.write_text(fresh)
    return 0


def section(claim: str, results: Path) -> str:
    """The tables of a claim, machine after machine."""
    newest: dict[str, Path] = {}
    for path in sorted(results.glob(f"{claim}_*.json"), key=lambda path: path.stem.rpartition("_")[2]):
        found = _NAME.fullmatch(path.stem)
        if found is not None:
            newest[found["hardware"]] = path
    parts = [_file_part(claim, newest[hardware]) for hardware in sorted(newest)]
    return "\n\n".join(parts) or "No results yet."


def _file_part(claim: str, path: Path) -> str:
    data = load(path)
    machine, cells = data["machine"], data["cells"]
    commits = ", ".join(dict.fromkeys(cell["commit"] for cell in cells))
    commands = "\n".join(f"    {command}" for command in data["commands"])
    where = f"{machine['cores']} cores" if machine["device"] == "cpu" else machine["device"]
    caption = (
        f"{machine['hardware']} ({where}), {machine['system']}, Python {machine['python']}, torch {machine['torch']}, "
        f"snugfit {machine['snugfit']} at {commits}, {path.stem.rpartition('_')[2]}; "
        f"[{path.name}](../benchmarks/results/{path.name}):"
    )
    render = next(claims[claim] for claims in PAGES.values() if claim in claims)
    return f"{caption}\n\n{commands}\n\n{render(cells)}"


def replace_section(text: str, claim: str, body: str) -> str:
    """Put ``body`` between the markers of a claim.

    Raises:
        ValueError: the page lacks them.
    """
    start, end = f"<!-- tables: {claim} -->", f"<!-- end: {claim} -->"
    before, opened, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"the page has no '{start}' ... '{end}'.")
    return f"{before}{start}\n\n{body}\n\n{end}{after}"


if __name__ == "__main__":
    raise SystemExit(app())
