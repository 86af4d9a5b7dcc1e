"""Pictures of a run: what it allows is drawn, and what it does not is said in one line."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import snugfit
from snugfit import draw_report
from snugfit._core.option_groups import PictureOptions
from snugfit._engine import figure_data
from snugfit._engine.figure_data import first_of_each
from snugfit._report.pictures import spectrum
from snugfit._storage.manifest import Manifest
from snugfit.errors import DataError, UnknownNameError, UsageError

DIGITS = {"image_size": 16, "max_train": 64, "max_val": 40, "batch_size": 32, "epochs": 1}


def make():
    torch.manual_seed(0)
    parts = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()]
    parts += [nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 4, 10))


def make_pictures(run, model=None, **options):
    return figure_data.make_pictures(run, PictureOptions(**options), model)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with LLS-MxM, which has all pictures, and one by backpropagation."""
    folder = tmp_path_factory.mktemp("pictured")
    snugfit.plan(make, "digits", strategy="blockwise", local_loss="lls-mxm", module_units="1", **DIGITS).run(
        (), out=folder / "mxm"
    )
    snugfit.plan(make, "digits", strategy="backprop", **DIGITS).run((), out=folder / "backprop")
    return folder


def test_all_three_come_from_the_run(runs):
    made = make_pictures(runs / "mxm", model=make)
    assert made.missing == {}
    spectra, projection, heat_maps = made.spectra, made.projection, made.heat_maps
    assert spectra.learned and spectra.classes == ("0", "1") and spectra.split == "test" and spectra.unit == "3"
    state = load_file(runs / "mxm" / "exits" / "unit_001.safetensors")
    expected = spectrum((state["mixing"] @ state["stored"])[:2])
    assert np.allclose(spectra.basis, expected, atol=1e-4) and spectra.latents.shape == spectra.basis.shape
    assert projection.points.shape == (10, 2) and projection.groups == () and projection.unit == "6"
    assert heat_maps.images.shape == (6, 1, 16, 16) and heat_maps.maps.shape == (6, 16, 16)
    assert heat_maps.true == tuple("012345")
    with torch.no_grad():
        x = torch.from_numpy(heat_maps.images).float() / 255
        logits = snugfit.load(runs / "mxm", make)((x - 0.3057) / 0.3235)
    assert heat_maps.predicted == tuple(str(label) for label in logits.argmax(1).tolist())
    assert np.allclose(heat_maps.confidence, logits.softmax(1).amax(1), atol=1e-4)


def test_activations_are_those_that_the_loss_reads(runs):
    """The last unit: its latents are the inputs of its local loss, before the head."""
    made = make_pictures(runs / "mxm", model=make, unit="6", classes=(3,)).spectra
    network = make().eval()
    for name, parameter in network.named_parameters():
        unit = {"0": 0, "3": 1, "6": 2}.get(name[0])
        if unit is not None:
            stored = next((runs / "mxm" / "weights").glob(f"unit_{unit:03d}*"))
            parameter.data = load_file(stored)[name]
    splits = figure_data.FinishedRun(runs / "mxm").images
    images, labels = (torch.cat(part) for part in zip(*splits.batches(), strict=True))
    with torch.no_grad():
        maps = network[:8](images[labels == 3])
        means = nn.functional.normalize(maps.flatten(1), dim=1).mean(0, keepdim=True)
    assert made.images == (int((labels == 3).sum()),)
    assert np.allclose(made.latents, spectrum(means), atol=1e-4)


def test_the_page_shows_them_only_when_asked_to(runs, monkeypatch):
    assert "Grad-CAM" not in plain_page(runs / "mxm", monkeypatch)
    drawn = draw_report(runs / "mxm", pictures=True, model=make, unit="0", classes=[4], images=2)
    page = (runs / "mxm" / "report.html").read_text()
    assert drawn == {"report": str(runs / "mxm" / "report.html"), "missing": []}
    assert "Grad-CAM" in page and "class 4" in page and "Spectra of class vectors" in page


