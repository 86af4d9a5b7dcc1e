"""A budget of all processes holds, watched from outside; and in a real control group nothing is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import start

from snugfit._core.machine_memory import counts
from snugfit.errors import InfeasibleBudgetError

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_DATA")
pytestmark = linux
MB = 10**6
CONTROL_GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
OUTSIDE = 4 * MB
"""Most difference between what is seen from outside at intervals, also before and after training, and the record."""
RUN = [
    "--model", "smallconv", "--image-size", "16", "--data", "digits", "--batch-size", "32", "--strategy", "backprop",
    "--max-train", "256", "--max-val", "32", "--threads", "1", "--no-report", "--json", "--quiet",
]  # fmt: skip


def private_bytes(root: int) -> int:
    """Private memory of a process and all below it, as the kernel counts what is written to."""
    found = 0
    with contextlib.suppress(psutil.Error):
        tree = psutil.Process(root)
        for process in (tree, *tree.children(recursive=True)):
            found += counts(Path(f"/proc/{process.pid}/smaps_rollup")).get("Private_Dirty:", 0) * 1024
    return found


def watched(*flags: str, **options: Any) -> tuple[int, dict[str, Any], int]:
    """Exit code, output, and the largest sum over all processes that was seen from outside."""
    highest = 0
    with start("train", *flags, **options) as process:
        while process.poll() is None:
            highest = max(highest, private_bytes(process.pid))
            time.sleep(0.03)
        out, said = process.communicate()
    assert out, said
    return process.returncode, json.loads(out), highest


@pytest.mark.slow
def test_the_sum_over_all_processes_stays_within_the_smallest_total(tmp_path):
    """The total that an error names is enough, three MB less is not, and neither is ever exceeded."""
    code, refused, _ = watched(*RUN, "--epochs", "1", "--total-memory", "150MB", "--out", str(tmp_path / "refused"))
    assert code == InfeasibleBudgetError.exit_code
    message = refused["error"]["message"]
    assert "does not fit a budget of 150.0 MB of memory in all; its processes rest at" in message
    named = float(message.rpartition("--total-memory that would do: ")[2].removesuffix(" MB."))
    less = [*RUN, "--epochs", "1", "--total-memory", f"{named - 3:g}MB", "--out", str(tmp_path / "less")]
    code, refused, _ = watched(*less)
    assert code == InfeasibleBudgetError.exit_code
    assert refused["error"]["message"].endswith(f"--total-memory that would do: {named:.1f} MB.")
    code, record, seen = watched(
        *RUN, "--epochs", "1", "--total-memory", f"{named:g}MB", "--out", str(tmp_path / "run")
    )
    assert code == 0, record
    measured, total = record["measured"]["total_memory_bytes"], record["budget"]["total_memory_bytes"]
    assert record["enforced"] and total == named * MB
    assert 0.8 * total < seen <= total and abs(seen - measured) < OUTSIDE, (seen, measured, total)
    assert measured <= record["predicted"]["total_memory_bytes"] <= total
    assert record["measured"]["peak_bytes"] <= record["predicted"]["peak_bytes"] <= record["budget"]["memory_bytes"]


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A memory control group with a limit below this process's own; skipped where none can be made."""
    listed = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().split()}
    version_1 = "memory" in listed
    parent = CONTROL_GROUPS[version_1] / listed.get("memory", listed.get("", "/")).lstrip("/")
    folder = parent / f"snugfit-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made in {parent}: {error.strerror}")
    try:
        name = "memory.limit_in_bytes" if version_1 else "memory.max"
        try:
            (folder / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"{folder / name} cannot be written: {error.strerror}")
        yield folder
    finally:
        folder.rmdir()


def test_auto_stays_within_the_control_group_and_nothing_is_killed(tmp_path):
    limit = 600 * MB
    with control_group(limit) as group:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        code, record, seen = watched(
            *RUN, "--epochs", "1", "--total-memory", "auto", "--out", str(tmp_path / "run"), preexec_fn=enter
        )
        assert code == 0, record
        plan = json.loads((tmp_path / "run" / "plan.json").read_text())
        total = record["budget"]["total_memory_bytes"]
        assert seen <= total < limit and abs(seen - record["measured"]["total_memory_bytes"]) < OUTSIDE
        assert total > limit / 2 and plan["memory"]["machine"]["group_bytes"] <= limit
        assert counts(group / "memory.oom_control").get("oom_kill", 0) == 0
        assert counts(group / "memory.events").get("oom_kill", 0) == 0


@pytest.mark.slow
def test_a_resumed_run_keeps_the_total_of_its_plan(tmp_path):
    folder = tmp_path / "run"
    process = start("train", *RUN, "--epochs", "15", "--total-memory", "450MB", "--out", str(folder))
    while process.poll() is None and not list(folder.glob("checkpoint/*")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    code, record, seen = watched("--resume", str(folder), "--json", "--quiet")
    assert code == 0
    assert record["budget"]["total_memory_bytes"] == 450 * MB
    assert seen <= 450 * MB and abs(seen - record["measured"]["total_memory_bytes"]) < OUTSIDE
    assert record["measured"]["total_memory_bytes"] <= record["predicted"]["total_memory_bytes"] <= 450 * MB
