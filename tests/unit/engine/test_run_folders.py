"""Real runs of a tiny network: planned without touching it, trained, loaded, and refused where damaged."""

import copy
import json
import shutil
import signal

import pytest
import torch

import snugfit
from snugfit._engine import running
from snugfit._engine.loading import Architecture
from snugfit._storage.manifest import Manifest
from snugfit.errors import CheckpointError, ModelError, UsageError


def make_net():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2),
    )  # fmt: skip


def make_data():
    import torch
    from torch.utils.data import TensorDataset

    labels = torch.arange(128) % 2
    pixels = torch.rand(128, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 0.5 + labels.view(-1, 1, 1, 1) * 0.5
    return tuple(TensorDataset(pixels[part], labels[part]) for part in (slice(0, 96), slice(96, 112), slice(112, 128)))


def plan_and_train():
    import copy
    import resource

    import torch

    import snugfit

    found = {}
    before = resource.getrlimit(resource.RLIMIT_DATA)
    for strategy in ("backprop", "blockwise"):
        module = make_net()
        weights = copy.deepcopy(module.state_dict())
        plan = snugfit.plan(
            module,
            make_data(),
            snugfit.Budget("80MB"),
            strategy=strategy,
            **({"module_units": "1"} if strategy == "blockwise" else {}),
            epochs=2,
            threads=1,
            batch_size=4,
            augment=False,
            lr=0.05,
        )
        same = all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
        plain = {type(layer).__module__.partition(".")[0] for layer in module} == {"torch"}
        gradients = any(parameter.grad is not None for parameter in module.parameters())
        record = plan.run((), out=strategy)
        model = record.model
        images = torch.stack([image for image, _ in make_data()[2]])
        found[strategy] = {
            "untouched": same and plain and not gradients and module.training,
            "peak": record.measured["peak_bytes"], "predicted": record.predicted["peak_bytes"],
            "accuracy": record.accuracy["test"], "training": model.training,
            "logits": model((images - 0.5) / 0.5).tolist(),
            "limit": resource.getrlimit(resource.RLIMIT_DATA) == before, "exit": record.exit,
        }  # fmt: skip
    try:
        snugfit.plan(make_net(), make_data(), snugfit.Budget("3MB"), epochs=1, batch_size=8, threads=1).run(
            (), out="never"
        )
    except snugfit.errors.InfeasibleBudgetError as error:
        found["infeasible"] = {"lacking": error.lacking_bytes, "smallest": error.smallest_bytes}
    found["limit"] = resource.getrlimit(resource.RLIMIT_DATA) == before
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(fresh_process, folder):
    return fresh_process(plan_and_train, helpers=(make_net, make_data), folder=folder)["plan_and_train"]


strategies = pytest.mark.parametrize("strategy", ["backprop", "blockwise"])


@strategies
def test_planning_leaves_the_module_as_it_was(trained, strategy):
    assert trained[strategy]["untouched"]


@strategies
def test_the_run_stays_within_prediction_and_budget_and_lifts_its_limit(trained, strategy):
    run = trained[strategy]
    assert 0 < run["peak"] <= run["predicted"] <= 80_000_000
    assert run["limit"] and trained["limit"]


@strategies
def test_bright_and_dark_images_are_told_apart(trained, strategy):
    assert trained[strategy]["accuracy"] > 0.9 and not trained[strategy]["training"]


def test_a_hopeless_budget_says_what_would_do(trained, folder):
    told = trained["infeasible"]
    assert told["smallest"] == 3_000_000 + told["lacking"] > 3_000_000
    assert not (folder / "never").exists()


@strategies
@pytest.mark.parametrize("given", ["module", "function"])
def test_a_run_is_loaded_again(trained, folder, strategy, given):
    module = make_net()
    before = copy.deepcopy(module.state_dict())
    loaded = snugfit.load(folder / strategy, module if given == "module" else make_net)
    images = torch.stack([image for image, _ in make_data()[2]])
    torch.testing.assert_close(loaded((images - 0.5) / 0.5), torch.tensor(trained[strategy]["logits"]))
    assert not loaded.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items()), "the caller's module"


def test_the_exit_of_a_blockwise_run_is_in_range(trained):
    taken = trained["blockwise"]["exit"]
    assert 0 <= taken["index"] < taken["of"] == 3 and trained["backprop"]["exit"] is None


@pytest.fixture
def damaged(trained, folder, tmp_path):
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(folder / "backprop", tmp_path / "run")


def test_without_the_module_it_asks_for_it(damaged):
    with pytest.raises(ModelError, match="pass it again"):
        snugfit.load(damaged)


def test_a_folder_that_is_no_run(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="not a run folder"):
            snugfit.load(path)


def test_nothing_is_left_in_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(CheckpointError, match="not a run folder"):
        snugfit.resume(tmp_path, ())
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run(damaged):
    (damaged / "record.json").unlink()
    Manifest.of(damaged)
    with pytest.raises(CheckpointError, match="not finished; continue it with snugfit train --resume"):
        snugfit.load(damaged, make_net)


def test_a_signal_that_comes_once_training_is_done_ends_nothing(tmp_path, monkeypatch):
    """It ended the process before the record was written, or said to resume a run that was finished."""
    ended, real = [], running.write_json_atomic
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append("the process"))

    def written(path, *more):
        if path.name == "record.json":
            signal.raise_signal(signal.SIGTERM)
        return real(path, *more)

    monkeypatch.setattr(running, "write_json_atomic", written)
    plan = snugfit.plan(make_net(), make_data(), strategy="backprop", epochs=1, batch_size=8, augment=False)
    try:
        assert plan.run((), out="run").run_dir == "run" and not ended
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(UsageError, match="is finished; `snugfit report run` draws its page"):
        snugfit.resume("run", model=make_net, data=make_data())


@pytest.mark.parametrize("name", ["record.json", "architecture.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"{}", b"\xff\xfe{}", b'{"exits": 3, "model": 1}'])
def test_damaged_descriptions(damaged, name, content):
    (damaged / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        snugfit.load(damaged, make_net)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncated_weights(damaged, kept):
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        snugfit.load(damaged, make_net)


def test_missing_weights(damaged):
    (damaged / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        snugfit.load(damaged, make_net)


def test_another_model_than_was_trained(damaged):
    def wider():
        module = make_net()
        module[3], module[5] = torch.nn.Conv2d(4, 6, 3, padding=1), torch.nn.Conv2d(6, 4, 3, padding=1, stride=2)
        return module

    with pytest.raises(CheckpointError, match="belongs to another model"):
        snugfit.load(damaged, wider)


def test_the_architecture_survives_its_folder(tmp_path):
    made = Architecture("vgg8", ("a", "b"), (3, 32, 32), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "digits")
    made.write(tmp_path, Manifest(tmp_path))
    assert Architecture.read(tmp_path) == made
    assert set(json.loads((tmp_path / "architecture.json").read_text())) >= {"model", "class_names", "input_shape"}
    assert all(parameter.is_meta for parameter in made.build().parameters())


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert running._new_folder("~/runs/a", None) == tmp_path / "runs" / "a"
    assert not (tmp_path / "~").exists()
