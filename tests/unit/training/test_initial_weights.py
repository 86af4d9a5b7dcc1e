"""Pre-trained weights of our models: taken, or refused with the name of the model that they are of."""

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

from snugfit import _models as models
from snugfit._chain import Chain, UnitStore, initialise_by_reset, release, spill_module
from snugfit._core.request import Request
from snugfit._data import from_dataset
from snugfit._engine.builder import assemble
from snugfit._models.resnet import BottleneckResNet
from snugfit._models.vgg import ImageNetVGG
from snugfit._models.vit import VisionTransformer
from snugfit._training.initial_weights import load_initial_weights
from snugfit.errors import CheckpointError

TINY = {
    "resnet50": lambda classes, size, channels: BottleneckResNet(classes, channels, (1, 1, 1, 1), width=4),
    "vgg16_imagenet": lambda classes, size, channels: ImageNetVGG((4, "pool", 6, "pool"), classes, size, channels, 8),
    "vit_b_16": lambda classes, size, channels: VisionTransformer(
        classes, size, channels, layers=1, heads=2, width=8, hidden=12
    ),
    "mobilenet_v2": models._BUILDERS["mobilenet_v2"],
    "smallconv": models._BUILDERS["smallconv"],
    "resnet18": models._BUILDERS["resnet18"],
    "resnet18_projection": models._BUILDERS["resnet18_projection"],
}
HEADS = {"resnet50": "fc", "vgg16_imagenet": "classifier.6", "vit_b_16": "heads.head", "mobilenet_v2": "classifier.1"}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(models, "_BUILDERS", TINY)


def weights_of(name, classes=5, size=32, channels=3):
    torch.manual_seed(11)
    return TINY[name](classes, size, channels).state_dict()


def first_weights(tmp_path, name, state, suffix="pth"):
    """What training of a model for three classes starts from, without a file and with it."""
    path = tmp_path / f"w.{suffix}"
    safetensors.torch.save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    data = from_dataset(TensorDataset(torch.rand(24, 3, 32, 32), torch.arange(24) % 3))
    found = []
    for file in (None, str(path)):
        made = assemble(Request.of(weights=file, model=name), data)
        store = UnitStore(tmp_path / f"store {file is None}")
        made.store_initial_weights(store)
        found.append({k: v for index in range(len(made.chain.all_units)) for k, v in store.load(index).items()})
    return found


def take(tmp_path, name, state, channels=3):
    """Take weights for three classes."""
    torch.save(state, tmp_path / "w.pth")
    chain = Chain.from_module(TINY[name](3, 32, channels), (channels, 32, 32), name)
    store = UnitStore(tmp_path / "store")
    spill_module(chain.all_units, store)
    load_initial_weights(tmp_path / "w.pth", chain, store)


@pytest.mark.parametrize(
    ("name", "suffix"), [*((name, "pth") for name in HEADS), ("resnet50", "safetensors"), ("vit_b_16", "safetensors")]
)
def test_a_classifier_of_another_number_of_classes_keeps_its_fresh_weights(tmp_path, name, suffix):
    state = weights_of(name)
    fresh, got = first_weights(tmp_path, name, state, suffix)
    assert fresh.keys() == got.keys() == state.keys()
    for key in state:
        assert torch.equal(got[key], fresh[key] if key.startswith(f"{HEADS[name]}.") else state[key]), key


@pytest.mark.parametrize("name", [name for name in HEADS if name != "mobilenet_v2"])
def test_a_file_without_the_classifier_is_taken(tmp_path, name):
    top = HEADS[name].partition(".")[0]
    state = {key: tensor for key, tensor in weights_of(name).items() if not key.startswith(f"{top}.")}
    fresh, got = first_weights(tmp_path, name, state)
    assert all(torch.equal(got[key], state.get(key, fresh[key])) for key in got)


@pytest.mark.parametrize("prefix", ["module.", "model.", "module.model.", "backbone."])
def test_a_prefix_of_all_names_is_dropped(tmp_path, prefix):
    state = weights_of("vit_b_16")
    prefixed = {f"{prefix}{key}": tensor for key, tensor in state.items()} | {"n_averaged": torch.tensor(3)}
    _, got = first_weights(tmp_path, "vit_b_16", prefixed)
    assert all(torch.equal(got[key], state[key]) for key in state if not key.startswith("heads."))


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("headless", [False, True])
@pytest.mark.parametrize(
    ("theirs", "asked"),
    [("resnet50", "vit_b_16"), ("vit_b_16", "resnet50"), ("mobilenet_v2", "resnet50"), ("vgg16_imagenet", "smallconv")],
)
def test_weights_of_another_model_of_ours_are_named(tmp_path, theirs, asked, headless, prefix):
    top = HEADS[theirs].partition(".")[0]
    state = {f"{prefix}{k}": v for k, v in weights_of(theirs).items() if not (headless and k.startswith(f"{top}."))}
    message = rf"these look like the weights of {theirs}, not of {asked}; use --model {theirs}\."
    with pytest.raises(CheckpointError, match=message):
        take(tmp_path, asked, state)


