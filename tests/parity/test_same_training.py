"""Ways of training that must end with the same weights, compared after whole runs on digits."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import start
from parity_helpers import assert_same, in_blocks, interrupt, train_plainly
from safetensors.torch import load_file
from torch import Tensor, nn

import snugfit
from snugfit._storage.manifest import Manifest
from snugfit._storage.run_folder import read_record
from snugfit._training.events import CacheProgress, Event, PhaseDone, StepDone

pytestmark = pytest.mark.usefixtures("measured_once")

OPTIONS = {"epochs": 2, "max_train": 96, "max_val": 40, "image_size": 16, "batch_size": 32, "seed": 3, "augment": True}


def tiny_network() -> nn.Module:
    """Three conv units with BatchNorm, and a head."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for narrow, wide in ((1, 8), (8, 12), (12, 16)):
        layers += [nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 4, 10))


def network_with_dropout() -> nn.Module:
    """The same, with dropout before the head."""
    layers = list(tiny_network())  # type: ignore[call-overload]
    return nn.Sequential(*layers[:-2], nn.Dropout(0.2), *layers[-2:])


def one_unit_network() -> nn.Module:
    """A single conv unit, and a head."""
    torch.manual_seed(0)
    unit = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*unit, nn.Flatten(), nn.Linear(8 * 16, 10))


def slow(*rows: Any) -> list[Any]:
    """Rows whose parts quick rows have, too."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rows]


Stop = tuple[type[Event], int]
STOPS: list[Stop] = [
    (StepDone, 3),
    (StepDone, 14),
    (CacheProgress, 2),
    (CacheProgress, 8),
    (PhaseDone, 1),
    (PhaseDone, 2),
]
EXACT = {"cache_dtype": "float32"}
THREE_BLOCKS = ((0, 0, 16), (1, 1, 32), (2, 2, 24))


def train_in_blocks(folder: Path, **options: object) -> tuple[dict[str, Tensor], snugfit.Record]:
    """Weights of every unit and every exit, not only those of the exit that was chosen, and the record."""
    settings = {**OPTIONS, "strategy": "blockwise", "module_units": "1", **options}
    record = in_blocks(snugfit.plan(tiny_network(), "digits", **settings), *THREE_BLOCKS).run((), out=folder)
    return all_weights(folder), record


def all_weights(run: Path) -> dict[str, Tensor]:
    files = sorted([*(run / "weights").glob("*.safetensors"), *(run / "exits").glob("*.safetensors")])
    return {f"{file.parent.name}/{file.stem}/{key}": value for file in files for key, value in load_file(file).items()}


def train(folder: Path, network: Callable[[], nn.Module] = tiny_network, **options: object) -> dict[str, Tensor]:
    snugfit.plan(network(), "digits", **{**OPTIONS, **options}).run((), out=folder)
    return load_file(folder / "model.safetensors")


Once = Callable[[str, Callable[[Path], Any]], Any]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes a run in a folder when it is first asked for it by its name, and gives later tests the same answer."""
    made: dict[str, Any] = {}

    def call(name: str, make: Callable[[Path], Any]) -> Any:
        if name not in made:
            made[name] = make(tmp_path_factory.mktemp("once") / "run")
        return made[name]

    return call


def test_checkpoint_is_backprop(tmp_path: Path) -> None:
    """BatchNorm's buffers too: naive recomputation would update them twice."""
    plain = train(tmp_path / "a", strategy="backprop")
    recomputed = train(tmp_path / "b", strategy="checkpoint")
    assert int(plain["1.num_batches_tracked"]) == 6
    assert_same(plain, recomputed, tolerance=1e-6)


def test_bfloat16_weights_end_as_float32_of_the_same_values(tmp_path: Path) -> None:
    """With recomputation too, because rounding depends on names, steps and float32 gradients alone."""
    options = {"weight_dtype": "bfloat16", "optimizer_state": "int8"}
    plain = train(tmp_path / "a", strategy="backprop", **options)
    assert_same(plain, train(tmp_path / "b", strategy="checkpoint", **options), tolerance=2**-6)
    assert {value.dtype for value in plain.values() if value.is_floating_point()} == {torch.float32}
    rounded = {name for name, value in plain.items() if torch.equal(value, value.bfloat16().to(value.dtype))}
    assert {name for name in rounded if name.endswith("weight")} == {"0.weight", "4.weight", "8.weight", "13.weight"}
    exact = train(tmp_path / "c", strategy="backprop")
    for name in ("0.weight", "13.weight"):
        assert 0 < (plain[name] - exact[name]).square().mean().sqrt() < 0.02 * exact[name].square().mean().sqrt()


def test_one_block_with_the_networks_own_loss_is_backprop(tmp_path: Path) -> None:
    """The last unit's local loss is the network's own, so a network of one unit trains by it alone."""
    plain = train(tmp_path / "a", one_unit_network, strategy="backprop")
    local = train(tmp_path / "b", one_unit_network, strategy="blockwise", batch_limit=32)
    assert int(plain["1.num_batches_tracked"]) == 6
    statistics = [{name: run.pop(name) for name in ("1.running_mean", "1.running_var")} for run in (plain, local)]
    assert_same(plain, local, tolerance=1e-6)
    assert_same(*statistics, tolerance=1e-4)  # float32 sums over 32 images at once, and over 8


