"""Explanation of a plan's choice in sentences, and the command that trains by it. Nothing is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, get_args

from snugfit._core.amounts import parse_sides, sides_text
from snugfit._core.budget import Aim
from snugfit._core.inputs import parse_inputs
from snugfit._core.known import foreign_options
from snugfit._core.option_groups import SYNTHETIC
from snugfit._core.options import ANY_STRATEGY
from snugfit._core.plan import Candidate, Cost, Plan, ranked
from snugfit._core.registry import find_config, strategies
from snugfit._core.request import Request
from snugfit._quantities import format_bytes, format_seconds

CLOSE_RATIO = 1.05
"""Predictions that differ by less than this factor count as equal."""

TOO_LATE = "not measured: --profile-time was over"
"""The reason of a strategy that was left out because measuring had taken as long as it may."""

PLACEHOLDER = "DATA"
"""What stands for the user's data in a command, if the plan was made without."""

_AIMS: dict[Aim, str] = {
    "time": "the least time to finish",
    "memory": "the least predicted peak",
    "accuracy": "the most accuracy to expect, and then the least time",
}
_GAINS: dict[Aim, str] = {"time": "take less time", "memory": "need less memory", "accuracy": "be more accurate"}


def explanation_of(plan: Plan) -> tuple[str, ...]:
    """Sentences about a plan: the choice, its gradients and settings, weights, storage, choices of other aims."""
    choice = plan.choice
    if choice is None or choice.predicted is None:
        return ()
    sentences = [_chosen(plan, choice, choice.predicted), _gradients(plan, choice), *_updates(plan)]
    sentences += [*_smaller_steps(plan, choice), *_few_norm_images(plan)]
    sentences += _own_sentences(choice, choice.predicted)
    sentences += [*_weights(plan), *_storage(plan, choice.predicted), *_other_aims(plan, choice), *_no_data(plan)]
    return tuple(sentence for sentence in sentences if sentence)


def kept_memory_note(cost: Cost) -> tuple[str, ...]:
    """What a predicted peak includes of freed memory that the heap keeps between steps; empty without."""
    kept = cost.peak_bytes - cost.least_peak_bytes
    if not kept:
        return ()
    return (
        f"Its peak includes {format_bytes(kept)} of freed memory that is kept for the next step: there is room for it, "
        "and it makes steps faster.",
    )


def _own_sentences(choice: Candidate, cost: Cost) -> Iterable[str]:
    """What the chosen strategy says about its settings."""
    parts = [name for phase in cost.phases for name in phase.units]
    return find_config(choice.strategy).explanation(choice.settings, parts)


def _chosen(plan: Plan, choice: Candidate, cost: Cost) -> str:
    others = [each for each in plan.candidates if each.feasible and each.strategy != choice.strategy]
    if not others:
        asked = {each.strategy for each in plan.candidates if each.considered}
        reason = "it was asked for" if len(asked) == 1 else "nothing else fits the budget"
        if any(TOO_LATE in each.reasons for each in plan.candidates):
            reason = "nothing else that was measured in --profile-time fits the budget"
        return f"{choice.strategy} is chosen: {reason}."
    second, start = others[0], f"{choice.strategy} is chosen for {_AIMS[plan.aim]}"
    few = () if choice.normalises_few else [each for each in others if each.normalises_few]
    if plan.aim == "time" and _faster(few, cost):
        start += " of those that lose no accuracy to batch norms"
    if plan.aim == "accuracy" and choice.fine_tunes:
        count = plan.workload.train_count
        return f"{start}: {count} training images are few, and it keeps more of the pre-trained network."
    if plan.aim == "accuracy" and choice.exact and not any(each.exact for each in others):
        return f"{start}: nothing else that fits has exact gradients of everything."
    assert second.predicted is not None
    if plan.aim == "memory":
        return f"{start}: {_against(cost.peak_bytes, second.predicted.peak_bytes, second.strategy, format_bytes)}."
    same = [each for each in others if choice.exact and each.exact and each.normalises_few == choice.normalises_few]
    faster = _faster(same, cost)
    against = _against(cost.seconds, second.predicted.seconds, second.strategy, format_seconds)
    if not faster:
        return f"{start}: {against}."
    seconds, first = faster[0]
    compared, images = "" if second is first else f": {against}", _step_images(first)
    smaller = 0 < images < (_step_images(choice) or plan.workload.effective_batch)
    steps = f", in steps of {images} images" if smaller else ""
    reason = "since its steps have more images" if smaller else "as the plainer of the two"
    return (
        f"{start}{compared}. With its settings here, {first.strategy} is backpropagation too{steps}, predicted at "
        f"{format_seconds(seconds)}; {choice.strategy} comes first {reason}."
    )


