"""Run a plan, or resume an interrupted run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn

from snugfit._chain import UnitStore
from snugfit._core.documents import DocumentError, converted
from snugfit._core.option_groups import FROM_PYTHON
from snugfit._core.options import data_sets_in
from snugfit._core.paths import PROFILE_CACHES, expanded, run_cache_folder, shortened
from snugfit._core.plan import Plan
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.registry import config_of, strategy_class
from snugfit._core.request import Request
from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import TaskName
from snugfit._data.decoded import DecodedFile, space_for_pixels
from snugfit._data.device_transform import Placement
from snugfit._engine.builder import Assembly, assemble, own_splits
from snugfit._engine.distributed import commands_of_run
from snugfit._engine.history import keep_run
from snugfit._engine.loading import Architecture, ModuleOrFactory
from snugfit._engine.planning import Planned
from snugfit._engine.process import baseline, choose_device
from snugfit._engine.run_memory import by_flag, memory_at_rest, run_limit
from snugfit._engine.tasks import import_for, rules_of
from snugfit._planner import infeasible_error
from snugfit._quantities import format_bytes
from snugfit._report.tensorboard import tensorboard_subscribers
from snugfit._storage.files import write_json_atomic
from snugfit._storage.lock import LOCK_FILE, run_lock
from snugfit._storage.manifest import MANIFEST_FILE, Manifest
from snugfit._storage.outputs import require_folder, require_run_folder
from snugfit._storage.run_folder import read_data, read_record
from snugfit._training.events import Notice, RunStarted, Subscriber
from snugfit._training.finite import infinite_buffers
from snugfit._training.launch import World
from snugfit._training.metrics import METRICS_FILE
from snugfit._training.own_parts import FUNCTIONS, OwnParts
from snugfit._training.run import Job, Machine, Run
from snugfit._training.stopping import StopFlag
from snugfit._training.strategy import Strategy
from snugfit.errors import BudgetExceededError, CheckpointError, UsageError
from snugfit.memory import make_meter
from snugfit.memory.device import device_at_rest

_RUNS = Path("runs")
FIRST_FILES = ("request.json", "profile.json", "architecture.json", "plan.json")
"""The files that a run is resumed from, in the order in which they are written."""


def execute(
    planned: Planned, subscribers: Sequence[Subscriber], out: str | Path | None = None, stop: StopFlag | None = None
) -> Record:
    """Train the chosen candidate of a plan in a new run folder."""
    folder = _new_folder(out or planned.assembly.request.machine.out, planned.plan)
    with run_lock(folder):
        require_run_folder(folder)
        write_run(folder, planned)
        return _fit(folder, planned, subscribers, stop)


def begin(planned: Planned, out: str | None) -> Path:
    """Write a new run folder, which :func:`resume` trains from, and return it."""
    folder = _new_folder(out, planned.plan)
    with run_lock(folder):
        require_run_folder(folder)
        write_run(folder, planned)
        if planned.assembly.module is not None:
            manifest = Manifest.reopen(folder)
            _store_initial_weights(planned.assembly, UnitStore(folder / "weights", manifest), manifest)
    return folder


def _store_initial_weights(assembly: Assembly, store: UnitStore, manifest: Manifest) -> None:
    """Write the initial weights, unless the run has them; before the first checkpoint it has no others."""
    if any(name.startswith("weights/") for name in manifest.names):
        return
    with manifest.rewriting("weights"):
        assembly.store_initial_weights(store)


def write_run(folder: Path, planned: Planned) -> None:
    """Write what :func:`resume` reads: from then on the run can be resumed, even before training begins."""
    manifest = Manifest.reopen(folder)
    write_json_atomic(folder / "request.json", with_absolute_paths(planned.assembly.request).to_json(), manifest)
    write_json_atomic(folder / "profile.json", to_data(planned.profile), manifest)
    planned.assembly.architecture.write(folder, manifest)
    write_json_atomic(folder / "plan.json", planned.plan.to_json(), manifest)


def with_absolute_paths(request: Request) -> Request:
    """The request with absolute paths, so that the run can be resumed from any folder."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(expanded(path).absolute())

    data, model, strategy, machine = request.data, request.model, request.strategy, request.machine
    profiles = machine.profile_cache
    if profiles not in PROFILE_CACHES:
        profiles = str(expanded(profiles).absolute())

    def found(name: str, task: TaskName) -> str:
        return name if name == FROM_PYTHON else rules_of(task).place(name, data.data_dir)

    named = found(data.name, data.task) if data.input_shape is None else None
    others: dict[str, Any] = {option: found(name, "classify") for option, name in data_sets_in(strategy).items()}
    return replace(
        request,
        data=replace(data, data=named, data_dir=absolute(data.data_dir)),
        model=replace(model, weights=absolute(model.weights)),
        strategy=replace(strategy, **others),
        machine=replace(machine, cache_dir=absolute(machine.cache_dir), profile_cache=profiles),
    )