def test_backprop_is_the_loop_anyone_would_write(tmp_path: Path) -> None:
    plain = train_plainly(tiny_network().train(), OPTIONS)
    ours = train(tmp_path / "run", strategy="backprop", schedule="constant", keep="last")
    assert_same(plain, ours, tolerance=1e-4)


@pytest.mark.parametrize("settings", [EXACT, *slow({**EXACT, "views": 2})])
def test_cached_activations_are_the_recomputed_ones(once: Once, settings: dict[str, object]) -> None:
    """Without augmentation a cache and the trained units say the same; so do the blocks trained on them."""
    cached, record = once(
        f"cached {settings}", lambda folder: train_in_blocks(folder, cache="always", augment=False, **settings)
    )
    assert [phase.cache_bytes > 0 for phase in record.phases] == [True, True, False, False]
    assert record.measured["storage_bytes"] > 0 and not list(Path(record.run_dir, "cache").glob("*"))
    recomputed, record = once("never", lambda folder: train_in_blocks(folder, cache="never", augment=False))
    assert record.measured["storage_bytes"] == 0
    assert_same(cached, recomputed, tolerance=1e-5)


QUICK: list[dict[str, Any]] = [
    {"strategy": "backprop"},
    {
        "strategy": "backprop", "clip_norm": 0.5, "schedule": "one-cycle", "mixup": 0.4, "cutmix": 1.0,
        "activations": "int8", "optimizer_state": "bfloat16",
    },
    {
        "strategy": "checkpoint", "optimizer": "adamw", "weight_dtype": "bfloat16", "precision": "bfloat16",
        "loss": "focal", "focal_gamma": 0.5,
    },
    {
        "strategy": "checkpoint", "precision": "float16", "optimizer": "adamw", "optimizer_state": "int8", "ema": 0.9,
        "schedule": "step", "class_weights": "balanced",
    },
    {"strategy": "feedback", "feedback_rule": "dfa"},
]  # fmt: skip
"""Everything that a checkpoint may hold, several things a run: each alone is slow."""
ALONE = [
    {"strategy": "backprop", "optimizer_state": "int8"},
    {"strategy": "checkpoint", "optimizer": "adamw", "optimizer_state": "int8"},
    {"strategy": "backprop", "optimizer_state": "bfloat16"},
    {"strategy": "backprop", "activations": "int8"},
    {"strategy": "backprop", "activations": "int4"},
    {"strategy": "backprop", "optimizer_state": "int8", "weight_dtype": "bfloat16"},
    {"strategy": "checkpoint", "optimizer": "adamw", "weight_dtype": "bfloat16", "precision": "bfloat16"},
    {"strategy": "backprop", "precision": "float16"},
    {"strategy": "checkpoint", "precision": "float16", "optimizer": "adamw", "optimizer_state": "int8"},
    {"strategy": "checkpoint", "class_weights": "balanced"},
    {"strategy": "checkpoint", "loss": "focal", "focal_gamma": 0.5},
    {"strategy": "backprop", "clip_norm": 0.5, "schedule": "one-cycle"},
    {"strategy": "checkpoint", "schedule": "step"},
    {"strategy": "backprop", "ema": 0.9},
    {"strategy": "backprop", "mixup": 0.4, "cutmix": 1.0},
    {"strategy": "checkpoint", "ema": 0.9, "optimizer": "adamw", "optimizer_state": "int8"},
    {"strategy": "feedback", "feedback_rule": "drtp"},
    {"strategy": "feedback", "feedback_rule": "pepita"},
]


@pytest.mark.parametrize("options", [*QUICK, *slow(*ALONE)], ids=lambda options: "-".join(map(str, options.values())))
def test_a_resumed_whole_network_is_uninterrupted(tmp_path: Path, options: dict[str, Any]) -> None:
    """Random matrices of feedback rules, too, are those of before."""
    whole = train(tmp_path / "whole", network_with_dropout, **options)
    plan = snugfit.plan(network_with_dropout(), "digits", **options, **OPTIONS)
    interrupt(plan, tmp_path / "stopped", count=4)
    snugfit.resume(tmp_path / "stopped", (), model=network_with_dropout())
    assert_same(whole, load_file(tmp_path / "stopped" / "model.safetensors"))
    scales = [read_record(tmp_path / name).measured["loss_scale"] for name in ("whole", "stopped")]
    assert scales[0] == scales[1] and (scales[0] is not None) == (options.get("precision") == "float16")


