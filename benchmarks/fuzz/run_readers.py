"""Readers of what snugfit writes itself: run folders, caches, kept measurements; and of files that options name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import snugfit
from snugfit._chain.store import UnitStore
from snugfit._cli.app import read_config
from snugfit._cli.launch import read_hosts
from snugfit._core.documents import read_data as read_file
from snugfit._core.hardware import Hardware, read_cluster
from snugfit._core.option_groups import MachineOptions
from snugfit._core.plan import Plan
from snugfit._core.profile import Profile
from snugfit._core.request import Request
from snugfit._core.serial import to_data
from snugfit._engine.history import _runs_file, past_runs
from snugfit._engine.loading import Architecture
from snugfit._report.metrics import read_metrics
from snugfit._report.run_page import render
from snugfit._storage.activation_cache import ActivationCache
from snugfit._storage.checkpoint import CheckpointStore
from snugfit._storage.digests import Digester
from snugfit._storage.manifest import MANIFEST_FILE, Manifest, _Content, _digest
from snugfit._storage.run_folder import read_data, read_record
from snugfit._storage.tensor_file import read_tensors
from snugfit.errors import SnugfitError
from snugfit.profiling.measurement_cache import Measurement

_UNITS = 3


def each(*reads: Callable[[], object]) -> None:
    """Read everything, and then raise the first refusal, so that none hides what comes after it."""
    refused = []
    for read in reads:
        try:
            read()
        except SnugfitError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _list(root: Path) -> None:
    """A manifest that takes every file as it is, or it would refuse all damage before it is read."""
    manifest, anything = Manifest(root), Digester().digest(grows=True)
    manifest.announce(dict.fromkeys(manifest.unlisted(), anything))


def _run(root: Path) -> None:
    _list(root)
    store = UnitStore(root / "weights")
    each(
        lambda: Architecture.read(root).chain(),
        lambda: read_data(Request, root / "request.json").to_json(),
        lambda: read_data(Plan, root / "plan.json").to_json(),
        lambda: read_data(Profile, root / "profile.json"),
        lambda: read_record(root).to_json(),
        lambda: read_metrics(root / "metrics.csv"),
        lambda: _checkpoint(root / "checkpoint"),
        lambda: snugfit.load(root)(torch.zeros(1, 1, 8, 8)),
        *(lambda index=index: store.load(index) for index in range(_UNITS)),  # type: ignore[misc]
    )


def _report(root: Path) -> None:
    _list(root)
    render(read_record(root), read_metrics(root / "metrics.csv"))


def _manifest(root: Path) -> None:
    """As it is, and signed anew: its own digest would refuse all that follows."""
    each(lambda: snugfit.verify(root), lambda: _sign(root / MANIFEST_FILE), lambda: snugfit.verify(root))


def _sign(path: Path) -> None:
    content = read_file(_Content, path)
    path.write_text(json.dumps(to_data(replace(content, digest=_digest(content.files)))), encoding="utf-8")


def _checkpoint(folder: Path) -> None:
    latest = CheckpointStore(folder).latest()
    if latest is not None:
        each(*(lambda group=group: latest.load(group) for group in latest.groups))  # type: ignore[misc]


def _cache(root: Path) -> None:
    cache = ActivationCache.open(root, "block-1")
    if cache is not None:
        count = min(cache.rows, 32)
        rows = cache.read(np.arange(count))
        assert rows.shape == (count, *cache.format.row_shape), rows.shape
        assert len(cache.labels) == cache.rows


def _kept(root: Path) -> None:
    hardware, path = Hardware("cpu", "a processor", 2, 10**9, "Linux", "2.13", True), root / "runs.jsonl"
    if path.exists():
        path.rename(_runs_file(root, hardware))
    each(
        lambda: read_file(Measurement, root / "measurement.json").serves(1e9, from_disk=True),
        lambda: past_runs(MachineOptions(profile_cache=str(root)), hardware),
    )


READERS: dict[str, Callable[[Path], object]] = {
    "run": _run,
    "report": _report,
    "manifest": _manifest,
    "cache": _cache,
    "tensors": lambda root: read_tensors(root / "group.safetensors"),
    "kept": _kept,
    "config": lambda root: read_config(str(root / "config.yaml")),
    "hosts": lambda root: read_hosts(str(root / "hosts.yaml")),
    "cluster": lambda root: read_cluster(str(root / "cluster.json")),
}
