"""What the queue trains: an arm is one line of a table, run in rungs of growing length with several seeds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import Settings

SEEDS = (0, 1, 2)
Sources = tuple[str, str]
CAPPED = "Time to accuracy under a cap"


@dataclass(frozen=True)
class Arm:
    """One method in one experiment.

    Attributes:
        experiment: the table that it belongs to.
        name: its line there.
        settings: flags of ``snugfit train``, but for length, seed and tuned learning rate. A peer's ``strategy`` is its
            script, like ``benchmarks.peer``, which takes the other flags.
        images: training images that there are, validation images not counted.
        epochs: epochs of the paper.
        priority: place among the arms; within a rung all seeds of lower ones run first.
        lrs: learning rates to choose from, on validation images of the shortest rung with the first seed.
        paper: test accuracy in the paper, in percent.
        implied: flags that were defaults when the first of its rows ran; the rows' names do not depend on them.
        longer: further flags of all rungs but its shortest.
        above_context: its memory cap is a GPU's in the paper, and holds above the context on a GPU.
        group: name of the arms of the experiment that compute the same, within any memory, and so share a learning
            rate: the one that validates best on average. An arm without a group has its own.
    """

    experiment: str
    name: str
    settings: Settings = field(hash=False)
    images: int
    epochs: int
    priority: int
    lrs: tuple[float, ...] = ()
    paper: float | None = None
    implied: Settings = field(default_factory=dict, hash=False)
    longer: Settings = field(default_factory=dict, hash=False)
    group: str = ""
    above_context: bool = False

    @property
    def sources(self) -> Sources:
        """Strategy and model, whose sources its rows depend on."""
        return self.settings["strategy"], self.settings["model"]

    @property
    def is_peer(self) -> bool:
        """Whether it trains by a script instead of ``snugfit train``."""
        return str(self.settings["strategy"]).startswith("benchmarks.")


_TRAIN = {"cifar10": 45_000, "mnist": 54_000, "fashion-mnist": 54_000, "folder:flower_photos": 900,
          "folder:caltech101": 1_818}  # fmt: skip


def all_arms() -> list[Arm]:
    """Every arm; later experiments add theirs here."""
    return [*_capped(), *_lls_bases(), *_sidenet(), *_elastic(), *_lls_rules(), *_neuroflux(), *_fewer_bits()]


def _arm(experiment: str, name: str, data: str, epochs: int, priority: int, more: Settings, **rest: Any) -> Arm:
    return Arm(experiment, name, {"data": data, "threads": 1, **more}, _TRAIN[data], epochs, priority, **rest)


_UNITS: Settings = {"module_units": "1"}
"""Local learning of the papers, in which every unit has a loss."""
_RATES = (0.01, 0.03, 0.1)
_WARM_UP: Settings = {"warmup_epochs": 1}
_CAPS = {
    "resnet20": (55, 33, 21, 10.5),
    "vgg11": (110, 55, 27.5),
}
"""Memory in MB: the smallest in which backprop trains (21 and 110), a half and a quarter of it; ResNet-20 trains in no
quarter, and has two between the smallest and the peak with whole batches (65) instead. The smallest is what
``snugfit plan --model MODEL --data cifar10 --strategy backprop --optimizer-state float32 --batch-size 32 --threads 1
--memory 1MB`` names; without ``--memory`` it predicts the peak."""

_EXACT = ("backprop", "checkpoint", "peer")
_BATCH = 32
"""Images of a step. With 128 the few steps of the shorter rungs decide what is compared: 10,000 images in 25 epochs end
at 72.7 % with ResNet-20, and at 77.7 % with 19 images a step."""


def _capped() -> list[Arm]:
    """Accuracy within time under a cap: methods of training the same network at equal epochs, SGD and cosine.

    The longer rungs warm up for an epoch. Measurements are not cached, so that the seconds of every run include its
    own. ``peer`` is a loop in plain PyTorch.
    """
    ours: Settings = {"optimizer": "sgd", "schedule": "cosine", "profile_cache": "off"}
    blockwise: Settings = ours | {"strategy": "blockwise", "exit_tolerance": 0}
    modules = blockwise | {"module_units": "auto"}
    methods: dict[str, Settings] = {
        "backprop": ours | {"strategy": "backprop"},
        "checkpoint": ours | {"strategy": "checkpoint"},
        "modules, aan": modules | {"local_loss": "aan"},
        "units, auglocal": blockwise | _UNITS | {"local_loss": "auglocal"},
        "units, aan": blockwise | _UNITS | {"local_loss": "aan"},
        "units, lls-mxm": blockwise | _UNITS | {"local_loss": "lls-mxm"},
        "peer": {"strategy": "benchmarks.peer"},
    }
    arms = [
        (model, cap, name)
        for model, caps in _CAPS.items()
        for cap, name in [(None, "backprop"), *itertools.product(caps, methods)]
    ]
    found = []
    for model, cap, name in arms:
        limit = {} if cap is None else {"memory": f"{cap:g}MB"}
        title = "no cap" if cap is None else f"{cap:g} MB"
        settings = methods[name] | {"model": model, "batch_size": _BATCH} | limit
        found.append(
            _arm(f"{CAPPED}, {model}, cifar10", f"{title}: {name}", "cifar10", 50, 1, settings, lrs=_RATES,
                 longer=_WARM_UP, group="exact" if name in _EXACT else "")
        )  # fmt: skip
    return found


def _lls_bases() -> list[Arm]:
    """LLS, Table 1: SmallConv with cosine and square waves; batch 128, schedule-free AdamW at 0.005 (appendix A.3)."""
    paper = {"cosine": (99.50, 89.57, 75.82), "square": (99.50, 90.54, 77.79)}
    return [
        _arm(f"LLS Table 1, SmallConv, {data}", basis, data, 100, 10,
             _lls_settings("smallconv", data) | {"strategy": "blockwise", "local_loss": f"lls:basis={basis}"},
             paper=value, implied=_UNITS)
        for basis, values in paper.items()
        for data, value in zip(("mnist", "fashion-mnist", "cifar10"), values, strict=True)
    ]  # fmt: skip


def _lls_rules() -> list[Arm]:
    """LLS, Table 2: SmallConvL by its rule and by those that it is compared with; LLS-M and LLS-MxM are beside it."""
    local = {"LLS": "lls", "LLS-M": "lls-m", "LLS-MxM": "lls-mxm"}
    rules: dict[str, Settings] = {
        "BP": {"strategy": "backprop"},
        **{rule.upper(): {"strategy": "feedback", "feedback_rule": rule} for rule in ("dfa", "drtp", "pepita")},
        **{name: {"strategy": "blockwise", "local_loss": loss} for name, loss in local.items()},
    }
    paper = {"BP": (99.62, 87.57), "DFA": (97.90, 71.53), "DRTP": (98.52, 68.96), "PEPITA": (98.29, 56.33),
             "LLS": (99.57, 84.10)}  # fmt: skip
    return [
        _arm(f"LLS Table 2, SmallConvL, {data}", name, data, 100, 40,
             _lls_settings("smallconvl", data, exits=name in local) | flags,
             paper=paper[name][index] if name in paper else None, implied=_UNITS if name in local else {})
        for index, data in enumerate(("mnist", "cifar10"))
        for name, flags in rules.items()
    ]  # fmt: skip


def _lls_settings(model: str, data: str, *, exits: bool = True) -> Settings:
    """The augmentation and optimizer of LLS's small networks (appendix A.3): CIFAR-10 is flipped and not cropped."""
    tolerance = {"exit_tolerance": 0} if exits else {}
    return {"model": model, "batch_size": 128, "optimizer": "schedulefree", **tolerance, "crop": data != "cifar10"}


