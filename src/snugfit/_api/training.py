"""A record with its model, and the continuation of an interrupted run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from snugfit._api.trained_models import draw_report, export, load
from snugfit._core.keywords import ExportKeywords, ResumeKeywords, with_keywords
from snugfit._core.option_groups import PLAIN_ONNX, ExportFormat
from snugfit._core.options import from_keywords
from snugfit._core.record import Record
from snugfit._engine import running
from snugfit._storage.files import replacing
from snugfit._storage.tensor_file import MODEL_FILE
from snugfit._training.events import Subscriber
from snugfit._training.own_parts import OwnParts
from snugfit._training.stopping import StopFlag
from snugfit.memory.process import library_import

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, repr=False)
class TrainedRecord:
    """What ``plan.run()`` returns: the fields of :class:`snugfit.Record`, and the trained model; prints as a table.

    >>> import snugfit
    >>> small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "memory": "100MB"}
    >>> record = snugfit.plan("smallconv", "digits", **small).run(subscribers=(), out="runs/small")
    >>> 0 <= record.accuracy["test"] <= 1
    True
    >>> print(record)
                      predicted     measured    budget
    peak memory         ... MB      ... MB  100.0 MB
    ...
    run folder    runs/small
    >>> record.model.training
    False
    >>> record.save("small.safetensors").name
    'small.safetensors'

    Attributes:
        record: the record as data; its fields (``accuracy``, ``measured`` ...) are attributes here too, except that
            ``model`` is the trained module and ``record.model`` its name.
        module: the module that was trained, if it was passed from Python.
    """

    record: Record
    module: nn.Module | None = field(default=None, compare=False)
    _folder: Path = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_folder", Path(self.record.run_dir).absolute())  # it may be relative

    def __str__(self) -> str:
        from snugfit._report.console import result_table
        from snugfit._report.tables import as_text

        return as_text(result_table(self.record))

    def __repr__(self) -> str:
        return f"<TrainedRecord of {self.record.model} by {self.record.strategy}, in {self.record.run_dir}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.record, name)

    def to_json(self) -> dict[str, Any]:
        """The record's JSON."""
        return self.record.to_json()

    @cached_property
    def model(self) -> nn.Module:
        """The trained model: a plain module in evaluation mode."""
        return load(self._folder, self.module)

    def save(self, path: str | Path) -> Path:
        """Copy the trained weights (safetensors) to ``path``.

        Raises:
            OutOfStorageError, CheckpointError: it cannot be written; an older file is as it was.
        """
        with (self._folder / MODEL_FILE).open("rb") as weights, replacing(Path(path)) as file:
            shutil.copyfileobj(weights, file)
        return Path(path)

    def report(self, pictures: bool = False) -> Path:
        """Draw the run's page, ``report.html`` in its folder; see :func:`snugfit.draw_report` for its pictures."""
        return Path(draw_report(self._folder, pictures=pictures, model=self.module)["report"])

    def export(
        self,
        out: str | Path | None = None,
        format: ExportFormat = "both",
        check: bool = True,
        **options: Unpack[ExportKeywords],
    ) -> dict[str, Any]:
        """Write the model for other runtimes; see :func:`snugfit.export` for its options."""
        return export(self._folder, out, format, check, self.module, **options)


vars(TrainedRecord.export)["__signature__"] = with_keywords(TrainedRecord.export, vars(PLAIN_ONNX))


def shown(subscribers: Sequence[Subscriber] | None) -> Sequence[Subscriber]:
    """The subscribers of a run: progress bars by default, which take rich."""
    if subscribers is not None:
        return subscribers
    with library_import():
        from snugfit._report.console import ConsoleProgress

        return (ConsoleProgress(),)


def resume(
    run: str | Path,
    subscribers: Sequence[Subscriber] | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    data: Any = None,
    stop: StopFlag | None = None,
    **own: Unpack[ResumeKeywords],
) -> TrainedRecord:
    """Continue an interrupted run; it ends with the weights of an uninterrupted one (same seed, same machine).

    >>> import snugfit
    >>> record = snugfit.resume("runs/stopped", subscribers=())
    >>> record.run_dir
    'runs/stopped'

    Args:
        run: run folder.
        subscribers: called with every event; progress bars on stderr by default.
        model, data: the module and data that were passed from Python, if any.
        stop: ends the run between two steps once it is requested; the run can be resumed again.
        **own: what else was passed from Python, if anything: ``loss``, ``schedule``, ``optimizer`` and ``metrics``.

    Raises:
        UnknownNameError: there is no such keyword.
        CheckpointError: the folder is not a run folder, or damaged.
        InterruptedRunError: it was stopped again.
    """
    return TrainedRecord(
        *running.resume(Path(run), shown(subscribers), model, data, stop, from_keywords(OwnParts, own))
    )


vars(resume)["__signature__"] = with_keywords(resume, vars(OwnParts()))