def _faster(candidates: Iterable[Candidate], cost: Cost) -> list[tuple[float, Candidate]]:
    """Those that are predicted to take fewer seconds, with these."""
    seconds = [(each.predicted.seconds, each) for each in candidates if each.predicted is not None]
    return [(least, each) for least, each in seconds if least < cost.seconds]


def _step_images(candidate: Candidate) -> int:
    """Images of a candidate's smallest step; 0 if unknown."""
    settings = candidate.settings
    if "micro_batch" in settings:
        return int(settings["micro_batch"]) * int(settings.get("micro_batches", 1))
    return min(candidate.batches, default=0)


def _against(ours: float, theirs: float, strategy: str, shown: Callable[[float], str]) -> str:
    """Comparison of the choice's figure with that of the next best candidate."""
    figures = f"{shown(ours)} against {shown(theirs)} with {strategy}"
    if theirs >= ours * CLOSE_RATIO:
        return f"{figures}, {theirs / max(ours, 1e-12):.1f} times as much"
    if theirs * CLOSE_RATIO <= ours:
        return f"{strategy} would be faster ({figures}), but is expected to lose more"
    return f"{figures}, which is about the same"


def _gradients(plan: Plan, choice: Candidate) -> str:
    parts, workload = int(choice.settings.get("micro_batches", 1)), plan.workload
    rest = f", accumulated over {parts} micro-batches{_normalised(plan, choice)}" if parts > 1 else ""
    if choice.exact:
        return f"Its gradients are exact: those of plain backpropagation{rest}."
    if workload.compresses and workload.activations in find_config(choice.strategy).activations:
        return (
            f"Its gradients are nearly exact: those of plain backpropagation{rest}, from feature maps that "
            f"--activations {workload.activations} rounds at random."
        )
    return find_config(choice.strategy).accuracy_with(choice.settings)


def _normalised(plan: Plan, choice: Candidate) -> str:
    """What batch norms normalise micro-batches by."""
    settings = choice.settings
    if settings.get("batch_norm") != "exact":
        return ", each of which is normalised by itself"
    if not settings.get("whole_batch"):
        return "; the network has no BatchNorm, so these are exact without --batch-norm exact"
    images = plan.workload.step_images(int(settings["micro_batch"]), int(settings["micro_batches"]))
    return f" that BatchNorm normalises by the statistics of all {images} images, as a step that is not divided"


def _updates(plan: Plan) -> Iterator[str]:
    """What is not exact in the optimizer's updates."""
    rounded = {"--optimizer-state": "the optimizer's state", "--weight-dtype": "weights"}
    parts = [f"{flag} rounds {rounded[flag.split()[0]]}" for flag in plan.workload.rounded_flags]
    if parts:
        yield f"Its updates are not exact: {' and '.join(parts)} at random after every step."


def _smaller_steps(plan: Plan, choice: Candidate) -> Iterator[str]:
    """Images of a step, if they are fewer than the user's batch size."""
    settings, asked = choice.settings, plan.workload.effective_batch
    step, images = "A step", _step_images(choice)
    if "micro_batch" not in settings:
        blocks = len(choice.batches)
        step = "A step" if blocks == 1 else f"The smallest step of its {blocks} blocks"
        reason = f", because {choice.strategy} does not accumulate"
    elif settings.get("accumulate", True):
        reason = ": a larger batch, or its accumulated gradients, would exceed the budget"
    else:
        reason = ": a larger batch would exceed the budget, and --no-accumulate allows one batch per step"
    if 0 < images < asked:
        lr = plan.workload.optimizer.lr * images / asked
        advice = f"Consider a lower --lr; in proportion it is {lr:.2g}."
        if plan.workload.optimizer.name == "python":
            advice = f"Consider lower learning rates; in proportion they are {lr:.2g} times those of your optimizer."
        yield f"{step} trains on {images} images instead of the {asked} of --batch-size{reason}. {advice}"


def _few_norm_images(plan: Plan) -> Iterator[str]:
    """Strategies with exact gradients that are expected to lose accuracy to batch norms."""
    for each in plan.candidates:
        if each.feasible and each.normalises_few:
            together = f"{each.norm_images} image{'' if each.norm_images == 1 else 's'}"
            divided = each.settings.get("batch_norm") == "micro" and int(each.settings.get("micro_batches", 1)) > 1
            remedy = "; with --batch-norm exact they would normalise all images of a step" if divided else ""
            yield f"With {each.strategy}, batch norms normalise {together} at a time, which costs accuracy{remedy}."


