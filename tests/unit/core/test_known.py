"""Names that are checked before torch is imported: those of the registries, and the same sentences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from snugfit import _models as models
from snugfit._core import known, registry
from snugfit._core.option_groups import DataOptions, ModelOptions
from snugfit._core.request import Request, StrategyOptions
from snugfit._data import catalog
from snugfit.errors import UnknownNameError, UsageError
from snugfit.local import LOCAL_LOSSES, check_local_loss


def test_the_lists_are_those_of_the_registries():
    assert models.names() == registry.MODELS.names()
    assert catalog.names() == [*known.DATA_SETS, known.FOLDER]
    assert sorted(LOCAL_LOSSES) == sorted(registry.LOCAL_LOSSES.names())


@pytest.mark.parametrize(
    ("check", "registry", "name"),
    [
        (known.check_model, lambda name: models.build(name, 10, 32), "smalconv"),
        (known.check_data_set, catalog.load, "mnst"),
        (known.check_data_set, catalog.load, "folder:"),
        (known.check_data_set, catalog.load, "/"),
        (known.check_local_loss, check_local_loss, "lss:basis=cosine"),
    ],
)
def test_a_name_is_refused_with_the_sentence_of_its_registry(check, registry, name):
    said = []
    for refuse in (check, registry):
        with pytest.raises(UsageError) as caught:
            refuse(name)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


def test_what_only_who_imports_it_can_know_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    networks = tmp_path / "torchvision" / "models"
    networks.mkdir(parents=True)
    (tmp_path / "torchvision" / "__init__.py").write_text("raise ImportError('imported')")
    (networks / "alexnet.py").write_text("def alexnet(*, weights=None):\n    ...\n")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    for name in ("alexnet", "torchvision:alexnet", "timm:resnet10t", "mine:net", "python", *registry.MODELS.names()):
        known.check_model(name)
    with pytest.raises(UnknownNameError):
        known.check_model("alexne")
    for name in ("folder:some/where", "DIGITS", *known.DATA_SETS):
        known.check_data_set(name)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(ModelOptions("vgg-16")), "unknown model 'vgg-16'. Did you mean 'vgg16'"),
        (Request(data=DataOptions("digit")), "unknown data set 'digit'. Did you mean 'digits'"),
        (Request(strategy=StrategyOptions(local_loss="anan")), "unknown local loss 'anan'. Did you mean 'aan'"),
        (
            Request(strategy=StrategyOptions(retrain_data="cifar-10")),
            "unknown data set 'cifar-10'. Did you mean 'cifar10'",
        ),
    ],
)
def test_every_name_of_a_request_is_checked(request_, words):
    with pytest.raises(UnknownNameError) as caught:
        known.check_names(request_)
    assert str(caught.value).startswith(words)


def test_what_a_request_may_name_otherwise_is_not_refused():
    known.check_names(Request())
    known.check_names(Request(data=DataOptions("photos/data.yaml", task="detect")))
    known.check_names(Request(ModelOptions("python"), DataOptions("python")))


SHAPE = {"input_shape": "3x32x32", "classes": 10}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": None}, "does not say how many classes there are; add --classes"),
        ({"data": "digits"}, "--data digits"),
        ({"data": "python"}, "--data python"),
        ({"task": "detect"}, "--task detect reads the boxes of its data"),
        ({"image_size": 32}, "leave out --image-size 32"),
        ({"max_train": 10**8}, "--max-train 100000000 is above 10,000,000"),
        ({"max_val": 10**8}, "--max-val 100000000 is above 10,000,000"),
    ],
)
def test_what_contradicts_a_shape_without_data(options, words):
    known.check_names(Request.of(**SHAPE))
    with pytest.raises(UsageError) as caught:
        known.check_names(Request.of(**{**SHAPE, **options}))
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("model", ["vit_b_16", "torchvision:vit_l_32"])
@pytest.mark.parametrize("shape", [{"image_size": "96x160"}, {"input_shape": "3x96x160", "classes": 10}])
def test_positions_of_patches_need_square_images(model, shape):
    said = f"^{model} takes square images, .*, not 96x160; give --image-size one side, like 224, or take another model"
    with pytest.raises(UsageError, match=said):
        known.check_names(Request.of(model=model, **shape))
    known.check_names(Request.of(model=model, image_size=96))
    known.check_names(Request.of(model="resnet18", **shape))


def test_training_needs_data():
    known.require_data(DataOptions())
    with pytest.raises(UsageError, match=r"^training needs data: --data, instead of --input-shape 3x32x32\.$"):
        known.require_data(DataOptions(**SHAPE))


COMMAND = """
import sys
from snugfit._cli import app
code = app.run(sys.argv[1:])
assert code == 2 and not {"torch", "numpy"} & set(sys.modules), code
"""


@pytest.mark.parametrize(
    "words",
    [
        "plan --model smalconv",
        "train --data digit",
        "profile --local-loss lss",
        "cluster plan --image-size 8 --model yolo",
    ],
)
def test_the_command_line_refuses_a_name_before_torch_is_imported(words, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: unknown ") and "Did you mean" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train --input-shape 3x32x32 --classes 10", "training needs data: --data"),
        ("plan --input-shape 3x32x32", "add --classes"),
        ("profile --input-shape 3x32 --classes 10", "--input-shape must be channels, height and width"),
        ("plan --input-shape 3x32x32 --classes 10 --data digits", "leave it out, or --data digits"),
        ("plan --input-shape 3x32x32,16xint46 --classes 10", "--input-shape must be"),
        ("profile --input-shape a=3x32x32,16 --classes 10", "--input-shape must be"),
    ],
)
def test_the_command_line_refuses_a_shape_before_torch_is_imported(words, says, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: ") and says in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["loss", "schedule", "optimizer"])
def test_a_function_of_ones_own_has_no_flag(name):
    with pytest.raises(UsageError, match=rf"--{name} python is a function of your own; pass it from Python.*{name}="):
        known.check_names(Request.of(**{name: "python"}))