def _neuroflux() -> list[Arm]:
    """NeuroFlux: block-wise training, classic local learning and backprop, each at the learning rate it does best with.

    The paper gives no epochs; its parents train every layer for 50.
    """
    methods: dict[str, Settings] = {
        "backprop": {"strategy": "backprop"},
        "blockwise": {"strategy": "blockwise", "local_loss": "aan", **_UNITS},
        "classic": {"strategy": "blockwise", "local_loss": "classic", "adaptive_batch": False, "residency": "all"},
    }
    return [
        _arm(f"NeuroFlux, {model}, cifar10, 500 MB", name, "cifar10", 50, 2,
             {"model": model, "batch_size": 128, "memory": "500MB", **flags}, lrs=_RATES, above_context=True)
        for model in ("vgg16", "resnet18")
        for name, flags in methods.items()
    ]  # fmt: skip


_PHOTOS = (("flowers", "folder:flower_photos", 96), ("Caltech-101", "folder:caltech101", 96),
           ("flowers", "folder:flower_photos", 224))  # fmt: skip
"""Title, data and image size in pixels, in the order of work; the larger images take five times as long."""
_PRETRAINED: Settings = {"model": "mobilenet_v2", "weights": "mobilenet_v2"}


def _elastic() -> list[Arm]:
    """ElasticTrainer: 12 epochs (its evaluation) from ImageNet weights at batch 16.

    ``full`` keeps the pre-trained statistics of BatchNorm, as all schemes do; ``backprop`` updates them. A warm-up lets
    the new classifier learn first: without one, plain PyTorch with fixed statistics diverges at 0.003 as well.
    """
    schemes: dict[str, Settings] = {
        "full": {"scheme": "full", "lean": False},
        **{f"rho {rho}": {"scheme": "elastic", "time_ratio": rho} for rho in (0.35, 0.4, 0.5)},
        "head": {"scheme": "head", "lean": False},
        "backprop": {"strategy": "backprop"},
    }
    return [
        _arm(f"ElasticTrainer, MobileNetV2, {title}, {size} px", name, data, 12, 30 + size,
             {**_PRETRAINED, "image_size": size, "strategy": "elastic", "batch_size": 16, "optimizer": "sgd",
              **_WARM_UP, **flags}, lrs=(3e-4, 1e-3, 3e-3))
        for title, data, size in _PHOTOS
        for name, flags in schemes.items()
    ]  # fmt: skip


