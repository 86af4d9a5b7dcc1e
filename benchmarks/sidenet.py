"""Claim: a pre-trained network adapts to a user's photos in some 25 MB of real training memory.

The claims of Yoosefi et al. (Rep-Net with pruned activations), one sub-command each. ``activation`` counts tensors in
one process on made-up images; ``memory`` and ``transfer`` run ``snugfit train`` on photos.
"""

from __future__ import annotations

from pathlib import Path

import snugfit
from benchmarks.common import DEFAULTS, Options, Settings, program, train
from benchmarks.sidenet_steps import Subject, table
from benchmarks.sidenet_tables import render
from benchmarks.store import ResultFile, finish

METHODS: dict[str, Settings] = {
    "Rep-Net": {"strategy": "sidenet", "prune": "off", "sample_wise": "off", "weight_storage": "float32"},
    "image by image": {"strategy": "sidenet", "prune": "off", "sample_wise": "on", "weight_storage": "float32"},
    "image by image, int8": {"strategy": "sidenet", "prune": "off", "sample_wise": "on", "weight_storage": "int8"},
    "pruned": {"strategy": "sidenet", "prune": "on", "sample_wise": "off", "weight_storage": "float32"},
    "pruned, int8": {"strategy": "sidenet", "prune": "on", "sample_wise": "off", "weight_storage": "int8"},
    "head": {"strategy": "sidenet", "scheme": "head", "sample_wise": "off", "weight_storage": "float32"},
    "bias+head": {"strategy": "sidenet", "scheme": "bias+head", "weight_storage": "float32"},
    "full": {
        "strategy": "elastic", "scheme": "full", "lean": False, "optimizer": "adamw", "weight_decay": 0.0, "lr": 1e-4,
    },
}  # fmt: skip
"""Full fine-tuning at a sixth of the others' learning rate, at which Adam unlearns what was pre-trained (20 % of five
classes)."""

app = program("sidenet")


@app.command
def activation(
    *, model: str = "mobilenet_v2", image_size: int = 224, classes: int = 10, options: Options = DEFAULTS
) -> None:
    """Analytic and measured activation memory of a step, as the network is and kept or run in other ways.

    Args:
        model: network.
        image_size: side of the images in pixels.
        classes: outputs of the classifier.
        options: what every benchmark takes; the paper's batch size is 8.
    """
    snugfit.prepare_process(options.threads)
    results = ResultFile("sidenet", options)
    settings = options.settings(model=model, image_size=image_size, classes=classes)
    settings.pop("data")
    label = "claim=activation " + " ".join(f"{key}={value}" for key, value in settings.items())
    subject = Subject.of(model, image_size, classes, options.batch_size)
    results.once(
        label, lambda: {"ways": table(subject), "channels": subject.ratios}, arm="activation", settings=settings
    )
    finish(results, render)


@app.command
def memory(
    *,
    weights: Path,
    model: str = "mobilenet_v2",
    budgets: tuple[str, ...] = ("30MB", "40MB", "50MB", "80MB"),
    image_size: int = 224,
    max_train: int = 48,
    options: Options = DEFAULTS,
) -> None:
    """What is chosen in a memory budget, and the peak that is measured while the budget is enforced.

    Args:
        weights: pre-trained weights.
        model: network.
        budgets: memory budgets.
        image_size: side of the images in pixels.
        max_train: training images.
        options: what every benchmark takes.
    """
    results = ResultFile("sidenet", options)
    for budget in budgets:
        settings = options.settings(
            model=model, strategy="sidenet", memory=budget, epochs=1, image_size=image_size, max_train=max_train,
            max_val=8,
        )  # fmt: skip
        _train(results, "memory", settings, options, weights)
    finish(results, render)


@app.command
def transfer(
    *,
    weights: Path,
    model: str = "mobilenet_v2",
    methods: tuple[str, ...] = tuple(METHODS),
    epochs: int = 5,
    lr: float = 0.0006,
    image_size: int = 224,
    max_train: int | None = None,
    max_val: int | None = None,
    seed: int = 0,
    options: Options = DEFAULTS,
) -> None:
    """Accuracy, peak bytes and seconds of every method on real images, at equal epochs.

    Args:
        weights: pre-trained weights.
        model: network.
        methods: what to compare.
        epochs: passes over the images; the paper takes 5.
        lr: peak learning rate of the classifier and of biases; 5 times that in side networks, as in Rep-Net's scripts.
        image_size: side of the images in pixels.
        max_train: training images.
        max_val: validation images, and test images.
        seed: seed.
        options: what every benchmark takes.
    """
    results, limits = ResultFile("sidenet", options), {"max_train": max_train}
    limits |= {} if max_val is None else {"max_val": max_val}
    for method in methods:
        settings = options.settings(model=model, epochs=epochs, lr=lr, image_size=image_size, **limits, seed=seed)
        settings.update(METHODS[method])
        _train(results, "transfer", settings, options, weights, method=method)
    finish(results, render)


def _train(
    results: ResultFile, claim: str, settings: Settings, options: Options, weights: Path, method: str = "sidenet"
) -> None:
    label = f"claim={claim} " + " ".join(f"{key}={value}" for key, value in settings.items())
    results.once(
        label, lambda: train({**settings, "weights": weights}, options), arm=claim, settings=settings, method=method
    )


if __name__ == "__main__":
    app()
