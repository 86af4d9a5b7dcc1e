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


def wrong(module: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    snugfit.plan("vgg16", epoch=2)  # type: ignore[call-arg]
    snugfit.plan("vgg16", optimizer="adam")  # type: ignore[arg-type]
    snugfit.estimate(module, (3, 32, 32), batchsize=32)  # type: ignore[call-arg]
    snugfit.estimate(module, (3, 32, 32), precision="float16")  # type: ignore[arg-type]
    snugfit.fit(module, F.cross_entropy, example=batch, memory="1GB", epochs=2)  # type: ignore[call-arg]
    snugfit.fit(module, F.cross_entropy, example=batch, memory="1GB", batch_size="8")  # type: ignore[arg-type]
