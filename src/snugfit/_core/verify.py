"""Whether the files of a run folder are as they were written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from snugfit._core.documents import read_data
from snugfit._core.manifest import Manifest
from snugfit._core.paths import run_cache_folder
from snugfit._core.request import Request
from snugfit.errors import CheckpointError


@dataclass(frozen=True)
class Verification:
    """What was found in a run folder; names are paths in it.

    >>> Verification("runs/a", files=30, damaged={}, missing=("record.json",), extra=("notes.txt",)).sound
    False

    Attributes:
        run_dir: the folder.
        files: how many files its manifest lists.
        damaged: what is wrong with each file whose content is another, by name.
        missing: files that are gone.
        extra: files that the run has not written, or not finished, and that nothing reads.
    """

    run_dir: str
    files: int
    damaged: dict[str, str]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether every file is there and as it was written."""
        return not self.damaged and not self.missing


def verify(run: str | Path) -> Verification:
    """Compare every file of a run folder, finished or not, with the digest that was noted when it was written.

    >>> import snugfit
    >>> found = snugfit.verify("runs/first")
    >>> found.sound, found.files > 10, found.damaged
    (True, True, {})

    Args:
        run: run folder; its caches are looked at too, where ``--cache-dir`` put them.

    Raises:
        CheckpointError: the folder has no manifest, or that is damaged.
    """
    folder = Path(run)
    manifest = Manifest.read(folder, _caches(folder))
    flaws = {manifest.name(flaw.path): flaw for flaw in manifest.flaws()}
    return Verification(
        run_dir=str(run),
        files=len(manifest.names),
        damaged={name: flaw.words for name, flaw in flaws.items() if not flaw.missing},
        missing=tuple(name for name, flaw in flaws.items() if flaw.missing),
        extra=tuple(manifest.name(path) for path in manifest.unlisted()),
    )


def _caches(folder: Path) -> Path | None:
    """Where the run keeps its caches, as far as its request can be read."""
    try:
        return run_cache_folder(read_data(Request, folder / "request.json").strategy.cache_dir, folder)
    except CheckpointError:
        return None
