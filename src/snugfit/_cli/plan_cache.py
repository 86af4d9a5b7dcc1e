"""Cached plans: the same request on the same machine is answered without torch.

An answer is kept with the measurements (``--profile-cache``) under a digest of all that it depends on: the request,
the code and its versions, the machine, the files that the request names, and the runs that predictions learn from.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from snugfit._cli.output import FailedError
from snugfit._core.documents import read_as
from snugfit._core.functions import is_function
from snugfit._core.hardware import cores, processor
from snugfit._core.machine_memory import installed_bytes
from snugfit._core.options import AUTO, data_sets_in
from snugfit._core.paths import data_root, expanded, profiles_folder, try_write_text
from snugfit._core.plan import Plan
from snugfit._core.registry import code_digest, installed_plugins
from snugfit._core.request import Request
from snugfit.errors import CheckpointError, DataError

PACKAGES = ("torch", "torchvision", "timm")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ONEDNN_MAX_CPU_ISA", "SNUGFIT_DATA")
MOST_FILES = 5_000
"""With more files, checking them takes as long as planning."""
LIBRARIES = ("timm:", "torchvision:")
"""Other models with a colon in their name are the user's own code, which may be anywhere."""


class PlanCache:
    """The cached answer to a request, of the kind ``plans`` or ``smallest`` (budget)."""

    def __init__(self, request: Request, kind: str = "plans") -> None:
        self._path = _path(request, kind)
        self._renew = request.machine.profile_cache == "renew"

    def find(self) -> dict[str, Any] | None:
        """The cached answer; None if there is none, or it cannot be read."""
        if self._path is None or self._renew:
            return None
        try:
            return read_as(_checked, self._path)
        except CheckpointError:
            return None

    def keep(self, found: dict[str, Any]) -> None:
        """Keep an answer, if the folder can be written."""
        if self._path is not None:
            try_write_text(self._path, json.dumps(found))


def _checked(found: Any) -> dict[str, Any]:
    """An answer, of either kind, as it is used."""
    if "plan" not in found:
        Request.from_json(found["request"])
        return {**found, "bytes": int(found["bytes"]), "strategy": str(found["strategy"])}
    Plan.from_json(found["plan"])
    Request.from_json(found.get("request") or {})
    if found["infeasible"] is not None:
        FailedError.from_json(found["infeasible"])
    return dict(found)


def _path(request: Request, kind: str) -> Path | None:
    """The file of its answer; None if the answer may depend on something unknown here."""
    folder, model = profiles_folder(request.machine.profile_cache), request.model.model
    changes = request.budget.total_memory == AUTO or (":" in model and not model.startswith(LIBRARIES))
    changes |= any(map(is_function, (request.data.name, *data_sets_in(request.strategy).values())))
    if folder is None or changes or installed_plugins():
        return None
    files = _files(request, folder)
    if files is None:
        return None
    asked = replace(request, machine=replace(request.machine, profile_cache="auto")).to_json()
    facts = json.dumps([asked, code_digest(), _software(), _machine(), str(Path.cwd()), files], sort_keys=True)
    return folder / kind / f"{sha256(facts.encode()).hexdigest()[:32]}.json"


def _software() -> list[str | None]:
    versions: list[str | None] = [platform.python_version()]
    for package in PACKAGES:
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append(None)
    return [*versions, *(os.environ.get(name) for name in VARIABLES)]


def _machine() -> list[Any]:
    """What distinguishes this machine from others that share its files."""
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*"))
    return [platform.platform(), processor(), cores(), installed_bytes(), gpus]


def _files(request: Request, folder: Path) -> list[Any] | None:
    """Names, sizes and times of all files that matter; None if there are too many."""
    with contextlib.suppress(DataError):
        root = data_root(request.data.data_dir)
        names = (request.data.data, *data_sets_in(request.strategy).values())
        sets = [path for name in names for path in _data(name, root)]
        paths = [*sets, *_named(request.to_json()), *sorted(folder.glob("runs-*.jsonl"))]
        found = list(islice((fact for path in paths for fact in _facts(path, depth=2)), MOST_FILES + 1))
        return found if len(found) <= MOST_FILES else None
    return None


def _data(name: str | None, root: Path) -> list[Path]:
    """Where a data set may be: the folder that it names, or the data folder."""
    plain = (name or "").partition(":")[2] or name
    return [path for path in (expanded(plain), root / plain) if path.exists()] or [root] if plain else []


def _named(value: Any) -> list[Path]:
    """Files that a request names anywhere: weights, a cluster, a list of boxes."""
    if isinstance(value, dict):
        return [path for each in value.values() for path in _named(each)]
    with contextlib.suppress(OSError, DataError):  # a text too long for a name, say
        return [path] if isinstance(value, str) and (path := expanded(value)).is_file() else []
    return []


def _facts(path: Path, depth: int) -> Iterator[list[Any]]:
    """Size and time of a file or folder, and of its contents down to a depth."""
    try:
        stat = path.stat()
        yield [str(path), stat.st_size, stat.st_mtime_ns]
        inside = sorted(os.scandir(path), key=lambda entry: entry.name) if depth and path.is_dir() else []
    except OSError:
        yield [str(path), None, None]
        return
    for entry in inside:
        yield from _facts(Path(entry.path), depth - 1)
