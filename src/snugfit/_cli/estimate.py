"""``snugfit estimate``: how much memory training needs, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from cyclopts import Group, Parameter

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._core import known
from snugfit._core.estimate import EstimateOptions, MemoryEstimate
from snugfit._core.options import Common

_PANEL = Group("Estimate", sort_key=1)


def estimate(
    *,
    model: Annotated[
        str, Parameter(group=_PANEL), Common("NAME", "network: vgg16, resnet18, timm:NAME or module:function")
    ] = "vgg16",
    options: Annotated[EstimateOptions, Parameter(name="*", group=_PANEL)],
    output: OutputOptions = SHOW_ALL,
) -> None:
    """Say how much memory training needs, and why, without data and without allocating it.

    A training step runs on torch's meta device, and its tensors are counted: weights, gradients, optimizer state,
    activations and temporaries; at which layer the peak is; and what would lower it. For example:

    ```
    snugfit estimate --model resnet18 --input-shape 3x224x224 --classes 100
    snugfit estimate --model vit_b_16 --input-shape 3x224x224 --memory 4GB
    snugfit estimate --model package.module:Net --input-shape 3x224x224,77xint64
    ```

    Args:
        model: a name (``vgg16``), ``torchvision:NAME``, ``timm:NAME`` or your own ``module:function``.
        options: what is estimated.
        output: what is shown.
    """
    known.check_model(model)
    arguments = {"model": model, **asdict(options)}
    arguments["input"] = arguments.pop("input_shape")
    data = run_job(make_job("estimate", output, options.threads, arguments=arguments))
    found = MemoryEstimate.from_json(data)
    if not output.quiet:
        from snugfit._report.tables import print_estimate

        print_estimate(found)
    output.show(data, found.summary())