def plain_page(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("snugfit._engine.figure_data.make_pictures", None)
        return (run / "report.html" if draw_report(run)["report"] else run).read_text()


def test_other_strategies_have_heat_maps_alone(runs):
    made = make_pictures(runs / "backprop", model=make, images=12)
    assert len(made.heat_maps.images) == 12 and set(made.missing) == {"spectra", "projection"}
    assert made.missing["spectra"] == (
        "No spectra of the basis: this run was trained with the strategy backprop; "
        "this takes --local-loss lls / lls-m / lls-mxm."
    )


def test_what_is_not_there_is_said_and_the_rest_is_drawn(runs, tmp_path, monkeypatch):
    unmade = make_pictures(runs / "mxm")
    assert set(unmade.missing) == {"spectra", "heat_maps"} and unmade.projection is not None
    assert all("a module of your own" in line and "model=..." in line for line in unmade.missing.values())

    nowhere = make_pictures(runs / "mxm", model=make, data="mnist", data_dir=str(tmp_path))
    assert set(nowhere.missing) == {"spectra", "heat_maps"}
    assert all("mnist is not in" in line and "\n" not in line for line in nowhere.missing.values())

    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    assert "snugfit[demo]" in make_pictures(runs / "mxm", model=make).missing["projection"]


def test_super_classes_colour_the_classes_where_the_data_has_them(runs, monkeypatch):
    groups = ("odd", "even") * 5
    monkeypatch.setattr("snugfit._data.super_classes", lambda name, data_dir: groups)
    made = make_pictures(runs / "mxm", model=make).projection
    assert (
        made.groups == groups and 0 <= made.group_agreement[0] <= 1 and made.group_agreement[1] == pytest.approx(4 / 9)
    )

    def fail(name, data_dir):
        raise DataError("cifar100 is not in here.\nGet it.")

    monkeypatch.setattr("snugfit._data.super_classes", fail)
    made = make_pictures(runs / "mxm", model=make).projection
    assert made.groups == () and made.why_no_groups == "cifar100 is not in here. Get it."


def test_data_of_ones_own_is_asked_for(runs, tmp_path):
    run = shutil.copytree(runs / "mxm", tmp_path / "own")
    request = json.loads((run / "request.json").read_text())
    request["data"]["data"] = "python"
    (run / "request.json").write_text(json.dumps(request))
    Manifest.of(run)
    assert "data of your own" in make_pictures(run, model=make).missing["heat_maps"]
    assert make_pictures(run, data="digits", model=make).missing == {}


def test_an_incomplete_run_folder_is_said(runs, tmp_path):
    run = shutil.copytree(runs / "mxm", tmp_path / "cut")
    shutil.rmtree(run / "exits")
    made = make_pictures(run, model=make)
    assert "no folder exits" in made.missing["spectra"] and "no folder exits" in made.missing["projection"]
    assert made.heat_maps is not None and not (run / "exits").exists()


def test_what_no_run_could_show_is_refused(runs):
    with pytest.raises(UnknownNameError, match="Known: 0, 3, 6"):
        draw_report(runs / "mxm", pictures=True, model=make, unit="5")
    with pytest.raises(UsageError, match="from 0 to 9"):
        draw_report(runs / "mxm", pictures=True, model=make, classes=(0, 10))
    with pytest.raises(UsageError, match="at least 1"):
        draw_report(runs / "mxm", pictures=True, model=make, images=0)
    with pytest.raises(UnknownNameError, match=r"unknown option 'clases'\. Did you mean 'classes'"):
        draw_report(runs / "mxm", clases=(0, 1))
    with pytest.raises(UsageError, match="classes=, images= given for a report without pictures"):
        draw_report(runs / "mxm", classes=(0, 1), images=2)


def test_images_are_taken_from_every_class_in_turn():
    labels = np.array([1, 1, 0, 2, 1, 0])
    assert first_of_each(labels, 4).tolist() == [2, 0, 3, 5]
    assert sorted(first_of_each(labels, 99).tolist()) == list(range(6))
