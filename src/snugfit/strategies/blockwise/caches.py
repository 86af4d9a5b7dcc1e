"""The activation caches of a blockwise run: two per block; at most those of two neighbouring blocks exist."""

from __future__ import annotations

from snugfit._core.options import CacheDtype
from snugfit._storage.activation_cache import ActivationCache, CacheWriter
from snugfit._training.run import Run
from snugfit.errors import CheckpointError


class BlockCaches:
    """Opens, writes and removes caches in a run's cache folder, which contains nothing else.

    Args:
        run: the run, for its cache folder and storage budget.
        dtype: stored type of activations.
    """

    def __init__(self, run: Run, dtype: CacheDtype) -> None:
        self.run, self.folder, self.dtype = run, run.cache_dir, dtype

    def open(self, block: int, split: str) -> ActivationCache:
        """Open the cache that a block has written for a split.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        cache = ActivationCache.open(self.folder, _name(block, split))
        if cache is None:
            raise CheckpointError(
                f"the activation cache of block {block + 1} ({split}) is missing from {self.folder}. "
                "Start the run again, and keep its cache folder."
            )
        return cache

    def writer(self, block: int, split: str, rows: int, row_shape: tuple[int, ...]) -> CacheWriter:
        """Create a cache of a block.

        Raises:
            OutOfStorageError: it exceeds the storage budget or the disk.
        """
        budget = self.run.budget.storage_bytes
        left = None if budget is None else max(budget - self._used_bytes(), 0)
        name, manifest = _name(block, split), self.run.manifest
        return CacheWriter(self.folder, name, rows, row_shape, dtype=self.dtype, storage_left=left, manifest=manifest)

    def keep_only(self, block: int | None) -> None:
        """Remove every file except the caches of one block: older caches, and leftovers of an interruption."""
        if not self.folder.is_dir():
            return
        kept = None if block is None else _name(block, "")
        files = [file for file in self.folder.iterdir() if kept is None or not file.name.startswith(kept)]
        self.run.manifest.remove(files)

    def _used_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir()) if self.folder.is_dir() else 0


def _name(block: int, split: str) -> str:
    return f"block{block}-{split}"
