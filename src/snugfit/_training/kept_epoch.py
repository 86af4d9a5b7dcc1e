"""The epoch whose weights a run keeps: the best on validation images, or the last; and when to train no further.

Stored are the weights that were validated, with the statistics that were recomputed for it. Those of the last epoch are
not stored, since they are in memory and in its checkpoint.
"""

from __future__ import annotations

from snugfit._core.record import KeptEpoch
from snugfit._training.run import Run
from snugfit._training.strategy import Trainable


def keep_epoch(trainable: Trainable, run: Run, val_accuracy: float | None) -> None:
    """Keep the weights of the epoch that was just validated, unless an earlier one is better.

    Without validation images (None) and with ``--keep last``, the newest epoch is kept.
    """
    position, best = run.position, run.workload.keep == "best" and val_accuracy is not None
    if val_accuracy is not None and _is_above(val_accuracy, position.improved):
        position.improved = KeptEpoch(position.epoch, val_accuracy)
    before = position.kept.val_accuracy if position.kept and best else None
    if before is not None and val_accuracy is not None and val_accuracy < before:
        return
    position.kept = KeptEpoch(position.epoch, val_accuracy)
    if best and position.epoch + 1 < run.workload.epochs:
        run.kept_weights.save(position.epoch, trainable.state()["model"])


def _is_above(val_accuracy: float, before: KeptEpoch | None) -> bool:
    return before is None or before.val_accuracy is None or val_accuracy > before.val_accuracy


def is_out_of_patience(run: Run) -> bool:
    """Whether the validation accuracy did not improve in the last ``--patience`` epochs before the run's position."""
    patience, improved = run.workload.patience, run.position.improved
    return patience is not None and improved is not None and run.position.epoch - improved.epoch > patience


def restore_kept(trainable: Trainable, run: Run) -> None:
    """After the run's last epoch, load the kept weights, whose file is mapped; optimizer state is dropped.

    Freed memory goes back to the system before that.
    """
    kept, trained = run.position.kept, run.position.epoch
    if trained < run.workload.epochs and not is_out_of_patience(run):
        return
    run.freed.close()
    if kept is None or kept.epoch + 1 == trained:
        return
    weights = run.kept_weights.map(kept.epoch)
    trainable.load_state(lambda group, prefix="": weights if group == "model" else {})
    run.tick()  # the meter subtracts the pages of the file only as long as it is mapped
