"""A finished run, opened to inspect its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from snugfit._chain import Chain, UnitStore
from snugfit._core.option_groups import FROM_PYTHON
from snugfit._core.record import Record
from snugfit._engine.images import RunImages, run_images
from snugfit._engine.loading import Architecture, load
from snugfit._storage.manifest import Manifest
from snugfit._storage.run_folder import read_record
from snugfit.errors import CheckpointError, ModelError, UnknownNameError, UsageError


@dataclass(frozen=True)
class FinishedRun:
    """A run, and the data and module to inspect it with; everything is read at its first use.

    Attributes:
        folder: run folder.
        data, data_dir: data set; the one of the run by default.
        model: the module that was trained, if it was passed from Python.
    """

    folder: Path
    data: str | None = None
    data_dir: str | None = None
    model: nn.Module | Callable[[], nn.Module] | None = None

    @cached_property
    def record(self) -> Record:
        """The run's record."""
        return read_record(self.folder)

    @cached_property
    def architecture(self) -> Architecture:
        """The structure of its model."""
        return Architecture.read(self.folder)

    @cached_property
    def images(self) -> RunImages:
        """Test images; validation images if there are none."""
        untested = self.data is None and self.record.accuracy.get("test") is None
        return run_images(self.folder, self.data, self.data_dir, "val" if untested else None)

    @cached_property
    def network(self) -> nn.Module:
        """The trained model."""
        self._check_model()
        return load(self.folder, self.model)

    @cached_property
    def chain(self) -> Chain:
        """The full network, on the meta device."""
        self._check_model()
        return self.architecture.chain(self.model)

    def unit(self, name: str | None, default: float) -> int:
        """Index of a unit by its name; by default the unit at this share of the trained ones.

        Raises:
            UnknownNameError: no such unit was trained.
        """
        trained = {point.unit: point.index for point in self.record.exits}
        if name is None:
            return list(trained.values())[int(default * (len(trained) - 1) + 0.5)]
        if name not in trained:
            raise UnknownNameError("unit", name, trained)
        return trained[name]

    def check_local_loss(self, *names: str) -> None:
        """Raise an error unless the run was trained with one of these local losses."""
        used = str(self.record.settings.get("local_loss", "")).partition(":")[0]
        if used not in names or not self.record.exits:
            own = f"the local loss {used}" if used else f"the strategy {self.record.strategy}"
            raise UsageError(f"this run was trained with {own}; this takes --local-loss {' / '.join(names)}.")

    def stored(self, kind: str, index: int) -> dict[str, Tensor]:
        """Stored tensors of a unit, of the shapes of its layers: its ``weights``, or its local loss (``exits``)."""
        if not (self.folder / kind).is_dir():
            raise CheckpointError(f"{self.folder} is incomplete: it has no folder {kind}.")
        store, manifest = UnitStore(self.folder / kind), Manifest.read(self.folder)
        manifest.check(*(name for name in manifest.names if name.startswith(f"{kind}/unit_{index:03d}")))
        manifest.check(f"{kind}/{store.path(index).name}")
        return store.load(index)

    def _check_model(self) -> None:
        if self.architecture.model == FROM_PYTHON and self.model is None:
            raise ModelError(
                "this run trained a module of your own; draw the report from Python, where you can pass it: "
                "snugfit.draw_report(run, pictures=True, model=...)."
            )
