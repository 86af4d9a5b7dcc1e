"""Good files of what snugfit writes itself: a tiny run's folder, caches, measurements; and files that options name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import ROOT
from snugfit._storage.activation_cache import CacheWriter
from snugfit._storage.manifest import Manifest
from snugfit._storage.tensor_file import write_tensors

_TRAIN = (
    "train --model benchmarks.fuzz.tiny:net --data digits --image-size 8 --max-train 32 --max-val 16 --epochs 1 "
    "--batch-size 16 --strategy blockwise --module-units 1 --local-loss classic --memory 200MB --out runs/tiny"
)
_LEFT_OUT = ("report.html", "*.tmp", "lock", "manifest.json", "events*")


def _trained(folder: Path) -> None:
    """Train once below a folder: ``runs/tiny``, and ``cache/snugfit/profiles`` with what was kept."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-m", "snugfit", *_TRAIN.split()], cwd=folder, env=env, check=True)


def _run(root: Path, trained: Path) -> None:
    shutil.copytree(trained / "runs" / "tiny", root, ignore=shutil.ignore_patterns(*_LEFT_OUT))


def _report(root: Path, trained: Path) -> None:
    root.mkdir(parents=True)
    for name in ("record.json", "metrics.csv"):
        shutil.copy(trained / "runs" / "tiny" / name, root)


def _manifest(root: Path, trained: Path) -> None:
    root.mkdir(parents=True)
    for name in ("request.json", "architecture.json", "metrics.csv"):
        shutil.copy(trained / "runs" / "tiny" / name, root)
    Manifest.of(root)


def _kept(root: Path, trained: Path) -> None:
    root.mkdir(parents=True)
    kept = trained / "cache" / "snugfit" / "profiles"
    largest = max(kept.glob("*.json"), key=lambda path: path.stat().st_size)
    shutil.copy(largest, root / "measurement.json")
    shutil.copy(next(kept.glob("runs-*.jsonl")), root / "runs.jsonl")


def _cache(root: Path, trained: Path) -> None:
    with CacheWriter(root, "block-1", 6, (2, 3, 3), dtype="float16") as writer:
        writer.write(torch.linspace(-1, 1, 108).view(6, 2, 3, 3), torch.arange(6))
        writer.close()


def _tensors(root: Path, trained: Path) -> None:
    root.mkdir(parents=True)
    turned = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    tensors = {"weight": turned, "count": torch.tensor(7), "bias": torch.zeros(3, dtype=torch.bfloat16)}
    write_tensors(root / "group.safetensors", tensors, along_memory=True)


def _config(root: Path, trained: Path) -> None:
    root.mkdir(parents=True)
    text = "# options\nmodel: vgg8\nbatch-size: 32\nlr: 0.1\nmemory: 100MB\naugment: false\nout: runs/a\n"
    (root / "config.yaml").write_text(text, encoding="utf-8")


def _hosts(root: Path, trained: Path) -> None:
    root.mkdir(parents=True)
    text = "hosts:\n  - {address: 10.0.0.1, processes: 2}\n  - address: pi\n    user: me\n  - 10.0.0.3\n"
    (root / "hosts.yaml").write_text(text, encoding="utf-8")


def _cluster(root: Path, trained: Path) -> None:
    root.mkdir(parents=True)
    shared = {"threads": 4, "free_bytes": 10**9, "versions": {"torch": "2.13.0"}}
    ranks = [{"rank": rank, "host": f"pi{rank}", "macs_per_second": 1e9 + rank, **shared} for rank in range(2)]
    links = [{"from": one, "to": 1 - one, "latency_seconds": 1e-4, "bytes_per_second": 1e7} for one in range(2)]
    (root / "cluster.json").write_text(json.dumps({"ranks": ranks, "links": links}), encoding="utf-8")


_GOOD: dict[str, Callable[[Path, Path], None]] = {
    "run": _run,
    "report": _report,
    "manifest": _manifest,
    "kept": _kept,
    "cache": _cache,
    "tensors": _tensors,
    "config": _config,
    "hosts": _hosts,
    "cluster": _cluster,
}


def write_all(corpus: Path) -> None:
    """Write the good files of every reader; the tiny run takes some seconds."""
    with tempfile.TemporaryDirectory() as folder:
        _trained(Path(folder))
        for name, write in _GOOD.items():
            shutil.rmtree(corpus / name / "good", ignore_errors=True)
            write(corpus / name / "good", Path(folder))
