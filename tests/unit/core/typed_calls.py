"""Calls that mypy reads and nothing runs: it completes keywords, and refuses others and other values.

mypy reports an ``ignore`` that hides no error, so a call that should be refused, and is not, fails.
"""

from torch import Tensor, nn
from torch.nn import functional as F

import snugfit


def right(module: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    snugfit.plan("vgg16", "digits", memory=100_000_000, image_size=(32, 48), epochs=2, optimizer="adamw")
    snugfit.estimate(module, (3, 32, 32), batch_size=(32, 64), memory="2GB", measure=True)
    with snugfit.fit(module, F.cross_entropy, example=batch, memory="1GB", batch_size=8, lr=0.1) as step:
        step(*batch)
    photos, targets = batch
    named = {"photo": photos, "age": targets}
    with snugfit.fit(module, F.cross_entropy, example=(named, targets), memory="1GB") as step:
        step(named, targets)
        step((photos, targets), targets)


def right_with_runs(data: list[tuple[Tensor, int]]) -> None:
    splits = snugfit.from_dataset(data, mean=(0.5,), std=[0.2], image_size=(32, 48), inputs=("photo", "age"))
    boxes = snugfit.load_boxed("boxes", image_size=64, workers=0, max_train=8)
    record = snugfit.resume("run", data=(splits, boxes), loss=F.cross_entropy, metrics={}, schedule=lambda step, _: 1.0)
    record.export("deploy", format="onnx", int8=True)
    snugfit.export("run", free_size=True, data="digits")
    snugfit.draw_report("run", pictures=True, classes=(0, 3), images=4)


def wrong_with_runs(data: list[tuple[Tensor, int]]) -> None:
    snugfit.from_dataset(data, means=(0.5,))  # type: ignore[call-arg]
    snugfit.from_dataset(data, image_size=32.5)  # type: ignore[arg-type]
    snugfit.load_boxed("boxes", flip=True)  # type: ignore[call-arg]
    snugfit.resume("run", epochs=3)  # type: ignore[call-arg]
    snugfit.resume("run", loss="focal")  # type: ignore[arg-type]
    snugfit.export("run", int8="yes")  # type: ignore[arg-type]
    snugfit.export("run", format="onxx")  # type: ignore[arg-type]
    snugfit.draw_report("run", picture=True)  # type: ignore[call-arg]


def wrong(module: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    snugfit.plan("vgg16", epoch=2)  # type: ignore[call-arg]
    snugfit.plan("vgg16", optimizer="adam")  # type: ignore[arg-type]
    snugfit.estimate(module, (3, 32, 32), batchsize=32)  # type: ignore[call-arg]
    snugfit.estimate(module, (3, 32, 32), precision="float16")  # type: ignore[arg-type]
    snugfit.fit(module, F.cross_entropy, example=batch, memory="1GB", epochs=2)  # type: ignore[call-arg]
    snugfit.fit(module, F.cross_entropy, example=batch, memory="1GB", batch_size="8")  # type: ignore[arg-type]
