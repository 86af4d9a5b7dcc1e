"""Weights from files: what is read, what is refused, and which of them are taken."""

import copy
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.utils.data import TensorDataset

from snugfit._chain import Chain, UnitStore
from snugfit._core.request import Request
from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import Workload
from snugfit._data import Subset, from_dataset
from snugfit._engine.builder import assemble, optimizer_of
from snugfit._engine.loading import on_meta
from snugfit._storage.tensor_file import read_weights
from snugfit.errors import CheckpointError, ModelError, UsageError


class Exploit:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def state():
    return {"a": torch.arange(3.0), "b.c": torch.ones(2, 2)}


def test_both_formats_are_read(tmp_path):
    safetensors.torch.save_file(state(), tmp_path / "w.safetensors")
    torch.save(state(), tmp_path / "w.pth")
    torch.save({"state_dict": state(), "epoch": 3}, tmp_path / "wrapped.pth")
    torch.save({"model": state(), "epoch": 3}, tmp_path / "trained.pth")
    for name in ("w.safetensors", "w.pth", "wrapped.pth", "trained.pth"):
        read = read_weights(tmp_path / name)
        assert set(read) == set(state()) and all(torch.equal(read[key], state()[key]) for key in read)


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: {"a": torch.ones(1), "b": e}], ids=["bare", "among weights"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_and_never_run(tmp_path, wrap, zipped):
    trap = tmp_path / "executed"
    torch.save(wrap(Exploit(trap)), tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="holds more than weights"):
        read_weights(tmp_path / "w.pth")
    assert not trap.exists()


def test_a_plain_pickle_is_refused_and_never_run(tmp_path):
    trap = tmp_path / "executed"
    (tmp_path / "w.pth").write_bytes(pickle.dumps(Exploit(trap), protocol=2))
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / "w.pth")
    assert not trap.exists()


def test_a_whole_module_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="holds more than weights"):
        read_weights(tmp_path / "w.pth")


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("kept", [0, 5, 0.5, -1])
def test_truncated_files_are_refused(tmp_path, suffix, kept):
    path = tmp_path / f"w.{suffix}"
    weights = {"a": torch.randn(1000)}
    safetensors.torch.save_file(weights, path) if suffix == "safetensors" else torch.save(weights, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match=r"w\.(safetensors|pth)"):
        read_weights(path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_what_is_no_weights_file(tmp_path, name):
    with pytest.raises(CheckpointError, match="no weights file"):
        read_weights(tmp_path / name)
    (tmp_path / name).write_text("<html>404: not found</html>")
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="no regular file"):
        read_weights(tmp_path / name)


@pytest.mark.parametrize("content", [torch.ones(3), [torch.ones(3)], {"epoch": 3}, {"state_dict": 7}], ids=str)
def test_tensors_without_names_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="weights by name"):
        read_weights(tmp_path / "w.pth")


def network(classes=2, width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(4 * 36, classes),
    )  # fmt: skip


def splits(classes=2):
    return from_dataset(TensorDataset(torch.rand(8 * classes, 1, 8, 8), torch.arange(8 * classes) % classes))


def first_weights(tmp_path, module=None, weights=None, model="python"):
    """What training starts from: the stored weights of all units."""
    made = assemble(Request.of(weights=weights, model=model), splits(), module)
    store = UnitStore(tmp_path / "store")
    made.store_initial_weights(store)
    return {k: v for index in range(len(made.chain.all_units)) for k, v in store.load(index).items()}


def test_training_starts_from_the_callers_weights(tmp_path):
    module = network()
    want = copy.deepcopy(module.state_dict())
    got = first_weights(tmp_path, module)
    assert set(got) == set(want) and all(torch.equal(got[name], want[name]) for name in want)


def test_or_from_those_of_a_file(tmp_path):
    want = network(seed=5).state_dict()
    safetensors.torch.save_file(want, tmp_path / "w.safetensors")
    got = first_weights(tmp_path, network(), str(tmp_path / "w.safetensors"))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_classifier_of_another_size_keeps_its_fresh_weights(tmp_path):
    given, own = network(classes=7, seed=5).state_dict(), network().state_dict()
    torch.save(given, tmp_path / "w.pth")
    got = first_weights(tmp_path, network(), str(tmp_path / "w.pth"))
    for name in own:
        assert torch.equal(got[name], (own if name.startswith("6.") else given)[name]), name