def test_a_network_whose_names_are_among_anothers_does_not_take_its_weights(tmp_path):
    with pytest.raises(CheckpointError, match="weights of resnet18_projection, not of resnet18; use --model"):
        take(tmp_path, "resnet18", weights_of("resnet18_projection"))
    with pytest.raises(CheckpointError, match="weights of resnet18, not of resnet18_projection"):
        take(tmp_path, "resnet18_projection", weights_of("resnet18"))


def test_weights_of_no_model_of_ours(tmp_path):
    with pytest.raises(CheckpointError, match=r"does not hold conv1\.weight in the shape of resnet50: it belongs"):
        take(tmp_path, "resnet50", {"stem.weight": torch.ones(3), "head.weight": torch.ones(3)})


def test_a_partial_classifier_is_another_models(tmp_path):
    state = {k: v for k, v in weights_of("vgg16_imagenet").items() if not k.startswith("classifier.3")}
    with pytest.raises(CheckpointError, match=r"does not hold classifier\.3\.weight"):
        take(tmp_path, "vgg16_imagenet", state)


@pytest.mark.parametrize("size", [16, 64])
def test_position_embeddings_for_another_image_size_name_theirs(tmp_path, size):
    message = f"position embeddings for images of {size} pixels, not 32; use --image-size {size}"
    with pytest.raises(CheckpointError, match=message):
        take(tmp_path, "vit_b_16", weights_of("vit_b_16", size=size))


def test_position_embeddings_of_no_square_image(tmp_path):
    state = weights_of("vit_b_16") | {"encoder.pos_embedding": torch.zeros(1, 8, 8)}
    with pytest.raises(CheckpointError, match=r"does not hold encoder\.pos_embedding in the shape of vit_b_16"):
        take(tmp_path, "vit_b_16", state)


def test_weights_for_colour_images_do_not_fit_grey_ones(tmp_path):
    with pytest.raises(CheckpointError, match=r"weights of resnet50 for images of 3 channel\(s\), not 1"):
        take(tmp_path, "resnet50", weights_of("resnet50"), channels=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path, value):
    state = weights_of("resnet50")
    state["layer2.0.conv2.weight"][0, 0, 0, 0] = value
    with pytest.raises(CheckpointError, match=r"NaN or infinite values in layer2\.0\.conv2\.weight"):
        take(tmp_path, "resnet50", state)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf, torch.inf]))

    def forward(self, images):
        return self.fc(self.conv(images).mean((2, 3)).minimum(self.mask))


@pytest.mark.parametrize("kind", [torch.float32, torch.float8_e5m2])
def test_buffers_may_be_infinite_where_the_models_are(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(TINY, "masked", lambda classes, size, channels: Masked())
    state = {name: tensor.to(kind) for name, tensor in Masked().state_dict().items()}
    take(tmp_path, "masked", state)
    taken = {name: tensor for index in (0, 1) for name, tensor in UnitStore(tmp_path / "store").load(index).items()}
    assert torch.equal(taken["mask"], Masked().mask) and torch.equal(taken["conv.bias"], state["conv.bias"].float())
    for name, value in {"mask": torch.nan, "conv.weight": torch.inf, "fc.bias": torch.nan}.items():
        wrong = {key: tensor.float().clone() for key, tensor in state.items()}
        wrong[name].flatten()[0] = value
        with pytest.raises(CheckpointError, match=f"NaN or infinite values in {name}"):
            take(tmp_path, "masked", wrong)


def test_half_precision_is_converted(tmp_path):
    state = {key: t.half() if t.is_floating_point() else t for key, t in weights_of("resnet50").items()}
    _, got = first_weights(tmp_path, "resnet50", state)
    assert got["conv1.weight"].dtype == torch.float32 and torch.equal(
        got["conv1.weight"], state["conv1.weight"].float()
    )


def test_nothing_is_replaced_by_weights_that_do_not_fit(tmp_path):
    with torch.device("meta"):
        chain = Chain.from_module(TINY["resnet50"](3, 32, 3), (3, 32, 32), "resnet50")
    store = UnitStore(tmp_path / "store")
    for index, unit in enumerate(chain.all_units):
        initialise_by_reset(unit, 0)
        store.save(index, unit)
        release(unit)
    before = [file.read_bytes() for file in sorted(store.folder.iterdir())]
    state = {key: tensor for key, tensor in weights_of("resnet50").items() if key != "layer4.0.bn3.bias"}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(CheckpointError):
        load_initial_weights(tmp_path / "w.pth", chain, store)
    assert [file.read_bytes() for file in sorted(store.folder.iterdir())] == before


def test_every_model_of_ours_is_recognised(monkeypatch):
    monkeypatch.undo()
    for name in models.names():
        with torch.device("meta"):
            state = models.build(name, 7, 64).state_dict()
        shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
        assert models.recognise(shapes) == models.Match(name, 3)
    assert models.recognise({}) is None and models.recognise({"conv1.weight": (64, 3, 7, 7)}) is None
