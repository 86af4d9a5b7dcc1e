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


def test_a_loss_of_ones_own_has_no_flag():
    with pytest.raises(UsageError, match=r"--loss python is a function of your own; pass it from Python"):
        known.check_names(Request.of(loss="python"))