def test_weights_without_counters_of_batches_are_taken(tmp_path):
    given = network(seed=5).state_dict()
    torch.save({k: v for k, v in given.items() if "num_batches" not in k}, tmp_path / "w.pth")
    got = first_weights(tmp_path, network(), str(tmp_path / "w.pth"))
    assert torch.equal(got["0.weight"], given["0.weight"])


@pytest.mark.parametrize(
    "other", [network(width=5).state_dict(), {"x.weight": torch.ones(2)}], ids=["wider", "foreign"]
)
def test_weights_of_another_model_are_refused(tmp_path, other):
    torch.save(other, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        first_weights(tmp_path, network(), str(tmp_path / "w.pth"))


def test_a_head_of_the_wrong_size_is_a_model_error():
    with pytest.raises(ModelError, match=r"outputs of shape \(3,\).*2 classes.*2 logits"):
        assemble(Request.of(model="python"), splits(), network(classes=3))


def test_assembling_leaves_the_callers_module_alone():
    module = network().eval()
    before, kinds = copy.deepcopy(module.state_dict()), [type(layer) for layer in module]
    made = assemble(Request.of(model="python"), splits(), module)
    assert all(p.is_meta for unit in made.chain.all_units for p in unit.module.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not module.training and [type(layer) for layer in module] == kinds
    assert made.module is module


def test_a_function_makes_the_module():
    made = assemble(Request.of(model="python"), splits(3), lambda: network(3))
    assert isinstance(made.module, nn.Sequential) and made.workload.classes == 3
    assert (made.workload.model, made.architecture.model) == ("Sequential", "python"), "named, and never built by it"
    assert made.workload.input_shape == (1, 8, 8) and made.workload.optimizer.lr == 0.01


def test_the_default_learning_rate_is_the_optimizers():
    made = assemble(Request.of(model="python", optimizer="adamw"), splits(), network())
    assert made.workload.optimizer.lr == 0.001
    made = assemble(Request.of(model="python", lr=0.3, batch_size=4), splits(), network())
    assert (made.workload.optimizer.lr, made.workload.batch_limit) == (0.3, 4)


@pytest.mark.parametrize(
    ("model", "layer", "variance"),
    [
        ("vgg11", "features.8.weight", 2 / (256 * 9)), ("resnet20", "layer2.0.conv1.weight", 2 / (32 * 9)),
        ("resnet50", "layer3.1.conv3.weight", 2 / 1024), ("mobilenet_v2", "features.9.conv.2.weight", 2 / 64),
        ("smallconv", "features.8.weight", 1 / (3 * 64 * 9)),
    ],
)  # fmt: skip
def test_convolutions_begin_with_the_variance_of_their_papers(tmp_path, model, layer, variance):
    """He et al. (2015), and torch's own for the networks of LLS; another seed gives other weights of that variance."""
    got = first_weights(tmp_path, model=model)
    assert got[layer].var().item() == pytest.approx(variance, rel=0.1)
    assert model != "vgg11" or not got["features.8.bias"].any()


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 0.001), ({"optimizer": "adamw"}, 0.0001), ({"optimizer": "schedulefree"}, 0.0005), ({"lr": 0.3}, 0.3),
        ({"strategy": "sidenet"}, 0.0006), ({"strategy": "sidenet", "optimizer": "sgd"}, 0.001),
        ({"task": "detect"}, 0.0003),
    ],
)  # fmt: skip
def test_pretrained_weights_learn_at_a_tenth_of_the_default_rate(options, rate):
    optimizer = optimizer_of(Request.of(model="resnet20", weights="weights.safetensors", **options))
    assert optimizer.lr == pytest.approx(rate)


