"""Made-up cells of result files."""

from __future__ import annotations

from typing import Any


def finished(arm: str, seconds: float, *, memory: str = "100MB", **settings: Any) -> dict[str, Any]:
    """A run that predicted 100 MB and measured 90 MB in its one block."""
    phase = {
        "name": "block 1: a",
        "units": ["a"],
        "batch_size": 8,
        "predicted_peak_bytes": 100_000_000,
        "measured_peak_bytes": 90_000_000,
    }
    record = {
        "budget": {"memory_bytes": 100_000_000},
        "predicted": {"peak_bytes": 100_000_000},
        "measured": {"peak_bytes": 90_000_000, "storage_bytes": 5_000_000},
        "accuracy": {"val": 0.6, "test": 0.5},
        "parameters": {"full": 1000, "trained_model": 100},
        "exit": {"unit": "a", "index": 0, "of": 4},
        "exits": [{"unit": "a", "parameters": 100, "val_accuracy": 0.6}],
        "settings": {},
        "phases": [phase],
        "overhead_seconds": {"profiling": 3.0},
        "lines": {"unit:a": {"fixed_bytes": 10e6, "sample_bytes": 1e6, "residual_bytes": 0.0, "sample_seconds": 0.1}},
    }
    return {
        "arm": arm,
        "variant": arm,
        "named": False,
        "settings": _settings(arm, memory, settings),
        "command": f"snugfit train {arm} {memory} {settings}",
        "repeat": 0,
        "commit": "abc",
        "exit_code": 0,
        "seconds": seconds,
        "training_seconds": seconds / 2,
        "record": record,
    }


def infeasible(arm: str, *, memory: str = "50MB", smallest: str = "90.0 MB") -> dict[str, Any]:
    """A run that exits 3 and names the smallest budget."""
    message = f"vgg8 does not fit. Smallest budget that would do: {smallest}."
    cell = {**finished(arm, 1.0, memory=memory), "exit_code": 3, "error": {"code": 3, "message": message}}
    del cell["record"], cell["training_seconds"]
    return cell


def _settings(arm: str, memory: str, more: dict[str, Any]) -> dict[str, Any]:
    common = {"model": "vgg8", "data": "digits", "max_train": 64, "epochs": 1, "seed": 0, "batch_size": 128}
    return {**common, "strategy": arm, "local_loss": "aan", "memory": memory, **more}
