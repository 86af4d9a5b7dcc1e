"""Couplings of gradient-isolated modules that are trained one after another from a cache: what each brings and costs.

A module trains to its end, then passes every image forward once, and the next module trains on that. So a coupling may
read the image, but not the neighbour. Two such couplings are compared with none:

- reconstruction: a small decoder reads the module's output, and the squared error of the image that it makes counts in
  the module's loss (InfoPro, Wang et al., ICLR 2021; here the image has half its size). Its weight falls linearly to 0
  at the last module.
- context: every module but the first also reads a smaller copy of the image, through two convolutions whose output is
  added to its input (as ContSup's encoder, which reads the whole image and pools afterwards). They stay in the trained
  model.

The gradient distance of SGR needs two neighbours in memory at the same time, so it is no candidate.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program
from benchmarks.store import ResultFile, finish, markdown, mb, number, percent
from snugfit import _data as datasets
from snugfit import _models as models
from snugfit._chain import Chain, tracking_norms
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.optimizers import ParameterOptimizers, lr_factor
from snugfit._training.seeding import derive_seed
from snugfit._training.task import count_correct
from snugfit._upstream import to_channels_last
from snugfit.local.assignment import Layout
from snugfit.memory import tensor_peak_bytes
from snugfit.profiling import unit_stats
from snugfit.strategies.blockwise.modules import balanced_sizes
from snugfit.strategies.blockwise.probes import module_costs
from snugfit.strategies.blockwise.worker import initialise_loss, loss_without_head
from snugfit.strategies.recomputation.unit_costs import unit_costs

NONE, RECONSTRUCTION, CONTEXT = "none", "reconstruction", "context"
BACKPROP = "backprop"
HIDDEN = 12
"""Channels between the two convolutions of a decoder or encoder, as in InfoPro."""
STATISTICS = 16
"""Batches from which the statistics of BatchNorm are computed after training."""
PASS = 250
"""Images at once where nothing trains."""

app = program("coupling")


@app.default
def main(
    *,
    model: str = "resnet20",
    modules: tuple[int, ...] = (2, 4),
    losses: tuple[str, ...] = ("aan", "auglocal"),
    couplings: tuple[str, ...] = (NONE, RECONSTRUCTION, CONTEXT),
    backprop: bool = True,
    images: int = 6000,
    held_out: int = 2000,
    epochs: int = 12,
    lr: float = 0.05,
    seed: int = 0,
    options: Options = DEFAULTS,
) -> None:
    """Train modules one after another with and without couplings.

    For example: python -m benchmarks.coupling --images 2000 --epochs 6 --batch-size 64 --threads 1

    Args:
        model: model to train.
        modules: numbers of modules.
        losses: local losses, with options if needed.
        couplings: none, reconstruction, context.
        backprop: train also the whole network by its own loss.
        images: training images.
        held_out: validation images, and test images.
        epochs: epochs of each module.
        lr: peak learning rate of SGD with momentum 0.9; one epoch of warm-up, then half a cosine.
        seed: seed.
        options: what every benchmark takes.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    results = ResultFile("coupling", options)
    shared = options.settings(model=model, max_train=images, max_val=held_out, epochs=epochs, lr=lr, seed=seed)
    arms = [{"modules": 1, "local_loss": BACKPROP, "coupling": NONE}] if backprop else []
    for count in modules:
        arms += [{"modules": count, "local_loss": loss, "coupling": each} for each in couplings for loss in losses]
    for arm in arms:
        settings = {**shared, **arm}
        label = " ".join(f"{key}={value}" for key, value in settings.items())
        results.once(label, lambda s=settings: run_arm(s, options.data_dir), settings=settings)  # type: ignore[misc]
    finish(results, render)


