"""The rows that runs leave: one file per machine in benchmarks/results, sorted, so that git merges what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, slug
from benchmarks.queue.rungs import Row
from benchmarks.store import locked
from snugfit._storage.files import write_json_atomic

CLAIM = "experiments"


def read_rows(folder: Path) -> dict[str, Row]:
    """Rows of every machine, by key; of several for one run the last in order of file names counts."""
    found: dict[str, Row] = {}
    for path in sorted(folder.glob(f"{CLAIM}_*.json")):
        found.update((row["key"], row) for row in json.loads(path.read_text())["rows"])
    return found


class Rows:
    """This machine's file."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.machine = describe_machine(device)
        self.folder, self.path = folder, folder / f"{CLAIM}_{slug(self.machine)}.json"

    def keep(self, row: Row) -> None:
        """Put a row into the file, in place of an older one of the same run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            data: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {"rows": []}
            rows = [each for each in data["rows"] if each["key"] != row["key"]] + [row]
            rows.sort(key=lambda each: (each["experiment"], each["arm"], each["rung"], each["key"]))
            write_json_atomic(self.path, {"claim": CLAIM, "machine": self.machine, "rows": rows})
