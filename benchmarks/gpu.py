"""Claim: on a GPU, too, the memory budget is predicted, enforced and measured, context and libraries included.

Eight parts, the most valuable first. Each stops before its time is up, and goes on where it stopped when it is run
again: cells that the result file has are skipped. Nothing is downloaded: without CIFAR below SNUGFIT_DATA the images
are noise in CIFAR's format, which tells of memory and time, not of accuracy. Budgets are in MB above the context.

``--device cpu --quick`` tries a part on the processor, with a tiny network; its result file is no result.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ablations import VARIANTS
from benchmarks.common import (
    DEFAULTS,
    ROOT,
    Cell,
    Options,
    Settings,
    context_flags,
    context_megabytes,
    context_of,
    program,
    run,
    to_flags,
    train,
)
from benchmarks.gpu_settings import CASES
from benchmarks.gpu_tables import render
from benchmarks.machine import describe_machine, slug
from benchmarks.peers import peer
from benchmarks.store import RESULTS, ResultFile, note

PARTS = ("tests", "matrix", "peers", "neuroflux", "accuracy", "elastic", "tiles", "settings")
MODELS = (
    "resnet18", "vgg16", "mobilenet_v2", "resnet50:224", "vgg19", "torchvision:convnext_tiny:224",
    "timm:vit_small_patch16_224:224",
)  # fmt: skip
STRATEGIES = ("backprop", "checkpoint", "blockwise", "elastic")
WAYS = ("plain", "micro", "checkpoint", "save_on_cpu", "lightning", "accelerate", "compile-0.5")
TESTS = ROOT / "tests" / "gpu"
SPARE_SECONDS = 20.0
"""No cell begins with less time left: a process takes that long to begin."""

app = program("gpu")


@dataclass
class Session:
    """One invocation.

    Attributes:
        results: where cells go.
        options: what every benchmark takes.
        quick: whether sizes are tiny.
        jobs: cells at once.
        context_mb: MB of the device at rest, which every budget has on top.
        ends: when the time is up.
        left: cells that were not begun.
    """

    results: ResultFile
    options: Options
    quick: bool
    jobs: int
    context_mb: int
    ends: float
    left: list[str] = field(default_factory=list)

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Run a cell if there is time left for it."""
        left = self.ends - time.monotonic()
        if left < SPARE_SECONDS:
            self.left.append(name)
            return
        self.results.options = replace(self.options, timeout=min(self.options.timeout, left))
        work()

    def settings(self, model: str, above_mb: int | None = None, **more: Any) -> Settings:
        """Flags of a run of a model, with the side of its images behind its name, in a budget above the context."""
        name, _, side = model.rpartition(":") if model.rpartition(":")[2].isdecimal() else (model, "", "32")
        if self.quick:
            name, side = "smallconv", "16"
        memory = None if above_mb is None else f"{above_mb + self.context_mb}MB"
        sizes = {"max_train": 96, "max_val": 32, "batch_size": 32} if self.quick else {}
        return self.options.settings(model=name, image_size=int(side), memory=memory, **{**more, **sizes})

    def few(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items, or the first of them where all is tiny."""
        return items[:1] if self.quick else items


Cells = Iterator[tuple[str, Callable[[], object]]]
"""What each cell is, and what runs it."""


@app.default
def main(
    *,
    part: int,
    minutes: float = 9.0,
    jobs: int = 1,
    quick: bool = False,
    options: Options = DEFAULTS,
) -> int:
    """Run one part, or go on with it; 0 once all of it is done, 1 while cells are left.

    For example: python -m benchmarks.gpu --part 1

    Args:
        part: 1 tests, 2 models x budgets x strategies, 3 peers, 4 NeuroFlux, 5 accuracy, 6 elastic, 7 tiles,
            8 settings of torch.
        minutes: time after which no run begins; what runs then is stopped, and runs again next time.
        jobs: cells at once, for tests and memory; the seconds of runs side by side are not shown, but for peers and
            settings, which take turns.
        quick: tiny networks and few images, to try the part.
        options: what every benchmark takes.
    """
    ends = time.monotonic() + 60 * minutes
    machine = describe_machine(options.device)
    where = RESULTS / f"gpu_{slug(machine)}{'_quick' if quick else ''}.json"
    options = replace(
        options, device=machine["device"], results=options.results or where, data_dir=data_folder(options)
    )
    results = ResultFile("gpu", options)
    results.data.setdefault("data", "noise" if str(options.data_dir).startswith(tempfile.gettempdir()) else "CIFAR")
    session = Session(results, options, quick, jobs, stored_context(results, options), ends)
    with ThreadPoolExecutor(1 if PARTS[part - 1] == "tests" else jobs) as pool:
        list(pool.map(lambda cell: session.run(*cell), _PARTS[part - 1](session)))
    print(render(results.cells, PARTS[part - 1]))
    note(f"part {part}: {len(session.left)} cells left" + ("; run the command again" if session.left else ""))
    return 1 if session.left else 0


def data_folder(options: Options) -> str:
    """Folder with CIFAR-10: the one that was named, or one with noise in its format."""
    named = options.data_dir or os.environ.get("SNUGFIT_DATA")
    if named and (Path(named) / "cifar-10-batches-bin").is_dir():
        return named
    folder = Path(tempfile.gettempdir()) / "snugfit-noise"
    write_noise(folder / "cifar-10-batches-bin", 2000)
    write_noise(folder / "cifar-100-binary", 2000, label_bytes=2, names=("train.bin", "test.bin"))
    return str(folder)


def write_noise(
    folder: Path,
    images: int,
    label_bytes: int = 1,
    names: Sequence[str] = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
) -> None:
    """Write files of random images of 32x32 pixels, each behind its label, whose mean tells the label.

    Args:
        folder: where; nothing is written if it exists.
        images: images in each file.
        label_bytes: 1 as in CIFAR-10, 2 as in CIFAR-100.
        names: the files.
    """
    if folder.exists():
        return
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in names:
        labels = draw.integers(0, 10, images)
        pixels = draw.integers(0, 100, (images, 3 * 32 * 32)) + 15 * labels[:, None]
        records = np.concatenate([np.repeat(labels[:, None], label_bytes, axis=1), pixels], axis=1)
        (folder / name).write_bytes(records.astype(np.uint8).tobytes())


def stored_context(results: ResultFile, options: Options) -> int:
    """What the device holds of a process at rest, in whole MB upwards; 0 on the processor."""
    if options.device == "cpu":
        return 0
    device = str(options.device)
    cell = results.once(" ".join(context_flags(device)), lambda: context_of(device, options), arm="context")
    return context_megabytes(cell, device)


def tests(session: Session) -> Cells:
    """``pytest -m gpu``, file by file; pytest itself runs several at once."""
    for path in session.few(sorted(TESTS.glob("test_*.py"))):
        name = str(path.relative_to(ROOT))
        module = ["pytest", "-q", "-m", "gpu", name]
        yield from _command(session, " ".join(module), partial(_pytest, session, module))


def _command(session: Session, command: str, work: Callable[[], Cell]) -> Cells:
    """A cell that is left if its time is up before it ends."""

    def run_it() -> None:
        cell = work()
        if cell["exit_code"] is None:
            session.left.append(command)
        else:
            session.results.put(command, cell)

    if not session.results.has(command):
        yield command, run_it


def _pytest(session: Session, module: list[str]) -> Cell:
    """Run tests on the device; the counts of the last line, and what failed."""
    os.environ["SNUGFIT_TEST_DEVICE"] = str(session.options.device)
    with tempfile.NamedTemporaryFile("r", suffix=".xml") as report:
        workers = ["-n", str(session.jobs), "--maxprocesses", str(session.jobs), "--dist", "load"]
        cell = run(module, session.results.options, [*workers, "-p", "no:cacheprovider", f"--junitxml={report.name}"])
        text = report.read()
    cell.pop("output")
    counts = {kind: int(number) for kind, number in re.findall(r'\b(tests|failures|errors|skipped)="(\d+)"', text)}
    failed = re.findall(r'name="([^"]+)"[^>]*><(?:failure|error) message="([^"]{0,300})', text)
    return {**cell, "arm": "tests", "counts": counts, "failed": failed}


def matrix(session: Session) -> Cells:
    """Models, budgets and strategies: no run above its budget or its prediction."""
    for above in session.few((400, 100, 1000, 4000, 200, 2000)) if not session.quick else (100, 30):
        for model in session.few(MODELS):
            for strategy in STRATEGIES[:3] if session.quick else STRATEGIES:
                more = {"time_ratio": 0.6} if strategy == "elastic" else {}
                sizes = {"max_train": 512, "max_val": 128, "epochs": 1}
                yield from _train(session, "matrix", model, above, strategy=strategy, **more, **sizes)


def peers(session: Session) -> Cells:
    """Other ways under the same cap: seconds of an epoch, and the largest batch; then precisions.

    Peers take turns on the GPU, and may prepare side by side; but with several jobs only once snugfit's own runs are
    done, which would compute beside them.
    """
    seconds, epochs = (3.0, 1) if session.quick else (6.0, 5)
    sizes = {"max_train": 2560, "max_val": 512, "batch_size": 128}
    subjects = (("vgg16", 250), ("resnet18", 250), ("resnet50:224", 1000))
    own: list[tuple[str, Callable[[], object]]] = []
    for model, above in session.few(subjects):
        for flags in ({"strategy": "auto"}, {"strategy": "checkpoint", "activations": "paged"}):
            own += _train(session, "peers", model, above, epochs=epochs, **flags, **sizes)
    for model, _ in session.few(subjects):
        for precision in ("float32", "bfloat16", "float16"):
            flags = {"strategy": "backprop", "precision": precision, **sizes}
            own += _train(session, "peers", model, 4000, epochs=epochs, **flags)
    yield from own
    for way in WAYS[:3] if session.quick else WAYS:
        for model, above in session.few(subjects):
            settings, name = session.settings(model, above, **sizes), f"{way}, {model}, {above} MB"
            if own and session.jobs > 1:
                session.left.append(name)
                continue
            yield (
                name,
                lambda way=way, settings=settings: peer(session.results, settings, way, seconds, sys.executable),
            )


def neuroflux(session: Session) -> Cells:
    """NeuroFlux's figures: seconds of the whole pipeline against backprop and classic local learning."""
    local = {"strategy": "blockwise", "module_units": "1"}
    ways = ({"strategy": "backprop"}, {**local, **VARIANTS["classic LL"]}, {**local, **VARIANTS["both (blockwise)"]})
    for above in session.few((300, 500, 200, 400, 100)):
        for model in session.few(("vgg16", "vgg19", "resnet18")):
            for flags in ways:
                sizes = {"max_train": 10000, "max_val": 1000, "epochs": 2}
                yield from _train(session, "neuroflux", model, above, **flags, **sizes)


def accuracy(session: Session) -> Cells:
    """CIFAR-10 and CIFAR-100 to the end; a run that was stopped goes on from its checkpoint."""
    ways: dict[str, Settings] = {
        "backprop": {"strategy": "backprop"},
        "modules": {"strategy": "blockwise", "module_units": "auto"},
        "aan": {"strategy": "blockwise", "module_units": "1", "local_loss": "aan"},
        "lls-mxm": {"strategy": "blockwise", "module_units": "1", "local_loss": "lls-mxm"},
    }
    for seed in range(1 if session.quick else 3):
        for data in session.few(("cifar10", "cifar100")):
            for flags in ways.values():
                more = {"data": data, "seed": seed, "epochs": 2 if session.quick else 100}
                yield from _train(session, "accuracy", "vgg8", None, resumes=True, **flags, **more)


def elastic(session: Session) -> Cells:
    """Step time and accuracy of selected tensors against full fine-tuning."""
    sizes = {"max_train": 2048, "max_val": 512, "epochs": 2}
    for model in session.few(("resnet50:224", "vit_b_16:224")):
        yield from _train(session, "elastic", model, None, strategy="backprop", **sizes)
        for ratio in session.few((0.5, 0.35, 0.7)):
            yield from _train(session, "elastic", model, None, strategy="elastic", time_ratio=ratio, **sizes)


def tiles(session: Session) -> Cells:
    """Tiles over time: memory and seconds of an epoch, against the network in one piece."""
    sizes = {"max_train": 256, "max_val": 64, "epochs": 1, "batch_size": 32}
    for model in session.few(("vgg16:224", "resnet18:224")):
        for strategy in ("backprop", "tiled"):
            yield from _train(session, "tiles", model, 4000, strategy=strategy, **sizes)


def settings(session: Session) -> Cells:
    """What settings of torch cost and save in a plain loop."""
    models = (("resnet50", 32, 224), ("resnet18", 128, 32), ("mobilenet_v2", 64, 224))
    for model, batch, side in (("resnet18", 2, 32),) if session.quick else models:
        for changed in session.few(CASES):
            sizes = ["--model", model, "--batch", str(batch), "--side", str(side)]
            module = ["benchmarks.gpu_settings", *sizes, *changed, "--device", str(session.options.device)]
            command = " ".join(["python", "-m", *module])
            yield from _command(session, command, partial(_plain_loop, session, module, model, changed))


def _plain_loop(session: Session, module: list[str], model: str, changed: Sequence[str]) -> Cell:
    labels = {"arm": "settings", "model": model, "changed": " ".join(changed) or "none"}
    return {**labels, **run(module, session.results.options)}


_PARTS: tuple[Callable[[Session], Cells], ...] = (
    tests, matrix, peers, neuroflux, accuracy, elastic, tiles, settings,
)  # fmt: skip


def _train(session: Session, arm: str, model: str, above: int | None, *, resumes: bool = False, **more: Any) -> Cells:
    settings = session.settings(model, above, **more)

    command = " ".join(["snugfit", "train", *to_flags(settings)])

    def work() -> None:
        options = session.results.options
        labels = {"arm": arm, "above_mb": above, "settings": settings, "jobs": session.jobs}
        cell = {**labels, **train(settings, options, resumes=resumes)}
        if cell["exit_code"] is None and options.timeout < session.options.timeout:
            session.left.append(command)  # the part's time was up, not the run's
            return
        session.results.put(command, cell)

    if not session.results.has(command):
        yield command, work


if __name__ == "__main__":
    raise SystemExit(app())
