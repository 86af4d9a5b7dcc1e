"""The strategy ``sidenet``, described without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from snugfit._core.options import Choice, DataSetName, Positive, Range, Text
from snugfit._core.record import Record
from snugfit._core.strategy_config import StrategyConfig, present
from snugfit._core.workload import OptimizerSettings
from snugfit.strategies.micro_batch import AccumulationOptions

SidenetScheme = Literal["rep-net", "bias+head", "head"]
PruneImportance = Literal["reconstruction", "activation", "filter"]
WeightStorage = Literal["auto", "float32", "int8"]


def prune_ratio(prune: str) -> float | None:
    """Share of channels to remove, in (0, 1); None for auto, on and off."""
    return None if prune in get_args(Choice) else float(prune)


def _is_prune(text: str) -> bool:
    ratio = prune_ratio(text)
    return ratio is None or 0 < ratio < 1


Prune = Annotated[str, Text("auto, on, off or a share of channels between 0 and 1", _is_prune)]


@dataclass(frozen=True)
class SidenetOptions(AccumulationOptions):
    """How a side network is trained next to a frozen network.

    Attributes:
        scheme: what trains: rep-net (the default: a side network, classifier), bias+head (biases, classifier) or head.
        side_width: width of the network that ``sidenet`` adds, as a multiple of Rep-Net's; by default 1, and less only
            if nothing else fits.
        side_lr: peak learning rate of that network, in addition to --lr for the classifier; 5 times --lr by default.
        prune: whether ``sidenet`` first removes channels of the frozen blocks whose feature maps need most: auto (only
            if the budget requires it), on, off, or the share of channels to remove in (0, 1), like 0.5.
        prune_importance: which channels stay: those from which the next layer is rebuilt best (reconstruction), those
            with the largest activations, or with the largest filter weights.
        retrain_epochs: passes over the images in which a pruned network learns its former outputs.
        retrain_data: images that the frozen network was trained on (a data set's name or folder:PATH), to retrain it
            with after pruning; labels are not used. Your own training images by default.
        sample_wise: run frozen blocks with large feature maps image by image: auto (if the budget requires it), on
            or off. The result is exact and takes more time.
        weight_storage: how ``sidenet`` stores frozen weights: float32, int8 (a quarter of the bytes, rounded), or
            auto (int8 only if the budget requires it).
    """

    scheme: SidenetScheme | None = None
    side_width: Positive | None = None
    side_lr: Positive | None = None
    prune: Prune = "auto"
    prune_importance: PruneImportance = "reconstruction"
    retrain_epochs: Annotated[int, Range(0, 10**9)] = 8
    retrain_data: Annotated[str | None, DataSetName()] = None
    sample_wise: Choice = "auto"
    weight_storage: WeightStorage = "auto"


class Config(StrategyConfig):
    """Transfer learning with a frozen network and a small one next to it.

    Rep-Net's scripts take Adam, with 0.0002 to 0.0016 for the classifier.
    """

    name = "sidenet"
    implementation = "snugfit.strategies.sidenet.strategy:Sidenet"
    options = SidenetOptions
    schemes = get_args(SidenetScheme)
    order = 50
    expected_loss = 1
    accuracy = "The network stays frozen, and only a small network next to it trains, so accuracy may differ."
    needs_weights = True
    no_averaging = "which updates the statistics of BatchNorm, but they stay frozen"
    default_optimizer = "adamw"
    optimizers: ClassVar[Mapping[str, OptimizerSettings]] = {
        "adamw": OptimizerSettings("adamw", lr=0.0006, weight_decay=0.0)
    }
    rebuild = "snugfit.strategies.sidenet.network:side_network"

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The scheme, the width of the side network, and how memory is saved."""
        scheme, width = settings.get("scheme"), settings.get("side_width")
        prune = settings.get("prune", "off")
        return present(
            {
                f"scheme {scheme}": scheme is not None,
                f"side width {width or 0:g}": width is not None and width != 1,
                "large feature maps by sample": settings.get("sample_wise") == "on",
                "frozen weights in int8": settings.get("weight_storage") == "int8",
                "pruned" if prune == "on" else f"pruned by {prune}": prune not in ("off", "auto"),
            }
        )

    def structure(self, record: Record) -> dict[str, Any]:
        """The width of the side network, and whether channels were removed."""
        found = {"pruned": record.settings.get("prune") != "off", "side_width": record.settings.get("side_width")}
        return {key: value for key, value in found.items() if value}
