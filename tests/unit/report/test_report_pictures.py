"""The pictures section: a figure or a line for every picture, and nothing unless asked for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import fake_runs
import numpy as np
import pytest
from html_page import Page

from snugfit._report.picture_sections import overlay
from snugfit._report.pictures import HeatMaps, Pictures, Projection, Spectra
from snugfit._report.run_page import render

RNG = np.random.default_rng(0)
SPECTRA = Spectra(
    "features.8", False, ("cat <b>", "$dog"), np.linspace(0, 0.5, 17), RNG.random((2, 17)), RNG.random((2, 17)),
    (8.46, 3.0), (20, 18), "test",
)  # fmt: skip
PROJECTION = Projection("features.8", tuple("abcdefgh"), RNG.random((8, 2)), ("a", "h"))
HEAT_MAPS = HeatMaps(
    RNG.integers(0, 256, (3, 3, 8, 8), dtype=np.uint8), RNG.random((3, 8, 8)), ("cat", "dog", "cat"),
    ("cat", "cat", "cat"), (0.9, 0.5, 0.4), "val",
)  # fmt: skip


def page_with(pictures: Pictures | None) -> tuple[str, Page]:
    html = render(fake_runs.backprop(Path("r")), [], pictures)
    page = Page(html)
    assert page.open == []
    return html, page


@pytest.fixture(scope="module")
def full():
    return page_with(Pictures(SPECTRA, PROJECTION, HEAT_MAPS))


def test_every_picture_is_a_figure_with_named_axes(full):
    html, page = full
    assert page.labels[-3:] == [
        "Spectra of class vectors and of mean activations",
        "t-SNE of the learned combinations of the basis",
        "Grad-CAM heat maps over images",
    ]
    for words in ("spatial frequency (cycles per latent)", "magnitude (relative)", "basis vector b", "class $dog",
                  "t-SNE, first dimension (no unit)", "predicted class", "cat, 90 %", "evidence for"):  # fmt: skip
        assert words in page.text, words
    assert "http" not in html and "<b>" not in html.partition("<h2>Pictures")[2].partition("</section>")[0]
    assert all(source.startswith("data:image/png") for source in re.findall(r'href="([^#][^"]*)"', html))


def test_titles_say_the_findings(full):
    for words in ("8.5 times for cat <b>, 3.0 times for $dog", "a and h are the most similar", "mean of 20 and 18 test",
                  "2 of these 3 images are put into their class", "(val split)"):  # fmt: skip
        assert words in full[1].text, words


def test_learned_vectors_are_called_so():
    learned = dataclasses.replace(SPECTRA, learned=True)
    assert "vector d = M b" in page_with(Pictures(learned))[1].text


def test_super_classes_have_a_legend_and_are_counted():
    groups = ("large_carnivores", "trees") * 4
    grouped = dataclasses.replace(PROJECTION, groups=groups, group_agreement=(0.625, 3 / 7))
    html, page = page_with(Pictures(projection=grouped))
    assert "For 62 % of the classes" in page.text and "by chance it would be 42.9 %" in page.text
    assert page.text.count("large carnivores") == 1 and "<title>a, large_carnivores</title>" in html
    unknown = dataclasses.replace(PROJECTION, why_no_groups="cifar100 is not in /data.")
    assert "Super-classes are not shown: cifar100 is not in /data." in page_with(Pictures(projection=unknown))[1].text


@pytest.mark.parametrize(("classes", "named"), [(30, True), (31, False)])
def test_many_classes_have_their_names_in_tooltips_alone(classes, named):
    names = tuple(f"name{i:03}" for i in range(classes))
    many = dataclasses.replace(PROJECTION, classes=names, points=RNG.random((classes, 2)))
    html = page_with(Pictures(projection=many))[0]
    assert html.count("name007<") == 1 + named


def test_what_is_missing_has_its_line_in_its_place():
    missing = {"projection": "No t-SNE of M: this run has none & never had."}
    html, page = page_with(Pictures(SPECTRA, None, HEAT_MAPS, missing))
    assert "none & never had" in page.text and "none &amp; never" in html
    assert html.index("Spectra of") < html.index("No t-SNE") < html.index("Grad-CAM heat")


def test_a_page_without_pictures_says_nothing_of_them():
    assert "Pictures" not in page_with(None)[1].text


def test_cold_maps_are_explained():
    cold = dataclasses.replace(HEAT_MAPS, maps=np.stack([np.zeros((8, 8)), *HEAT_MAPS.maps[1:]]))
    assert "An image without warm colours" in page_with(Pictures(heat_maps=cold))[1].text
    assert "An image without warm colours" not in page_with(Pictures(heat_maps=HEAT_MAPS))[1].text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("channels", [1, 3])
def test_one_image_of_any_depth(channels):
    single = HeatMaps(
        RNG.integers(0, 256, (1, channels, 8, 8), dtype=np.uint8), RNG.random((1, 8, 8)), ("x",), ("x",), (1.0,), "test"
    )
    assert page_with(Pictures(heat_maps=single))[1].labels[-1] == "Grad-CAM heat maps over images"


def test_an_overlay_is_grey_and_heat_in_equal_parts():
    image = np.array([[[0, 255]], [[0, 255]], [[0, 255]]], dtype=np.uint8)
    cold = overlay(image, np.zeros((1, 2)))
    assert np.allclose(cold[0, 1] - cold[0, 0], 0.5)
    hot = overlay(image, np.array([[7.0, 0.0]]))
    assert hot[0, 0, 0] > hot[0, 0, 2] and np.allclose(hot[0, 1], cold[0, 1]), "red where it is hottest"


@pytest.mark.filterwarnings("error")
def test_class_names_of_any_script_are_drawn_as_they_are():
    """matplotlib's own font lacks most of them, and warned of each for every figure."""
    names = ("猫", "😀🐝", "ant$b^$", "العربية")
    spectra = dataclasses.replace(SPECTRA, classes=names[:2])
    maps = dataclasses.replace(HEAT_MAPS, true=names[:3], predicted=names[1:])
    record = dataclasses.replace(fake_runs.backprop(Path("r")), class_names=names, confusion=[[1] * 4] * 4)
    page = Page(html := render(record, [], Pictures(spectra, dataclasses.replace(PROJECTION, classes=names * 2), maps)))
    assert page.open == []
    for name in names:
        assert html.count(name) >= 3, name