class Rows:
    """Inputs of a module with the smaller images and the labels of a split."""

    def __init__(self, inputs: Tensor, images: Tensor, labels: Tensor) -> None:
        self.inputs, self.images, self.labels = inputs, images, labels

    def epoch(self, seed: int, epoch: int, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Shuffled batches of inputs (B, ...), images (B, C, H, W) and labels (B,); full batches only."""
        generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
        order = torch.randperm(len(self.labels), generator=generator)
        for start in range(0, max(1, len(order) - batch + 1), batch):
            yield self._at(order[start : start + batch])

    def in_order(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All batches, as stored."""
        for rows in torch.arange(len(self.labels)).split(PASS):
            yield self._at(rows)

    def _at(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self.inputs[rows].float().contiguous(memory_format=torch.channels_last)
        return inputs, self.images[rows].float(), self.labels[rows]


class Source:
    """A training split of images, as :class:`Rows` has it; images are augmented differently in every epoch."""

    def __init__(self, batches: datasets.Batches) -> None:
        self.batches = batches

    def epoch(self, seed: int, epoch: int, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Shuffled batches of images (B, C, H, W), smaller images and labels (B,); their seed is that of the data."""
        for images, labels in self.batches.epoch(epoch, batch):
            yield images, smaller(images), labels

    def in_order(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All batches, without augmentation, as blockwise caches them by default."""
        for images, labels in self.batches.in_order(PASS):
            yield images, smaller(images), labels


def smaller(images: Tensor) -> Tensor:
    """Images (B, C, H, W) at half their height and width."""
    return F.avg_pool2d(images, 2)


def _two_convolutions(before: int, after: int) -> nn.Sequential:
    first = nn.Conv2d(before, HIDDEN, 3, padding=1, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(HIDDEN), nn.ReLU(), nn.Conv2d(HIDDEN, after, 3, padding=1))


class Module(nn.Module):
    """A gradient-isolated module with its local loss and its coupling."""

    def __init__(self, layout: Layout, index: int, coupling: str) -> None:
        super().__init__()
        merged, first, last = layout.modules[index], index == 0, layout.is_last(index)
        channels = layout.chain.input_shape[0]
        self.body, self.loss = merged.module, layout.make_loss(index)
        self.weight = 1 - index / (len(layout) - 1) if coupling == RECONSTRUCTION and not last else 0.0
        self.decoder = _two_convolutions(merged.output_shape[0], channels) if self.weight else None
        reads = coupling == CONTEXT and not first
        self.encoder = _two_convolutions(channels, merged.input_shape[0]) if reads else None

    def forward(self, inputs: Tensor, images: Tensor) -> Tensor:
        """Map inputs (B, ...) and smaller images (B, C, H, W) to features (B, ...)."""
        if self.encoder is not None:
            inputs = inputs + self.encoder(F.adaptive_avg_pool2d(images, (inputs.shape[2], inputs.shape[3])))
        features: Tensor = self.body(inputs)
        return features

    def objective(self, features: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """The loss (scalar) of features (B, ...), smaller images (B, C, H, W) and labels (B,)."""
        loss: Tensor = self.loss(features, labels).loss
        if self.decoder is not None:
            resized = F.interpolate(features, size=images.shape[2:], mode="bilinear")
            loss = loss + self.weight * F.mse_loss(self.decoder(resized), images)
        return loss


class Trainer:
    """A module with its optimizers; gradients are applied and freed in the backward pass."""

    def __init__(self, module: Module, lr: float) -> None:
        self.module = module
        self.settings = OptimizerSettings("sgd", lr=lr, schedule="cosine")
        self.optimizers = ParameterOptimizers(module.named_parameters(), self.settings)
        self.optimizers.apply_in_backward()

    def step(self, inputs: Tensor, images: Tensor, labels: Tensor) -> None:
        """Train on inputs (B, ...), smaller images (B, C, H, W) and labels (B,)."""
        self.module.objective(self.module(inputs, images), images, labels).backward()

    def fit(self, source: Source | Rows, settings: Settings) -> float:
        """Train for all epochs; CPU seconds of an epoch."""
        self.module.train()
        epochs, batch, seed = settings["epochs"], settings["batch_size"], settings["seed"]
        steps, done, started = max(1, settings["max_train"] // batch), 0, time.process_time()
        for epoch in range(epochs):
            for inputs, images, labels in source.epoch(seed, epoch, batch):
                warmed = (done + 1) / steps
                self.optimizers.set_lr_factor(min(warmed, lr_factor(self.settings, done, steps, epochs)))
                self.step(inputs, images, labels)
                done += 1
        seconds: float = (time.process_time() - started) / epochs
        self.optimizers.release()
        settle(self.module, source, settings)
        return seconds


@torch.no_grad()
def settle(module: Module, source: Source | Rows, settings: Settings) -> None:
    """Replace running statistics by those of a few batches, and end in evaluation mode."""
    norms = [(norm, norm.momentum) for norm in tracking_norms(module) if isinstance(norm, nn.BatchNorm2d)]
    for norm, _ in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    batches = source.epoch(settings["seed"], settings["epochs"], settings["batch_size"])
    for _, (inputs, images, labels) in zip(range(STATISTICS), batches, strict=False):
        module.objective(module(inputs, images), images, labels)
    for norm, momentum in norms:
        norm.momentum = momentum
    module.eval()


@torch.no_grad()
def outputs(module: Module, source: Source | Rows) -> Rows:
    """What the next module trains on: features in 16 bits, as a cache stores them."""
    parts = [(module(inputs, images).half(), images.half(), labels) for inputs, images, labels in source.in_order()]
    features, small, classes = zip(*parts, strict=True)
    return Rows(torch.cat(features), torch.cat(small), torch.cat(classes))


@torch.no_grad()
def accuracy_of(module: Module, source: Source | Rows) -> float:
    """Accuracy in [0, 1] of a module's classifier."""
    right, seen = 0, 0
    for inputs, images, labels in source.in_order():
        right += int(count_correct(module.loss.predict(module(inputs, images)), labels))
        seen += len(labels)
    return right / seen


@dataclass(frozen=True)
class Divided:
    """A network on the meta device and its division into modules."""

    layout: Layout
    workload: Workload

    @classmethod
    def of(cls, settings: Settings, splits: datasets.Splits) -> Divided:
        """Divide as the planner does: the largest module needs as little memory as possible."""
        shape, classes = splits.image_shape, len(splits.class_names)
        loss = "aan" if settings["local_loss"] == BACKPROP else settings["local_loss"]
        workload = Workload(settings["model"], settings["data"], shape, classes, settings["max_train"], 1, 1)
        with torch.device("meta"):
            chain = Chain.from_module(models.build(settings["model"], classes, shape[-1], shape[0]), shape)
        units = unit_costs(chain, unit_stats(chain), settings["batch_size"])
        costs = module_costs(Layout.of(chain, loss, classes), units, workload, settings["batch_size"])
        return cls(Layout.of(chain, loss, classes, balanced_sizes(costs, settings["modules"])), workload)

    def on_cpu(self, settings: Settings) -> Layout:
        """The same modules with weights that depend on the seed alone."""
        torch.manual_seed(settings["seed"])
        shape, workload, same = self.workload.input_shape, self.workload, self.layout
        module = models.build(workload.model, workload.classes, shape[-1], shape[0])
        to_channels_last(module)
        return Layout.of(Chain.from_module(module, shape), same.local_loss, workload.classes, same.sizes)

    def peak_bytes(self, index: int, settings: Settings) -> int:
        """Peak tensor bytes of the second step of a module, with only that module in memory."""
        batch, height, width = settings["batch_size"], *self.workload.input_shape[1:]
        with torch.device("meta"):
            module = Module(copy.deepcopy(self.layout), index, settings["coupling"]).train()
        trainer, shape = Trainer(module, settings["lr"]), self.layout.modules[index].input_shape

        def step() -> None:
            inputs = torch.empty((batch, *shape), device="meta", memory_format=torch.channels_last)
            images = torch.empty(batch, self.workload.input_shape[0], height // 2, width // 2, device="meta")
            trainer.step(inputs, images, torch.zeros(batch, dtype=torch.int64, device="meta"))

        return tensor_peak_bytes(step, [module], repeats=2)


def run_arm(settings: Settings, data_dir: str | None) -> Cell:
    """Train all modules of an arm one after another, and test the whole network."""
    counts = {"max_train": settings["max_train"], "max_val": settings["max_val"]}
    splits = datasets.load(settings["data"], data_dir=data_dir, seed=settings["seed"], **counts)
    divided = Divided.of(settings, splits)
    layout = divided.on_cpu(settings)
    sources = _sources(splits, settings["seed"])
    seconds, validation, added, stored = 0.0, list[float](), 0, 0
    for index in range(len(layout)):
        module = made(layout, index, settings)
        seconds += Trainer(module, settings["lr"]).fit(sources["train"], settings)
        validation.append(accuracy_of(module, sources["val"]))
        added += _count(loss_without_head(module.loss)) + _count(module.decoder)
        stored += _count(module.encoder)
        if not layout.is_last(index):
            sources = {split: outputs(module, source) for split, source in sources.items()}
    return {
        "units": list(layout.sizes),
        "val": validation[-1],
        "test": accuracy_of(module, sources["test"]),
        "exits": validation,
        "trained_parameters": added,
        "model_parameters": stored,
        "peak_bytes": [divided.peak_bytes(index, settings) for index in range(len(layout))],
        "cpu_seconds_per_epoch": round(seconds, 2),
    }


def made(layout: Layout, index: int, settings: Settings) -> Module:
    """A module with initial weights."""
    seed = derive_seed(settings["seed"], "module", index)
    torch.manual_seed(seed)
    module = Module(layout, index, settings["coupling"])
    if (own := loss_without_head(module.loss)) is not None:
        initialise_loss(own, seed)
    to_channels_last(module)
    return module


def _sources(splits: datasets.Splits, seed: int) -> dict[str, Source | Rows]:
    assert splits.test is not None
    transform = datasets.Transform(splits.mean, splits.std, splits.flip)
    return {
        "train": Source(datasets.Batches(splits.train, transform, seed=seed, augment=True)),
        "val": Source(datasets.Batches(splits.val, transform, seed=seed)),
        "test": Source(datasets.Batches(splits.test, transform, seed=seed)),
    }


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def render(cells: list[Cell]) -> str:
    """A table for each length of training, with a row per arm."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in (each for each in cells if "cpu_seconds_per_epoch" in each):
        keys = ("model", "data", "max_train", "max_val", "epochs", "seed")
        groups.setdefault(tuple(cell["settings"][key] for key in keys), []).append(cell)
    return "\n\n".join(_group_part(key, group) for key, group in groups.items())


def _group_part(key: tuple[Any, ...], cells: list[Cell]) -> str:
    model, data, images, held_out, epochs, seed = key
    title = (
        f"**{model}** on {data}, {images} training images, {epochs} epochs per module, {held_out} test images, "
        f"one seed ({seed}); a standard error is about {number(100 * (0.24 / held_out) ** 0.5, 1)} points"
    )
    ordered = sorted(cells, key=lambda cell: int(cell["settings"]["modules"]))
    return f"{title}\n\n{markdown(HEADER, [_row(cell) for cell in ordered])}"


HEADER = (
    "modules",
    "local loss",
    "coupling",
    "validation",
    "test",
    "parameters only in training",
    "parameters added to the model",
    "peak tensors (MB)",
    "CPU s/epoch",
)


def _row(cell: Cell) -> list[str]:
    settings = cell["settings"]
    return [
        str(settings["modules"]),
        settings["local_loss"],
        settings["coupling"],
        percent(cell["val"]),
        percent(cell["test"]),
        f"{cell['trained_parameters']:,}",
        f"{cell['model_parameters']:,}",
        mb(max(cell["peak_bytes"])),
        number(cell["cpu_seconds_per_epoch"], 1),
    ]


if __name__ == "__main__":
    app()
