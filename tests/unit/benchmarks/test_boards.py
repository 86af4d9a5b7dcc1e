"""Training in memory control groups: the table, and a group whose limit the kernel enforces."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bench_cells import finished
from benchmarks import boards


def in_group(**more: object) -> dict:
    cell = finished("backprop", 12.0)
    cell["record"]["strategy"] = "backprop"
    totals = {"budget": 400, "predicted": 390, "measured": 380}
    for part, count in totals.items():
        cell["record"][part]["total_memory_bytes"] = count * 10**6
    return {**cell, "limit": 512, "workload": "w", "group_peak_bytes": 500_000_000, "kills": 0, "exit_code": 0, **more}


def test_the_table_has_what_rests_and_what_the_kernel_counted() -> None:
    refused = {"limit": 256, "workload": "w", "exit_code": 3, "error": {"message": "too small"}, "seconds": 1.0}
    text = boards.render([in_group(), {**refused, "group_peak_bytes": 200_000_000, "kills": 0}])
    first, second = text.splitlines()[2:]
    assert "| 300.0 | 400.0 / 390.0 / 380.0 | 500.0 | 0 | 50.0 % |" in first
    assert "| 256 MB | w | 3 | too small |" in second


def test_a_process_in_a_group_is_killed_above_the_limit() -> None:
    try:
        with boards.control_group(100 * 10**6) as group:
            take = "b = bytearray(200 * 10**6)"
            enter = f"import os; open('{group.folder}/cgroup.procs', 'w').write(str(os.getpid())); "
            assert subprocess.run([sys.executable, "-c", enter + "b = bytearray(10**6)"], check=False).returncode == 0
            assert subprocess.run([sys.executable, "-c", enter + take], check=False).returncode == -9
            assert boards.counts(group.folder / boards._events(group))["oom_kill"] == 1
    except (OSError, StopIteration) as error:
        pytest.skip(f"no control group can be made here: {error}")
    assert not group.folder.exists()