@pytest.mark.parametrize(("count", "size", "tuned"), [(999, 16, True), (1000, 128, False)])
def test_fine_tuning_on_few_images_takes_small_steps_and_prefers_strategies_for_it(count, size, tuned):
    def work(**options):
        options = {"input_shape": "3x8x8", "classes": 2, "max_train": count, "weights": "w.safetensors", **options}
        return assemble(Request.of(model="smallconv", **options)).workload

    assert (work().batch_size, work().batch_limit, work().fine_tunes_few) == (size, size, tuned)
    assert (work(weights=None).batch_size, work(weights=None).fine_tunes_few) == (128, False)
    assert work(batch_size=50).batch_size == work(batch_size=50).batch_limit == 50
    assert (work(batch_limit=8).batch_size, work(batch_limit=8).batch_limit) == (size, 8)


def test_label_smoothing_is_off_by_default_and_part_of_the_workload():
    assert assemble(Request.of(model="python"), splits(), network()).workload.label_smoothing == 0.0
    made = assemble(Request.of(model="python", label_smoothing=0.1), splits(), network())
    assert to_data(made.workload)["label_smoothing"] == 0.1


def unbalanced(classes=3, counts=(1, 3, 6)):
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    whole = TensorDataset(torch.zeros(len(labels), 1, 8, 8), labels)
    few = TensorDataset(torch.zeros(classes, 1, 8, 8), torch.arange(classes))
    return from_dataset(whole, few)


def three_classes():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def test_balanced_class_weights_are_scikit_learns():
    """From the training images alone: those of validation are balanced."""
    made = assemble(Request.of(model="python", class_weights="balanced"), unbalanced(), three_classes())
    labels = made.splits.train.labels
    theirs = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert made.workload.class_weights == pytest.approx(theirs.tolist(), rel=1e-12)
    assert from_data(Workload, to_data(made.workload)) == made.workload
    assert assemble(Request.of(model="python"), unbalanced(), three_classes()).workload.class_weights == ()


def test_class_weights_fit_the_classes():
    given = assemble(Request.of(model="python", class_weights=[1, 2, 3.5]), unbalanced(), three_classes())
    assert given.workload.class_weights == (1, 2, 3.5)
    with pytest.raises(UsageError, match=r"--class-weights has 2 numbers, but .* has 3 classes"):
        assemble(Request.of(model="python", class_weights="1,2"), unbalanced(), three_classes())
    with pytest.raises(UsageError, match=r"--class-weights balanced needs training images of every class.* '1'"):
        assemble(Request.of(model="python", class_weights="balanced"), unbalanced(counts=(4, 0, 4)), three_classes())


def test_a_chain_on_meta_shares_nothing_and_takes_weights_back():
    module = network()
    chain = Chain.from_module(module, (1, 8, 8))
    empty = on_meta(chain)
    assert not {id(p) for p in module.parameters()} & {id(p) for u in empty.all_units for p in u.module.parameters()}
    assert all(t.is_meta for t in empty.to_module().state_dict().values())
    filled = empty.to_module()
    filled.load_state_dict(module.state_dict(), assign=True)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(filled.eval()(x), module.eval()(x))


def test_patience_needs_validation_images():
    given = splits()
    none = replace(given, val=Subset(given.train, np.array([], dtype=np.int64)))
    with pytest.raises(UsageError, match=r"--patience 2 needs validation images, and .* has none"):
        assemble(Request.of(model="python", patience=2), none, network())
    assert assemble(Request.of(model="python", patience=2), given, network()).workload.patience == 2


def test_the_warm_up_is_part_of_the_workload():
    assert assemble(Request.of(model="python"), splits(), network()).workload.optimizer.warmup_epochs == 0.0
    made = assemble(Request.of(model="python", warmup_epochs=0.5, optimizer="adamw"), splits(), network())
    assert to_data(made.workload)["optimizer"]["warmup_epochs"] == 0.5


def test_averaged_weights_have_no_warm_up():
    with pytest.raises(UsageError, match=r"--warmup-epochs 2 is not supported with --optimizer schedulefree"):
        assemble(Request.of(model="python", warmup_epochs=2, optimizer="schedulefree"), splits(), network())


@pytest.mark.parametrize(("epochs", "warm_up"), [(3, 3), (1, 1.5)])
def test_a_warm_up_leaves_epochs_for_the_schedule(epochs, warm_up):
    with pytest.raises(UsageError, match=rf"--warmup-epochs {warm_up:g} leaves none of --epochs {epochs} "):
        Request.of(epochs=epochs, warmup_epochs=warm_up)
