"""What a caller may say, and what is answered to the rest."""

import os
from dataclasses import asdict, fields, replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import snugfit
from snugfit._api.planning import RunnablePlan, _budget_options
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.known import check_foreign_options, check_strategies
from snugfit._core.option_groups import ModelOptions
from snugfit._core.paths import run_cache_folder
from snugfit._core.plan import Candidate, Plan
from snugfit._core.record import Record
from snugfit._core.registry import strategies
from snugfit._core.request import Request, StrategyOptions
from snugfit._core.workload import Workload
from snugfit._engine import process
from snugfit._engine.builder import make_strategies, own_splits
from snugfit._engine.process import choose_device, describe_hardware
from snugfit._engine.running import _new_folder, with_absolute_paths
from snugfit._storage.files import write_json_atomic
from snugfit._storage.manifest import Manifest
from snugfit._storage.outputs import require_places
from snugfit.errors import BudgetExceededError, CheckpointError, DataError, UnknownNameError, UsageError


def test_options_find_their_group():
    request = Request.of(epochs=3, max_train=100, rho=0.2, weights="w.safetensors", threads=1)
    assert (request.training.epochs, request.data.max_train, request.strategy.rho) == (3, 100, 0.2)
    assert (request.model.weights, request.machine.threads) == ("w.safetensors", 1)
    assert Request.of() == Request()


def test_an_unknown_option_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'epochs'") as error:
        snugfit.plan("vgg8", "digits", epoch=3)
    assert error.value.exit_code == 2 and error.value.kind == "option"


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        ("backprop", {"local_loss": "lls"}, "--local-loss lls is an option of blockwise, not of backprop"),
        ("blockwise", {"accumulate": False}, "--no-accumulate is an option of backprop and checkpoint and"),
        ("blockwise", {"scheme": "full"}, "--scheme full is an option of elastic and sidenet, not of blockwise"),
        ("tiled", {"saturation_stop": True}, "--saturation-stop is an option of blockwise, not of tiled"),
        ("feedback", {"rho": 0.3}, "--rho 0.3 is .*; leave it out, or use --strategy blockwise"),
    ],
)
def test_options_of_other_strategies_are_refused_where_one_is_named(strategy, options, said):
    with pytest.raises(UsageError, match=said):
        snugfit.plan("vgg8", "no-such-data", strategy=strategy, **options)
    check_foreign_options(Request.of(strategy="auto", **options))


@pytest.mark.parametrize("config", strategies().values(), ids=lambda config: config.name)
def test_a_strategy_takes_every_option_of_its_own(config):
    for option in fields(config.options):
        changed = {bool: not option.default, int: 3, float: 0.25}.get(type(option.default), "other")
        request = Request()
        object.__setattr__(request.strategy, "strategy", config.name)
        object.__setattr__(request.strategy, option.name, changed)
        check_foreign_options(request)


def test_an_unknown_local_loss_or_strategy_is_told_before_any_work():
    with pytest.raises(UnknownNameError, match=r"local loss 'ann'.*Did you mean 'aan'"):
        snugfit.plan("vgg8", "no-such-data", local_loss="ann")
    with pytest.raises(UnknownNameError, match="'ann'"):
        snugfit.plan("vgg8", "no-such-data", strategy="backprop", local_loss="ann")
    with pytest.raises(UnknownNameError, match=r"--strategy 'blockwize'.*'blockwise'"):
        snugfit.plan("vgg8", "no-such-data", strategy="blockwize")
    with pytest.raises(UnknownNameError, match=r"--aim 'speed'.*accuracy, memory, time"):
        snugfit.plan("vgg8", "no-such-data", aim="speed")
    with pytest.raises(UnknownNameError, match=r"--feedback-rule 'drpt'.*Did you mean 'drtp'"):
        snugfit.plan("vgg8", "no-such-data", feedback_rule="drpt")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("views", 0),
        ("devices", 0),
        ("rho", -0.1),
        ("rho", 1.5),
        ("threads", 0),
        ("block_units", 0),
        ("exit_tolerance", -0.1),
        ("exit_tolerance", float("nan")),
    ],
)
def test_numbers_that_make_no_sense(option, value):
    with pytest.raises(UsageError, match="--" + option.replace("_", "-")):
        snugfit.plan("vgg8", "digits", **{option: value})