def _sidenet() -> list[Arm]:
    """Rep-Net with pruned activations: 5 epochs, batch 8, Adam; rates about those of Rep-Net's scripts."""
    side: Settings = {"strategy": "sidenet", "sample_wise": "off", "weight_storage": "float32"}
    schemes: dict[str, Settings] = {
        "Rep-Net": {**side, "prune": "off"},
        "pruned": {**side, "prune": "on"},
        "bias+head": {**side, "scheme": "bias+head"},
        "head": {**side, "scheme": "head"},
    }
    full: Settings = {"strategy": "elastic", "scheme": "full", "lean": False, "optimizer": "adamw", "weight_decay": 0.0}
    return [
        _arm(f"Rep-Net, MobileNetV2, {title}, {size} px", name, data, 5, 20 + size,
             {**_PRETRAINED, "image_size": size, "batch_size": 8, **flags},
             lrs=(3e-5, 1e-4, 3e-4) if name == "full" else (2e-4, 6e-4, 2e-3))
        for title, data, size in _PHOTOS
        for name, flags in {**schemes, "full": full}.items()
    ]  # fmt: skip


def _fewer_bits() -> list[Arm]:
    """Backprop that keeps optimizer state, weights or feature maps in fewer bits, all at the same learning rate.

    The rate is the one that uncapped ResNet-20 did best with in 10,000 images and 25 epochs, of 0.01 and 0.03.
    """
    kept: dict[str, Settings] = {
        "float32": {},
        "state bfloat16": {"optimizer_state": "bfloat16"},
        "state int8": {"optimizer_state": "int8"},
        "state int8, weights bfloat16": {"optimizer_state": "int8", "weight_dtype": "bfloat16"},
        "activations int8": {"activations": "int8"},
        "activations int4": {"activations": "int4"},
    }
    ours: Settings = {"model": "resnet20", "batch_size": 128, "strategy": "backprop", "optimizer": "sgd",
                      "schedule": "cosine", "lr": 0.03}  # fmt: skip
    return [
        _arm("Fewer bits, resnet20, cifar10", name, "cifar10", 50, 60, ours | flags, longer=_WARM_UP)
        for name, flags in kept.items()
    ]