def reopen(
    folder: Path, model: ModuleOrFactory | None = None, data: Any = None, own: OwnParts | None = None
) -> Planned:
    """The plan of an interrupted run, from its locked folder; the others are those passed from Python."""
    _require_begun(folder)
    request = read_data(Request, folder / "request.json")
    plan = read_data(Plan, folder / "plan.json")
    profile = read_data(Profile, folder / "profile.json")
    if plan.choice is None:
        raise infeasible_error(plan)
    if (folder / "record.json").exists():
        raise UsageError(f"the run in {folder} is finished; `snugfit report {quote(str(folder))}` draws its page.")
    if request.model.model == FROM_PYTHON and model is None:
        raise UsageError("this run trained a module of your own; pass it again: snugfit.resume(run, model=...).")
    if request.data.data == FROM_PYTHON and data is None:
        raise UsageError("this run trained on data of your own; pass it again: snugfit.resume(run, data=...).")
    own = own or OwnParts()
    for name, what in FUNCTIONS.items():
        named, given = getattr(request.training, name), getattr(own, name)
        if named == FROM_PYTHON and given is None:
            raise UsageError(f"this run trained by {what} of your own; pass it again: snugfit.resume(run, {name}=...).")
        if named != FROM_PYTHON and given is not None:
            settings = plan.workload.optimizer
            used = named or {"schedule": settings.schedule, "optimizer": settings.name}[name]
            raise UsageError(f"this run trained by --{name} {used}; leave out {name}= to resume it.")
    if set(own.metrics) != set(plan.workload.metrics):
        names = ", ".join(plan.workload.metrics) or "none"
        raise UsageError(f"this run measures other metrics: {names}. Pass those: snugfit.resume(run, metrics=...).")
    Manifest.read(folder, run_cache_folder(request.machine.cache_dir, folder)).check_all(but=[METRICS_FILE])
    import_for(request.with_strategy(plan.choice.strategy))
    device = choose_device(request.machine.device)
    resting = baseline(request.machine.threads, device)
    with run_limit(plan, resting, device):
        assembly = assemble(request, None if data is None else own_splits(data, request), model, own)
        own.check(assembly.workload, device)
    _require_same_classes(folder, assembly.splits.class_names)
    reopened = replace(assembly.workload, data=plan.workload.data, pretrained=plan.workload.pretrained)
    if reopened != plan.workload:  # plans of earlier versions do not tell of pre-trained weights
        what = "model, data or the optimizer's state" if own.optimizer is not None else "model or data"
        raise CheckpointError(f"{what} have changed since the run in {folder} began; start a new run.")
    return Planned(plan, profile, profile, assembly=assembly, baseline=resting)


def _require_same_classes(folder: Path, class_names: Sequence[str]) -> None:
    """Refuse other names of classes than those that the run in a folder learns: every label would be another."""
    before = Architecture.read(folder).class_names
    if tuple(class_names) != tuple(before):
        names = [*(set(before) - set(class_names)), *(set(class_names) - set(before))]
        what = f"'{min(names)}' is in one of them alone" if names else "their order differs"
        raise CheckpointError(
            f"the classes of the data have changed since the run in {folder} began: {what}. Restore the data, or start "
            "a new run."
        )


def _require_begun(folder: Path) -> None:
    manifest = Manifest.read(folder)
    for name in FIRST_FILES:
        manifest.check(name)  # a file that is listed and missing
        if not (folder / name).exists():
            raise CheckpointError(
                f"the run in {folder} was stopped before training began, and has no {name} to resume from. "
                "Remove the folder, and start the run again."
            )


def resume(
    folder: Path,
    subscribers: Sequence[Subscriber],
    model: ModuleOrFactory | None = None,
    data: Any = None,
    stop: StopFlag | None = None,
    own: OwnParts | None = None,
) -> tuple[Record, nn.Module | None]:
    """Continue an interrupted run; see :func:`snugfit.resume`. Returns the module too, if it was passed from Python."""
    if not (folder / LOCK_FILE).exists():
        Manifest.read(folder)  # a lock would be left in a folder that is no run
    with run_lock(folder):
        planned = reopen(folder, model, data, own)
        return _fit(folder, planned, subscribers, stop), planned.assembly.module


def _placement(device: torch.device, plan: Plan) -> Placement | None:
    """Images are transformed on a device with a memory of its own, and pinned unless a budget counts pinned pages."""
    found = device_at_rest(device)
    if found is None:
        return None
    return Placement(device, pinned=not found.memory.unified and plan.budget.host_memory is None)


def _decoded_file(run: Run) -> DecodedFile:
    """Where photos are kept once they were decoded: within what the strategy leaves of the storage budget."""
    folder, needed = run.cache_dir, run.predicted.storage_bytes
    return DecodedFile(folder, space_for_pixels(folder, run.budget.storage_bytes, needed), run.count_decoded)


