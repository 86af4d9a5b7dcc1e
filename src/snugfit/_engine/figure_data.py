"""From the folder of a finished run to the arrays of its pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snugfit import _data as datasets
from snugfit._chain import Chain, UnitStore, load_into
from snugfit._core.option_groups import FROM_PYTHON, PictureOptions
from snugfit._core.request import Request
from snugfit._data import Batches, ImageSet, Subset
from snugfit._engine.inference import RunImages, run_images
from snugfit._engine.loading import Architecture, ModuleOrFactory, load
from snugfit._report import pictures
from snugfit._storage.manifest import Manifest
from snugfit._storage.run_folder import read_data, read_record
from snugfit.errors import CheckpointError, DataError, ModelError, UnknownNameError, UnusableInputError, UsageError
from snugfit.local import LLS, build_local_loss
from snugfit.local.assignment import Layout, trunk

MOST_AVERAGED = 256
"""Most images of a class whose activations are averaged."""


class FinishedRun:
    """A run, and the data and module to inspect it with, by default its own."""

    def __init__(
        self, folder: Path, data: str | None = None, data_dir: str | None = None, model: ModuleOrFactory | None = None
    ) -> None:
        self.folder, self.data, self.data_dir, self.model = folder, data, data_dir, model
        self.record, self.architecture = read_record(folder), Architecture.read(folder)

    @cached_property
    def images(self) -> RunImages:
        """Test images; validation images if there are none."""
        untested = self.data is None and self.record.accuracy.get("test") is None
        self.architecture.require_files()
        return run_images(self.folder, self.data, self.data_dir, "val" if untested else None)

    @cached_property
    def network(self) -> nn.Module:
        """The trained model."""
        self._check_model()
        return load(self.folder, self.model)

    @cached_property
    def chain(self) -> Chain:
        """The full network, on the meta device."""
        self._check_model()
        return self.architecture.chain(self.model)

    def unit(self, name: str | None, default: float) -> int:
        """Index of a unit by its name; by default the unit at this share of the trained ones."""
        trained = {point.unit: point.index for point in self.record.exits}
        if name is None:
            return list(trained.values())[int(default * (len(trained) - 1) + 0.5)]
        if name not in trained:
            raise UnknownNameError("unit", name, trained)
        return trained[name]

    def check_local_loss(self, *names: str) -> None:
        """Raise an error unless the run was trained with one of these local losses."""
        used = str(self.record.settings.get("local_loss", "")).partition(":")[0]
        if used not in names or not self.record.exits:
            own = f"the local loss {used}" if used else f"the strategy {self.record.strategy}"
            raise UsageError(f"this run was trained with {own}; this takes --local-loss {' / '.join(names)}.")

    def stored(self, kind: str, index: int) -> dict[str, Tensor]:
        """Stored tensors of a unit, of the shapes of its layers: its ``weights``, or its local loss (``exits``)."""
        if not (self.folder / kind).is_dir():
            raise CheckpointError(f"{self.folder} is incomplete: it has no folder {kind}.")
        store, manifest = UnitStore(self.folder / kind), Manifest.read(self.folder)
        manifest.check(*(name for name in manifest.names if name.startswith(f"{kind}/unit_{index:03d}")))
        manifest.check(f"{kind}/{store.path(index).name}")
        return store.load(index)

    def _check_model(self) -> None:
        if self.architecture.model == FROM_PYTHON and self.model is None:
            raise ModelError(
                "this run trained a module of your own; draw the report from Python, where you can pass it: "
                "snugfit.draw_report(run, pictures=True, model=...)."
            )


def make_pictures(folder: Path, options: PictureOptions, model: ModuleOrFactory | None = None) -> pictures.Pictures:
    """All pictures that a run allows, and the reason for each other picture."""
    source = FinishedRun(folder, options.data, options.data_dir, model)
    if options.unit is not None and source.record.exits:
        source.unit(options.unit, default=0)
    known = len(source.architecture.class_names)
    if not options.classes or not all(0 <= label < known for label in options.classes):
        raise UsageError(f"classes are one or more labels from 0 to {known - 1}, not {list(options.classes)}.")
    if options.images < 1:
        raise UsageError(f"images must be at least 1, not {options.images}.")
    made: dict[str, Any] = {}
    missing = {}
    for name, words, make in (
        ("spectra", "spectra of the basis", lambda: spectra(source, options.unit, tuple(options.classes))),
        ("projection", "t-SNE of M", lambda: projection(source, options.unit)),
        ("heat_maps", "Grad-CAM", lambda: heat_maps(source, options.images)),
    ):
        try:
            made[name] = make()
        except (UnusableInputError, UsageError) as error:
            missing[name] = f"No {words}: {' '.join(str(error).split())}"
    return pictures.Pictures(**made, missing=missing)


@torch.no_grad()
def spectra(source: FinishedRun, unit: str | None, classes: tuple[int, ...]) -> pictures.Spectra:
    """Spectra of the vectors of some classes and of their mean activations (LLS, Figure 2)."""
    source.check_local_loss("lls", "lls-m", "lls-mxm")
    index = source.unit(unit, default=0.5)
    body, loss = _load_unit(source, index)
    chosen = [_first_of(images, classes) for images in source.images.sets]
    latents = pictures.class_means(_latents(source.images, chosen, body, loss), classes)
    labels = np.concatenate([images.labels for images in chosen])
    of_basis, of_latents = pictures.spectrum(loss.basis_in_use()[list(classes)].float()), pictures.spectrum(latents)
    return pictures.Spectra(
        unit=source.chain.units[index].name,
        learned=loss.mixing_axes == 2,
        classes=tuple(source.architecture.class_names[label] for label in classes),
        frequencies=pictures.spatial_frequencies(loss.latents.length).numpy(),
        basis=of_basis.numpy(),
        latents=of_latents.numpy(),
        prominence=tuple(pictures.prominence(of_latents, of_basis).tolist()),
        images=tuple(int((labels == label).sum()) for label in classes),
        split=source.images.split,
    )


def projection(source: FinishedRun, unit: str | None) -> pictures.Projection:
    """The learned M of a unit in two dimensions (LLS, Figure 3); it needs no images."""
    source.check_local_loss("lls-mxm")
    index = source.unit(unit, default=1)
    rows = source.stored("exits", index)["mixing"].double().numpy()
    names = source.architecture.class_names
    first, second = pictures.closest_pair(rows)
    groups, why_none = _super_classes(source)
    return pictures.Projection(
        unit=next(point.unit for point in source.record.exits if point.index == index),
        classes=names,
        points=pictures.project(rows),
        closest=(names[first], names[second]),
        groups=groups,
        group_agreement=pictures.group_agreement(rows, groups) if groups else (0.0, 0.0),
        why_no_groups=why_none,
    )


def heat_maps(source: FinishedRun, count: int) -> pictures.HeatMaps:
    """Grad-CAM of the class predicted, on the first images of each class in turn (LLS, Figure 4)."""
    if source.architecture.task != "classify":
        others = "detects boxes" if source.architecture.task == "detect" else "gives several labels"
        raise UsageError(f"it explains the class of an image, and this model {others}.")
    images = source.images.sets[0]
    rows, names = first_of_each(images.labels, count), source.architecture.class_names
    pixels = images.images(rows)
    explained = pictures.grad_cam(source.network, source.images.transform(pixels))
    probabilities = explained.logits.softmax(1).gather(1, explained.classes[:, None])[:, 0]
    return pictures.HeatMaps(
        images=pixels.numpy(),
        maps=explained.maps.numpy(),
        true=tuple(names[label] for label in images.labels[rows]),
        predicted=tuple(names[label] for label in explained.classes.tolist()),
        confidence=tuple(probabilities.tolist()),
        split=source.images.split,
    )


def first_of_each(labels: np.ndarray, count: int) -> np.ndarray:
    """Positions of the first image of every class by label, then of every second one, and so on; ``count`` in all."""
    seen: Counter[int] = Counter()
    places = []
    for position, label in enumerate(labels.tolist()):
        places.append((seen[label], label, position))
        seen[label] += 1
    return np.array([position for _, _, position in sorted(places)[:count]], dtype=np.int64)


def _first_of(images: ImageSet, classes: tuple[int, ...]) -> Subset:
    """The first images of some classes."""
    rows = [np.flatnonzero(images.labels == label)[:MOST_AVERAGED] for label in dict.fromkeys(classes)]
    return Subset(images, np.concatenate(rows))


def _latents(images: RunImages, chosen: list[Subset], body: nn.Module, loss: LLS) -> Iterator[tuple[Tensor, Tensor]]:
    for part in chosen:
        for batch, labels in Batches(part, images.transform).in_order(images.batch):
            yield loss.read(body(batch)), labels


def _load_unit(source: FinishedRun, index: int) -> tuple[nn.Module, LLS]:
    """The trained network up to what a unit's local loss reads, and that loss."""
    chain, classes = source.chain, len(source.architecture.class_names)
    layout = Layout.of(chain, source.record.settings["local_loss"], classes)
    for position, unit in enumerate(chain.units[: index + 1]):
        load_into(unit, source.stored("weights", position))
    with torch.device("meta"):
        loss = build_local_loss(layout.local_loss, layout.unit_shape(index), layout.network)
    assert isinstance(loss, LLS)
    loss.load_state_dict(source.stored("exits", index), assign=True)
    return trunk(chain, index, before_pool=True).eval(), loss


def _super_classes(source: FinishedRun) -> tuple[tuple[str, ...], str]:
    """Super-classes by label, empty if the run's data has none; and why they are unknown if it has some."""
    options = read_data(Request, source.folder / "request.json").data
    try:
        return datasets.super_classes(options.name, source.data_dir or options.data_dir) or (), ""
    except DataError as error:
        return (), " ".join(str(error).split())