@pytest.mark.parametrize("budget", [Budget(), Budget("100MB"), Budget("512MiB", "1.5GB", 0.25, 3)])
def test_a_budget_as_options_is_the_same_budget(budget):
    options = _budget_options(budget)
    assert Budget(**asdict(options)) == budget
    assert options.memory is None or options.memory == f"{budget.memory_bytes}B"


def test_strategies_get_the_options_that_they_know():
    request = Request(strategy=StrategyOptions(strategy="blockwise", rho=0.1, local_loss="linear", accumulate=False))
    (blockwise,) = make_strategies(request).strategies
    assert (blockwise.name, blockwise.rho, blockwise.local_loss) == ("blockwise", 0.1, "linear")
    (feedback,) = make_strategies(
        Request(strategy=StrategyOptions(strategy="feedback", feedback_rule="pepita"))
    ).strategies
    assert (feedback.name, feedback.feedback_rule) == ("feedback", "pepita")
    every = make_strategies(Request(strategy=StrategyOptions(accumulate=False))).strategies
    assert [strategy.name for strategy in every] == ["backprop", "checkpoint", "blockwise"]
    assert [strategy.accumulate for strategy in every[:2]] == [False, False]


def test_auto_never_takes_what_is_there_to_compare_with():
    """However much faster its steps are: the planner is not even told of it."""
    considered = make_strategies(Request())
    names = {strategy.name for strategy in considered.strategies}
    assert set(considered.left_out) == {"feedback", "tiled", "elastic", "sidenet"}
    plan = snugfit.plan(small_net, "digits", image_size=8, max_train=64, epochs=1).plan
    assert {candidate.strategy for candidate in plan.candidates if candidate.considered} == names
    assert {candidate.strategy for candidate in plan.candidates} == set(strategies()), "each has a row, and a reason"
    assert all(candidate.reasons for candidate in plan.candidates if not candidate.considered)


def test_what_is_there_decides_what_is_considered():
    def names(**options):
        return {each.name for each in make_strategies(Request.of(**options)).strategies}

    whole = {"backprop", "checkpoint", "blockwise"}
    assert names(weights="w.pth") == whole | {"sidenet", "elastic"}
    assert names(time_ratio=0.5) == {"elastic"}
    assert names(activations="int8") == {"backprop"}
    assert names(weight_dtype="bfloat16") == names(precision="float16") == {"backprop", "checkpoint"}
    assert names(devices=2) == whole | {"tiled"}
    assert make_strategies(Request.of(devices=2)).strategies[-1].processes == 2
    (waiting,) = make_strategies(Request.of(memory="1GB")).standby
    assert waiting.name == "tiled" and waiting.processes == 1
    assert make_strategies(Request.of(weights="w", scheme="full")).left_out["sidenet"] == "has no --scheme full"
    assert make_strategies(Request()).left_out["elastic"].endswith("--time-ratio, like 0.5, or pre-trained --weights")