def _fit(folder: Path, planned: Planned, subscribers: Sequence[Subscriber], stop: StopFlag | None) -> Record:
    plan, assembly, resting = planned.plan, planned.assembly, planned.baseline
    choice, device = plan.choice, choose_device(assembly.request.machine.device)
    if choice is None or choice.predicted is None:
        raise infeasible_error(plan)
    name = choice.strategy
    try:
        strategy: Strategy = converted(lambda settings: from_data(strategy_class(name), settings), choice.settings)
    except DocumentError as error:
        raise CheckpointError(f"{folder / 'plan.json'} holds settings that its strategy lacks: {error}.") from error
    with stop or StopFlag() as flag:  # until the record is written: a signal after training has no effect
        memory = memory_at_rest(resting, device)
        most = max(filter(None, (plan.memory, memory)), key=lambda each: each.rest_bytes, default=None)
        with run_limit(plan, resting, device) as limit:
            run = Run(
                folder,
                Job(plan.workload, plan.budget, choice.predicted, planned.profile, most, assembly.own),
                Machine(plan.hardware, device, make_meter(resting, device), limit),
                subscribers=(*subscribers, *tensorboard_subscribers()),
                stop=flag,
                cache_dir=run_cache_folder(assembly.request.machine.cache_dir, folder),
                commands=commands_of_run(),
            )
            resumed = run.resume()
            if not resumed:
                _store_initial_weights(assembly, run.weights, run.manifest)
            run.infinite_buffers = infinite_buffers(assembly.chain.all_units, run.weights)
            if not resumed:
                run.save({})  # from now on the weights need not come from the module that it was given
            work, budget = plan.workload, plan.budget.memory_bytes
            started = (str(folder), name, work.model, work.data, budget, run.enforced, run.predicted)
            run.emit(RunStarted(*started, resumed))
            if warning := replace(plan, memory=memory).machine_warning:
                run.emit(Notice(warning))
            with contextlib.closing(run.freed), by_flag(plan):
                data = assembly.training_data(_placement(device, plan), _decoded_file(run))
                record = strategy.fit(assembly.chain, data, run)
        structure = config_of(name).structure(record)
        replace(assembly.architecture, strategy=name, structure=structure).write(folder, run.manifest)
        run.manifest.announce(run.metrics.written(grows=False))
        write_json_atomic(folder / "record.json", record.to_json(), run.manifest)
        run.manifest.settle()
        run.kept_weights.remove_all()
        keep_run(assembly.request.machine, record, plan)
    if record.excess is not None:
        peak, allowed = map(format_bytes, record.excess)
        raise BudgetExceededError(
            f"the run was measured at {peak}, above its budget of {allowed}. "
            f"Its model and record are kept; run again with a larger {plan.budget.memory_flag}."
        )
    return record


def _new_folder(out: str | Path | None, plan: Plan) -> Path:
    if out is not None:
        given = expanded(out)
        require_run_folder(given)
        given.mkdir(parents=True, exist_ok=True)
        return given
    strategy = plan.choice.strategy if plan.choice else "none"
    data = plan.workload.data.rpartition("/")[2].replace(":", "-")
    stem = f"{shortened(plan.workload.model, 80)}-{shortened(data, 80)}-{strategy}".replace(":", "-").replace("/", "-")
    require_folder(_RUNS)
    for number in itertools.count(1):
        folder = _RUNS / f"{stem}-{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def for_launch(request: Request, here: World) -> Request:
    """The request with a run folder that a restart of the same launch finds."""
    machine = request.machine
    return replace(request, machine=replace(machine, out=machine.out or f"runs/{here.run_id or 'launch'}"))


def begun(request: Request, here: World) -> str | None:
    """The run folder that this round continues; None if it begins a new run.

    The folder decides, not a count of restarts: an interrupted run is resumed if the request is the same. Files of a
    process that was lost before the run could be resumed are removed by the next round.
    """
    folder = Path(str(request.machine.out))
    if (folder / "record.json").exists():
        return None
    if (folder / FIRST_FILES[-1]).exists():
        return str(folder) if _same(request, folder) else None
    found = [each for each in folder.iterdir() if each.name != LOCK_FILE] if folder.is_dir() else []
    drafts = (*FIRST_FILES, MANIFEST_FILE)
    if here.restarts and all(each.is_file() and each.name.removesuffix(".tmp") in drafts for each in found):
        for each in found:
            each.unlink()
    return None


def finished(request: Request, here: World) -> dict[str, Any] | None:
    """The record of a run that an earlier round ended, whose process was lost while it exited."""
    folder = Path(str(request.machine.out))
    ended = here.restarts and (folder / "record.json").exists() and _same(request, folder)
    return read_record(folder).to_json() if ended else None


def _same(request: Request, folder: Path) -> bool:
    """Whether a run folder has the same request."""
    try:
        before = read_data(Request, folder / "request.json")
    except CheckpointError:
        return False
    now = with_absolute_paths(request)
    return before.machine.cache_dir == now.machine.cache_dir and replace(before, machine=now.machine) == now
