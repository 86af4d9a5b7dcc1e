"""Runs whose activations are on disk: the same weights as in memory, a full disk, and what stays behind."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

import snugfit
from snugfit._api.planning import RunnablePlan
from snugfit._core.registry import find_config
from snugfit._training.events import EpochDone, Event
from snugfit.errors import InterruptedRunError, OutOfStorageError
from snugfit.profiling import unit_stats
from snugfit.strategies.recomputation.dynamic_program import paged_bytes
from snugfit.strategies.recomputation.paging import Paging
from snugfit.strategies.recomputation.schedule import Schedule
from snugfit.strategies.recomputation.unit_costs import unit_costs

SMALL = {"image_size": 16, "max_train": 96, "max_val": 40, "batch_size": 16, "epochs": 2}


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny networks have names."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "conformance")


def paging_plan(text: str, **options: object) -> RunnablePlan:
    """A plan that follows this schedule, whatever the budget."""
    planned = snugfit.plan("tiny_nets:cnn", "digits", strategy="checkpoint", activations="paged", **SMALL, **options)
    chain, schedule = planned.assembly.chain, Schedule.parse(text)
    moved = paged_bytes(schedule, unit_costs(chain, unit_stats(chain), 16, paging=Paging(1e9))) // 16
    choice = planned.plan.choice
    assert choice is not None and choice.predicted is not None and planned.plan.chosen == 0
    settings = {**choice.settings, "recomputation": text, "paged_bytes": moved}
    forced = replace(choice, settings=settings, predicted=replace(choice.predicted, storage_bytes=16 * moved))
    return replace(planned, plan=replace(planned.plan, candidates=(forced,)))


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def stop(event: Event) -> None:
    if isinstance(event, EpochDone):
        raise KeyboardInterrupt


@pytest.fixture
def exact(tmp_path: Path) -> bytes:
    """The weights that plain backpropagation trains."""
    snugfit.plan("tiny_nets:cnn", "digits", strategy="backprop", **SMALL).run((), out=tmp_path / "exact")
    return weights(tmp_path / "exact")


def test_a_paged_run_ends_in_the_same_weights(tmp_path: Path, exact: bytes) -> None:
    cache = tmp_path / "cache"
    record = paging_plan("[0-1 (2)] 3-4", cache_dir=str(cache)).run((), out=tmp_path / "run")
    assert weights(tmp_path / "run") == exact
    assert 0 < record.measured["storage_bytes"] <= record.predicted["storage_bytes"]
    assert not [path for path in cache.rglob("*") if path.is_file()], "nothing stays behind"


def test_a_run_on_a_full_disk_goes_on(tmp_path: Path, exact: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run, planned = tmp_path / "run", paging_plan("[0-2] 3-4")
    with monkeypatch.context() as disk, pytest.raises(OutOfStorageError, match="no space left") as caught:
        disk.setattr(os, "posix_fallocate", full)
        planned.run((), out=run)
    assert caught.value.exit_code == 6
    snugfit.resume(run, ())
    assert weights(run) == exact


def test_a_storage_budget_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutOfStorageError, match=r"storage budget has 0 MB.*--activations exact"):
        paging_plan("[0-3] 4", storage="100kB").run((), out=tmp_path / "run")


def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path: Path, exact: bytes) -> None:
    run = tmp_path / "run"
    with pytest.raises((InterruptedRunError, KeyboardInterrupt)):
        paging_plan("[0-3] 4").run((stop,), out=run)
    snugfit.resume(run, ())
    assert weights(run) == exact


def test_a_plan_says_what_goes_to_disk() -> None:
    planned = paging_plan("[0-1 (2)] 3-4")
    settings = planned.plan.candidates[0].settings
    said = list(find_config("checkpoint").explanation({**settings, "micro_batch": 16, "micro_batches": 2}, ()))
    assert len(said) == 1 and re.search(r"Each micro-batch writes up to [\d.]+ kB of activations to disk", said[0])
    assert not list(find_config("checkpoint").explanation({**settings, "paged_bytes": 0}, ()))


def test_a_strategy_without_paging_refuses_it() -> None:
    with pytest.raises(
        snugfit.errors.UsageError, match="blockwise does not support --activations paged; use checkpoint, or"
    ):
        snugfit.plan("tiny_nets:cnn", "digits", strategy="blockwise", activations="paged", **SMALL)