def dropping_network() -> nn.Module:
    """A network whose BatchNorm statistics depend on what dropout draws."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for narrow, wide in ((1, 8), (8, 12)):
        layers += [nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(2)]
        layers.append(nn.Dropout(0.3))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 16, 10))


@pytest.mark.parametrize(
    ("strategy", "stop"),
    [
        *(("backprop", 3), ("blockwise", 4)),
        *slow(("backprop", 2), ("backprop", 4), ("backprop", 6), ("blockwise", 2), ("blockwise", 3), ("blockwise", 6)),
    ],
)
def test_resumed_averaging_is_uninterrupted(tmp_path: Path, once: Once, strategy: str, stop: int) -> None:
    """Within an epoch, where a checkpoint holds averaged weights beside the trained ones, and at the end of both."""
    units = {"local_loss": "lls-mxm", "module_units": "1"} if strategy == "blockwise" else {}
    options = {**OPTIONS, "optimizer": "schedulefree", "strategy": strategy, **units}
    whole = once(strategy, lambda folder: snugfit.plan(dropping_network(), "digits", **options).run((), out=folder))
    plan = snugfit.plan(dropping_network(), "digits", **options)
    interrupt(plan, tmp_path / "stopped", count=stop)
    snugfit.resume(tmp_path / "stopped", (), model=dropping_network())
    folders = Path(whole.run_dir), tmp_path / "stopped"
    assert_same(*(load_file(folder / "model.safetensors") for folder in folders))
    assert_same(*map(all_weights, folders))


@pytest.mark.parametrize(
    "stops",
    [
        ((PhaseDone, 1), (StepDone, 2), (CacheProgress, 2)),
        *slow(*(((stop,),) for stop in STOPS)),
    ],
)
def test_resumed_blocks_are_uninterrupted(
    tmp_path: Path, once: Once, stops: tuple[tuple[type[Event], int], ...]
) -> None:
    """Stopped between two blocks, within a block, and while its outputs are written."""
    whole, _ = once("views", lambda folder: train_in_blocks(folder, views=2))
    plan = snugfit.plan(tiny_network(), "digits", strategy="blockwise", module_units="1", views=2, **OPTIONS)
    first, *later = stops
    interrupt(in_blocks(plan, *THREE_BLOCKS), tmp_path / "stopped", *first)
    for stop in later:
        interrupt(None, tmp_path / "stopped", *stop, model=tiny_network())
    snugfit.resume(tmp_path / "stopped", (), model=tiny_network())
    assert_same(whole, all_weights(tmp_path / "stopped"))
    assert not list((tmp_path / "stopped" / "cache").glob("*"))


@pytest.mark.parametrize("dtype", ["float16", "uint8", *slow("bfloat16")])
def test_smaller_cache_types_train_nearly_alike(tmp_path: Path, once: Once, dtype: str) -> None:
    options = {"cache": "always", "augment": False}
    exact, _ = once(f"cached {EXACT}", lambda folder: train_in_blocks(folder, **options, **EXACT))
    rounded, _ = train_in_blocks(tmp_path / "b", **options, cache_dtype=dtype)
    first = [name for name in exact if name.startswith(("weights/unit_000", "exits/unit_000"))]
    assert first and all(torch.equal(exact[name], rounded[name]) for name in first), "its inputs are the images"
    deeper = [name for name in exact if name.endswith("weight") and name not in first]
    assert deeper and any(not torch.equal(exact[name], rounded[name]) for name in deeper)
    for name in deeper:
        torch.testing.assert_close(rounded[name], exact[name], rtol=0.2, atol=0.2)


def test_the_saturation_stop_opens_no_deeper_block(tmp_path: Path) -> None:
    """With a learning rate that changes nothing, a block is better than the first by chance; with this seed, none."""
    _, record = train_in_blocks(tmp_path, saturation_stop=True, lr=1e-12, seed=1)
    assert [phase.name.partition(":")[0] for phase in record.phases] == ["block 1", "block 2", "exit"]
    assert len(record.exits) == 2 and record.exit is not None and record.exit["of"] == 3


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    """SIGKILL at ten moments of a run; the weights are those of a run that was left alone."""
    options = [
        "--model", "vgg8", "--data", "digits", "--image-size", "16", "--max-train", "256", "--max-val", "40",
        "--epochs", "3", "--batch-size", "16", "--strategy", "blockwise", "--threads", "2", "--memory", "80MB",
        "--module-units", "1", "--batch-limit", "96", "--rho", "0", "--no-report",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start("train", *options, "--out", str(whole)).wait() == 0
    moments = random.Random(0)
    killed.mkdir()
    for name in ("request.json", "profile.json", "plan.json", "architecture.json"):
        shutil.copy(whole / name, killed / name)  # another measurement might choose other batches
    Manifest.of(killed)
    process, kills = start("train", "--resume", str(killed)), 0
    while kills < 10:
        while not (killed / "checkpoint").exists() and process.poll() is None:
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=moments.uniform(1, 8))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        if (killed / "record.json").exists():
            break
        process = start("train", "--resume", str(killed))
    finished = process.wait() == 0 or (killed / "record.json").exists()
    assert finished, process.stderr.read() if process.stderr else ""
    assert kills >= 5, f"the run was over after {kills} kills"
    assert_same(all_weights(whole), all_weights(killed))