def _weights(plan: Plan) -> Iterator[str]:
    """Effect of weights, or their absence, on strategies that need them."""
    for name in (config.name for config in strategies().values() if config.needs_weights):
        found = [each for each in plan.candidates if each.strategy == name]
        if not found or len(plan.candidates) == 1:
            continue
        if any(each.considered for each in found):
            yield f"--weights were given, so that there is something to transfer: {name} was considered too."
        elif plan.budget.time_ratio is None and "weights" in " ".join(found[0].reasons):
            yield f"Training is from scratch, so {name} is not considered; pre-trained --weights would open it."


def _storage(plan: Plan, chosen: Cost) -> Iterator[str]:
    """The first candidate that a larger storage budget would make faster."""
    limit, memory = plan.budget.storage_bytes, plan.budget.memory_bytes or float("inf")
    if limit is None:
        return
    for each in plan.candidates:
        cost = each.predicted
        if each.feasible or cost is None or cost.peak_bytes > memory or cost.storage_bytes <= limit:
            continue
        if cost.seconds * CLOSE_RATIO < chosen.seconds:
            megabytes = -(-cost.storage_bytes // 10**6)
            yield (
                f"With --storage {megabytes}MB, {each.strategy} would take {format_seconds(cost.seconds)} "
                f"instead of {format_seconds(chosen.seconds)}."
            )
            return


def _other_aims(plan: Plan, choice: Candidate) -> Iterator[str]:
    """Choices of other aims, if they differ; without figures if candidates would have other settings."""
    for aim in (each for each in get_args(Aim) if each != plan.aim):
        other = ranked(plan.candidates, aim)[0]
        changed = [each.strategy for each in plan.candidates if each.feasible and _changes(each, aim)]
        if changed and not (aim == "accuracy" and other.exact):
            yield f"With --aim {aim}, {changed[0]} has other settings and may {_GAINS[aim]}."
            continue
        if other.strategy == choice.strategy or other.predicted is None:
            continue
        cost = other.predicted
        exact = ", with exact gradients" if other.exact and not choice.exact else ""
        yield (
            f"--aim {aim} would choose {other.strategy}: {format_bytes(cost.peak_bytes)}, "
            f"{format_seconds(cost.seconds)}{exact}."
        )


def _no_data(plan: Plan) -> Iterator[str]:
    """The counts of images that were assumed without data, and how to train."""
    work = plan.workload
    if work.data == SYNTHETIC:
        yield (
            f"No data was read: times and storage are for {work.train_count:,} training images (--max-train), "
            f"{work.val_count:,} to validate and {work.test_count:,} to test (--max-val)."
        )
        yield f"To train, name your data instead of {PLACEHOLDER} in the command: --data replaces --input-shape."


def _changes(candidate: Candidate, aim: Aim) -> bool:
    return find_config(candidate.strategy).changes_with(candidate.settings, aim)


def command_of(request: Request, plan: Plan) -> tuple[str, ...] | None:
    """Arguments of the command that trains by a plan's choice, with ``snugfit cluster launch`` for several processes.

    None if nothing was chosen, or if parts were passed from Python. With ``--input-shape`` it has a
    placeholder for data.
    """
    choice = plan.choice
    if choice is None or request.from_python or plan.workload.metrics:
        return None
    if request.data.input_shape is not None:
        shape = request.data.input_shape
        size = None if parse_inputs(shape) else sides_text(parse_sides(shape.partition("x")[2]))
        model = replace(request.model, image_size=size)
        request = replace(request, model=model, data=replace(request.data, data=PLACEHOLDER, input_shape=None))
    training = request.training
    own_default = find_config(choice.strategy).default_optimizer
    if request.strategy.strategy in ANY_STRATEGY and training.optimizer is None and own_default:
        # a named strategy may have its own default optimizer, but the plan used the common one
        request = replace(request, training=replace(training, optimizer=plan.workload.optimizer.name))
    request = request.with_strategy(choice.strategy)
    defaults = {option: getattr(type(request.strategy)(), option) for option in foreign_options(request)}
    request = replace(request, strategy=replace(request.strategy, **defaults))
    processes = choice.processes
    start = ("cluster", "launch", "--processes", str(processes), "--") if processes > 1 else ()
    return ("snugfit", *start, "train", *flags_of(request))


def flags_of(request: Request) -> tuple[str, ...]:
    """The flags of a request, without those at their defaults."""
    flags: list[str] = []
    for group in fields(request):
        given = getattr(request, group.name)
        for option in fields(given):
            value = getattr(given, option.name)
            if value != option.default:
                flags += _flag(option.name.replace("_", "-"), value)
    return tuple(flags)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
