"""The training loop, the same for every strategy; the trainable and its batches come from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from shlex import quote

from torch import Tensor

from snugfit._core.own_cores import on_own_core
from snugfit._core.plan import Phase
from snugfit._quantities import format_bytes
from snugfit._training.events import EpochDone, Notice, StepDone
from snugfit._training.feed import Feed
from snugfit._training.kept_epoch import is_out_of_patience, keep_epoch, restore_kept
from snugfit._training.run import Run
from snugfit._training.seeding import derive_seed, seed_all
from snugfit._training.statistics import images_for
from snugfit._training.strategy import BatchSource, Trainable
from snugfit._training.task import StepResult, task_of
from snugfit.errors import MEMORY_ERRORS, BudgetExceededError, InterruptedRunError, first_line
from snugfit.lean.convolution import gradients_in_parts
from snugfit.memory import is_out_of_memory, release_memory


def train_phase(
    trainable: Trainable,
    source: BatchSource,
    phase: Phase,
    run: Run,
    evaluate: Callable[[], float | None] | None = None,
    span: range | None = None,
    passing_batch: int | None = None,
) -> int:
    """Train for the workload's epochs from the run's position; returns the number of steps of one epoch.

    Weights are settled before they are evaluated, and at the end. After the workload's last epoch, or when its patience
    has ended, the weights in place are those of the kept epoch.

    Args:
        trainable, source, phase, run: what trains, on which batches, as predicted, from the run's position on.
        evaluate: returns validation accuracy at the end of an epoch, or None.
        span: the epochs of this phase, if it is one of several parts of the workload's epochs.
        passing_batch: most inputs at once in passes without training; as in training by default.

    Raises:
        DivergedError, InterruptedRunError, BudgetExceededError: see ``snugfit.errors``; the run can be resumed.
    """
    span, parts, position = span or range(run.workload.epochs), trainable.micro_batches, run.position
    batch_size = run.workload.step_images(phase.batch_size, parts)
    steps = source.steps(batch_size)
    for epoch in range(max(position.epoch, span.start), span.stop):
        if is_out_of_patience(run):
            _say_that_it_ends(run, phase)
            break
        if position.epoch != epoch:
            position.start_epoch(epoch)
        started = time.perf_counter()
        feed = Feed(source.epoch(epoch, batch_size, position.step, parts), run, phase.name)
        with run.freed.kept(steps=True), gradients_in_parts(not run.freed.has_ample_room):
            while position.step < steps:
                _train_step(trainable, feed, phase, run, steps=steps, images=min(batch_size, len(source)))
                _save_if_due(trainable, run, last=position.step == steps)
        seconds = time.perf_counter() - started
        if evaluate is not None or epoch + 1 == span.stop:
            _settle(trainable, source, passing_batch or phase.batch_size, phase.name, run)
        accuracy = evaluate() if evaluate is not None else None
        _end_epoch(run, phase, seconds, accuracy)
        if evaluate is not None:
            keep_epoch(trainable, run, accuracy)
        position.start_epoch(epoch + 1)
        run.save(trainable.state())
        stop_if_requested(run)
    restore_kept(trainable, run)
    return steps


def _say_that_it_ends(run: Run, phase: Phase) -> None:
    work, position = run.workload, run.position
    best = position.improved and position.improved.val_accuracy
    run.emit(
        Notice(
            f"{phase.name}: training ends after epoch {position.epoch} of {work.epochs}; the validation "
            f"{task_of(work).metric} was not better than {best:.1%} in --patience {work.patience} epochs"
        )
    )


def _train_step(trainable: Trainable, feed: Feed, phase: Phase, run: Run, *, steps: int, images: int) -> None:
    position, workload = run.position, run.workload
    started = time.perf_counter()
    feed.begin_step()
    factor = run.lr_factor(position.epoch * steps + position.step, steps)
    trainable.set_lr_factor(factor)
    loss, weight, correct, samples, known = 0.0, 0.0, 0, 0, True
    while samples < images:
        result, count = _step_within_budget(trainable, feed, run, left=images - samples, images=images)
        counted = count if result.weight is None else result.weight
        loss, weight = loss + result.loss * counted, weight + counted
        correct, samples, known = correct + (result.correct or 0), samples + count, result.correct is not None
    loss /= weight
    run.require_finite(loss, phase.name)
    run.freed.after_step()
    run.tick()
    position.step += 1
    position.loss_sum += loss * samples
    position.correct += correct
    position.samples += samples
    accuracy, lr, seconds = (
        correct / samples if known else None,
        workload.optimizer.lr * factor,
        time.perf_counter() - started,
    )
    current, peak = run.meter.current_bytes, position.phase_peak_bytes
    run.emit(
        StepDone(phase.name, position.epoch, position.step, steps, loss, accuracy, lr, seconds, current, peak, samples)
    )


def _step_within_budget(
    trainable: Trainable, feed: Feed, run: Run, *, left: int, images: int
) -> tuple[StepResult, int]:
    """Read a (micro-)batch (B, ...) and train on it, of ``images`` in the step, ``left`` of which are still to come.

    The loss is weighted by its share of the step's images; the last one updates. Returns the result and B.
    """
    try:
        inputs, labels = feed.take()
        count = len(labels)
        last = count == left
        with on_own_core():
            result = trainable.step(inputs, labels, count / images, last)
        del inputs, labels
        feed.read_ahead(step_ends=last)
        return result, count
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        peak, what = format_bytes(run.meter.mark()), first_line(error)[-60:]
    release_memory()
    budget = format_bytes(run.budget.memory_bytes or 0)
    raise BudgetExceededError(
        f"a training step needed more than the memory budget of {budget}: refused at {peak} ({what}). "
        f"The last checkpoint in {run.folder} is intact; train again with a larger {run.budget.memory_flag} "
        "or a smaller --batch-limit."
    )


def _save_if_due(trainable: Trainable, run: Run, *, last: bool) -> None:
    stopping = run.stop.requested
    if not last and (stopping or run.save_due):
        run.freed.give_back()
        run.save(trainable.state())
        if stopping:
            stop_if_requested(run)


def stop_if_requested(run: Run) -> None:
    """Stop the run at its position if a signal requested it; call it right after a checkpoint.

    Raises:
        InterruptedRunError: a stop was requested.
    """
    if run.stop.requested:
        raise InterruptedRunError(f"stopped; continue with: snugfit train --resume {quote(str(run.folder))}")


def _settle(trainable: Trainable, source: BatchSource, batch_size: int, phase: str, run: Run) -> None:
    """Put the weights for evaluation in place, with their own statistics of at most ``batch_size`` images at once.

    Training normalises by its batches and also tracks a running average, which lags behind the weights: after 14 steps
    a quarter of it is still the initial value. So some training images are run through the current weights whenever
    these are validated, passed on or stored. Randomness, such as augmentation, depends only on seed and position.
    Images are not mixed: a single draw of shares would decide for a batch, and validation images are not mixed either.
    """
    epoch, images = run.position.epoch, images_for(len(source))
    size = min(batch_size, images)
    seed_all(derive_seed(run.workload.seed, phase, "settle", epoch))
    with run.limit.allow_kernels(), run.freed.kept():
        trainable.settle(_timed(islice(source.epoch(epoch, size, mixed=False), images // size), run))
    run.tick()


def _timed(batches: Iterable[tuple[Tensor, Tensor]], run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches (B, ...); records the seconds until the last one is used."""
    started = time.perf_counter()
    for batch in batches:
        run.tick()
        with on_own_core():
            yield batch
    run.add_overhead("statistics", time.perf_counter() - started)


def _end_epoch(run: Run, phase: Phase, seconds: float, val_accuracy: float | None) -> None:
    position = run.position
    samples, epochs, metric = max(position.samples, 1), run.workload.epochs, task_of(run.workload).metric
    loss = position.loss_sum / samples
    accuracy = position.correct / samples if run.workload.task == "classify" else None
    own, run.own_values = run.own_values, {}
    run.emit(EpochDone(phase.name, position.epoch, epochs, loss, accuracy, val_accuracy, seconds, metric, own))