@pytest.mark.parametrize(
    "options",
    [
        {"class_weights": "balanced"},
        {"loss": "focal"},
        {"clip_norm": 0.5},
        {"ema": 0.99},
        {"patience": 2},
        {"mixup": 0.2},
        {"cutmix": 0.5},
    ],
    ids=str,
)
def test_what_changes_the_networks_loss_is_for_strategies_that_train_by_it(options):
    selection = make_strategies(Request.of(**options))
    assert {each.name for each in selection.strategies} == {"backprop", "checkpoint"} and not selection.standby
    (flag,) = (f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    assert selection.left_out["blockwise"] == f"does not support {flag}"
    for name in ("blockwise", "elastic", "feedback", "sidenet", "tiled"):
        with pytest.raises(UsageError, match=f"{name} does not support {flag}; use backprop or checkpoint"):
            make_strategies(Request.of(strategy=name, **options))


def test_a_strategy_that_cannot_keep_less_says_so():
    with pytest.raises(UsageError, match="tiled does not support --weight-dtype bfloat16; use backprop or checkpoint"):
        make_strategies(Request.of(strategy="tiled", weight_dtype="bfloat16"))
    with pytest.raises(UsageError, match="blockwise does not support --precision float16; use backprop or checkpoint"):
        make_strategies(Request.of(strategy="blockwise", precision="float16"))
    with pytest.raises(UsageError, match="--activations int8 rounds feature maps in float32 and bfloat16 only"):
        Request.of(activations="int8", precision="float16")
    with pytest.raises(
        UsageError, match="blockwise does not support --activations int4; use backprop, or leave it out"
    ):
        make_strategies(Request.of(strategy="blockwise", activations="int4"))
    with pytest.raises(UsageError, match="feedback does not support --label-smoothing"):
        make_strategies(Request.of(strategy="feedback", label_smoothing=0.1))


@pytest.mark.parametrize("name", ["elastic", "sidenet", "tiled"])
def test_averaged_weights_are_for_strategies_that_train_all_layers_on_whole_feature_maps(name):
    options = {"optimizer": "schedulefree", "weights": "w", "memory": "1GB"}
    with pytest.raises(UsageError, match=f"{name} does not support --optimizer schedulefree, .*; use sgd or adamw"):
        make_strategies(Request.of(strategy=name, **options))
    auto = make_strategies(Request.of(**options))
    assert {each.name for each in auto.strategies} == {"backprop", "checkpoint", "blockwise"} and not auto.standby
    assert auto.left_out[name].startswith("does not support --optimizer schedulefree, ")


@pytest.mark.parametrize(
    ("name", "options", "change", "reason"),
    [
        ("backprop", {"batch_norm": "exact", "optimizer": "schedulefree"}, {"optimizer": "adamw"}, "sgd or adamw"),
        ("backprop", {"batch_norm": "exact", "activations": "int8"}, {"batch_norm": "micro"}, "--activations int8"),
        ("backprop", {"batch_norm": "exact", "weight_dtype": "bfloat16"}, {"batch_norm": "micro"}, "--weight-dtype"),
        ("backprop", {"batch_norm": "exact", "precision": "float16"}, {"batch_norm": "micro"}, "--precision float16"),
        ("elastic", {"scheme": "prunetrain", "optimizer_state": "int8"}, {"optimizer_state": "bfloat16"}, "removed"),
        ("elastic", {"scheme": "prunetrain", "optimizer_state": "int8"}, {"scheme": "elastic"}, "removed"),
        ("tiled", {"devices": 2, "precision": "bfloat16"}, {"devices": 1}, "--precision float32 only"),
    ],
)
def test_options_of_a_strategy_that_contradict_others_are_refused_before_torch_is_imported(
    name, options, change, reason
):
    with pytest.raises(UsageError, match=f"--strategy {name}: .*{reason}"):
        check_strategies(Request.of(strategy=name, **options))
    check_strategies(Request.of(strategy=name, **options | change))
    assert reason in strategies()[name].why_not(Request.of(weights="w", memory="1GB", **options))
    assert strategies()[name].why_not(Request.of(weights="w", memory="1GB", **options | change)) is None


def test_a_plan_over_processes_does_not_run_on_one():
    settings = {"processes": 2}
    plan = replace(made_plan(candidates=(Candidate("tiled", True, settings),)), command=("snugfit", "cluster"))
    with pytest.raises(UsageError, match=r"takes 2 processes, and this is one; start them with `snugfit cluster`"):
        RunnablePlan(plan, None, None, assembly=None, baseline=None).run()


def small_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def images(count=12):
    return TensorDataset(torch.rand(count, 1, 8, 8), torch.arange(count) % 2)


def test_data_may_be_one_two_or_three_sets():
    for given in (images(), (images(),), (images(), images(4)), (images(), images(4), images(4))):
        splits = own_splits(given, Request())
        assert splits.image_shape == (1, 8, 8) and len(splits.class_names) == 2
    assert len(splits.test) == 4 and len(splits.val) == 4
    assert own_splits("digits", Request()) is None
    assert own_splits(splits, Request()) is splits


@pytest.mark.parametrize("count", [0, 4])
def test_other_numbers_of_sets_are_refused(count):
    with pytest.raises(UsageError, match="two or three"):
        own_splits((images(),) * count, Request())


def test_a_limit_on_images_holds_for_the_callers_own():
    splits = own_splits((images(), images(6)), Request.of(max_train=5, max_val=2))
    assert (len(splits.train), len(splits.val)) == (5, 2)


@pytest.mark.parametrize("name", ["tpu", "meta", "mps", "cuda"])
def test_devices_that_are_not_there(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError):
        choose_device(name)


def test_the_processor_is_a_device_and_is_described(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == choose_device("cpu") == torch.device("cpu")
    hardware = describe_hardware(torch.device("cpu"))
    assert hardware.device == "cpu" and hardware.name and hardware.memory_bytes > 10**8
    assert hardware.threads == torch.get_num_threads() and hardware.torch == torch.__version__


def test_a_prepared_process_keeps_its_baseline(monkeypatch):
    taken = []
    monkeypatch.setattr(
        process, "take_baseline", lambda threads=None, waiting=None: taken.append(threads) or len(taken)
    )
    monkeypatch.setattr(process, "_prepared", [])
    assert (process.baseline(1), process.baseline(1)) == (1, 2), "an unprepared one takes it anew each time"
    process.prepare_process(4)
    assert process.baseline() == process.baseline(7) == 3
    assert taken == [1, 1, 4]


def test_all_cores_compute_unless_the_user_says_otherwise(monkeypatch):
    taken = []
    monkeypatch.setattr(process, "take_baseline", lambda threads=None, waiting=None: taken.append(threads))
    monkeypatch.setattr(process, "_prepared", [])
    monkeypatch.setattr(process, "cores", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS")
    process.prepare_process()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    process.prepare_process()
    assert taken == [12, None], "torch reads OMP_NUM_THREADS itself"


@pytest.mark.parametrize("where", ["working folder", "data folder"])
def test_a_folder_of_images_is_stored_as_it_was_found(tmp_path, monkeypatch, where):
    (tmp_path / "sets" / "photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "sets" if where == "working folder" else tmp_path)
    monkeypatch.setenv("SNUGFIT_DATA", str(tmp_path / ("sets" if where == "data folder" else ".")))
    stored = with_absolute_paths(Request.of(data="folder:photos", weights="w.safetensors"))
    assert stored.data.data == f"folder:{tmp_path / 'sets' / 'photos'}"
    assert stored.model.weights == str((tmp_path / "sets" if where == "working folder" else tmp_path) / "w.safetensors")


def test_folders_of_caches_are_stored_as_they_were_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    stored = with_absolute_paths(Request.of(data="digits", cache_dir="~/caches", profile_cache="profiles"))
    assert stored.machine.profile_cache == str(tmp_path / "profiles")
    used = run_cache_folder("~/caches", tmp_path / "run")
    assert run_cache_folder(stored.machine.cache_dir, tmp_path / "run") == used
    assert used.parent == tmp_path / "caches"
    require_places(None, "~/caches")
    kept = with_absolute_paths(Request.of(data="digits", profile_cache="renew"))
    assert kept.machine.profile_cache == "renew"


def test_a_home_that_no_user_has_is_refused():
    for name in ("profile_cache", "cache_dir"):
        with pytest.raises(DataError, match="begins with ~ and a name that no user has"):
            with_absolute_paths(Request.of(data="digits", **{name: "~nobody-of-this-name/x"}))


HARDWARE = Hardware("cpu", "cpu", 1, 1, "Linux", "2", True)


def made_plan(model="Net", data="folder:some/where/photos", memory="100MB", candidates=None):
    workload = Workload(model, data, (3, 8, 8), 2, 10, 5, 5)
    return Plan(workload, Budget(memory), HARDWARE, candidates or (Candidate("backprop", True),), 0)


def test_run_folders_are_named_and_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [_new_folder(None, made_plan()).as_posix() for _ in range(2)]
    assert names == ["runs/Net-photos-backprop-1", "runs/Net-photos-backprop-2"]
    odd = _new_folder(None, made_plan("timm:resnet/x", "digits"))
    assert odd.as_posix() == "runs/timm-resnet-x-digits-backprop-1" and odd.is_dir()


@pytest.mark.parametrize("letter", ["x", "é", "\udcff"])
def test_long_names_of_folders_are_shortened(tmp_path, monkeypatch, letter):
    """A name may have 255 bytes."""
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(os.fsencode(letter * 250)[:250])
    folder = _new_folder(None, made_plan(f"package.module:{'f' * 250}", f"folder:sets/{name}"))
    assert folder.is_dir() and folder.name.endswith("-backprop-1")
    used = run_cache_folder("caches", tmp_path / name)
    used.mkdir(parents=True)
    assert run_cache_folder("caches", tmp_path / name[:125] / name) != used


def test_a_folder_that_holds_something_is_never_written_into(tmp_path):
    assert _new_folder(tmp_path / "new" / "run", made_plan()).is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        _new_folder(tmp_path, made_plan())


def test_a_run_above_its_budget_is_a_failed_run(tmp_path, monkeypatch):
    small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "batch_size": 8}
    planned = snugfit.plan("smallconv", "digits", total_memory="2GB", **small)
    monkeypatch.setattr(Record, "excess", (301 * 10**6, 300 * 10**6))
    with pytest.raises(BudgetExceededError, match=r"301\.0 MB, above .* 300\.0 MB.*larger --total-memory"):
        planned.run((), tmp_path / "run")
    assert (tmp_path / "run" / "record.json").exists()


def written_run(folder, request=None, plan=None):
    write_json_atomic(folder / "request.json", (request or Request()).to_json())
    write_json_atomic(folder / "plan.json", (plan or made_plan()).to_json())
    write_json_atomic(folder / "profile.json", {"units": []})
    write_json_atomic(folder / "architecture.json", {})
    Manifest.of(folder)
    return folder


def test_resuming_what_is_no_run(tmp_path):
    with pytest.raises(CheckpointError, match="not a run folder"):
        snugfit.resume(tmp_path)
    with pytest.raises(CheckpointError, match="not a run folder"):
        snugfit.resume(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["request.json", "plan.json", "profile.json"])
@pytest.mark.parametrize("text", ["", '{"model": {', "[]", "null", '{"model": 3, "workload": 3, "units": 7, "x": 1}'])
def test_resuming_a_damaged_run(tmp_path, name, text):
    written_run(tmp_path)
    (tmp_path / name).write_text(text)
    Manifest.of(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name}.*damaged|damaged.*{name}"):
        snugfit.resume(tmp_path)


def test_resuming_a_finished_run(tmp_path):
    (written_run(tmp_path) / "record.json").write_text("{}")
    Manifest.of(tmp_path)
    with pytest.raises(UsageError, match="finished"):
        snugfit.resume(tmp_path)


def test_resuming_a_module_of_the_callers_without_it(tmp_path):
    written_run(tmp_path, Request(model=ModelOptions("python")))
    with pytest.raises(UsageError, match="pass it again"):
        snugfit.resume(tmp_path)
