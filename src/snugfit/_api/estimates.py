"""Estimate: how much memory a training step needs, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from snugfit._core.estimate import EstimateOptions, MemoryEstimate
from snugfit._core.inputs import inputs_text
from snugfit._core.keywords import EstimateKeywords, with_keywords
from snugfit._core.known import check_model
from snugfit._core.options import from_keywords
from snugfit._data.prepared import inputs_of
from snugfit._engine.estimating import estimate_step
from snugfit._engine.packed_batches import batch_size
from snugfit.errors import UsageError, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Estimate(MemoryEstimate):
    """How much memory training needs, by batch size; prints as tables.

    >>> import snugfit
    >>> print(snugfit.estimate("smallconv", (1, 8, 8), batch_size=32))
    smallconv, 362k parameters, input 1x8x8, sgd
    ...
    parameters                                    1.4 MB    1.4 MB
    ...
    """

    def __str__(self) -> str:
        from snugfit._report.tables import estimate_text

        return estimate_text(self)


def estimate(
    model: str | nn.Module | Callable[[], nn.Module],
    input: Tensor | Sequence[Any] | Mapping[str, Any] | str,
    **options: Unpack[EstimateKeywords],
) -> Estimate:
    """Say how much memory training needs, and why, without data and without allocating any of it.

    Two steps run on the meta device, and the tensors of the second are counted: parameters and buffers, gradients,
    optimizer state, activations that are kept for the backward pass, and temporaries. The step is that of the usual
    loop with a fused optimizer, in channels_last: the whole batch forward and backward with cross entropy, then the
    update. The peak is that of a real step's tensors on the processor, plus a scalar (a test compares them). Workspace
    inside an operator is no tensor; in 95 % of measured runs a process took at most ``process_extra_bytes`` more. The
    module is copied without its weights, and stays as it is.

    >>> import snugfit
    >>> found = snugfit.estimate("resnet20", (3, 32, 32), batch_size=32, optimizer="adamw")
    >>> found.steps[0].at_peak["parameters"] == 4 * found.parameters
    True
    >>> [each.name for each in found.steps[0].lower]
    ['gradients released', 'micro-batches', 'optimizer state in 8 bits', 'recomputation']

    A network of several inputs takes a shape for each, by position or by the keyword of its forward pass. A shape is
    without the batch; its type, if it is not float32, is the last part of a text, and alone that of a number:

    >>> class Both(nn.Bilinear):
    ...     def forward(self, words, age):
    ...         return super().forward(words.float(), age.unsqueeze(1))
    >>> found = snugfit.estimate(Both(16, 1, 10), {"words": "16xint64", "age": ()}, batch_size=32)
    >>> found.steps[0].whole["batch"] == 32 * (16 * 8 + 4 + 8)  # with labels
    True

    Args:
        model: a name, a module on any device, or a function that makes one. It maps images (B, C, H, W), or several
            inputs (B, ...), to logits (B, classes) or (B, classes, ...).
        input: channels, height and width of an image; or an example batch (B, C, H, W), whose B is the default batch
            size. For several inputs a tuple, list or dictionary of shapes, or of such batches (B, ...).
        **options: those of ``snugfit estimate``, with underscores, like ``batch_size=(32, 64)`` or ``memory="2GB"``;
            ``classes`` is for a model by name.

    Returns:
        One :class:`snugfit.Estimate`; ``print`` shows it as tables.

    Raises:
        UsageError: an option does not exist or is out of range, or the input is none of these.
        DataError: an input of several is empty or of another type than floats, booleans, signed integers and uint8.
        ModelError: the model does not run on such an input, or its forward pass reads values.
        BudgetExceededError: ``measure`` is set, and memory is refused.
    """
    shape, size = _described(input)
    given: dict[str, Any] = {**size, **options}
    if "input_shape" in given:
        raise UsageError("give the shape as the input, the second argument, and leave out input_shape=.")
    if isinstance(given.get("batch_size"), (list, tuple)):
        given["batch_size"] = ",".join(map(str, given["batch_size"]))
    chosen = from_keywords(EstimateOptions, {**given, "input_shape": shape})
    if isinstance(model, str):
        check_model(model)
    elif chosen.classes is not None:
        raise UsageError("classes= is for a model that is given by name; a module has its own.")
    return Estimate(**vars(estimate_step(model, chosen)))


_OPTIONS = {each.name: each.default for each in fields(EstimateOptions) if each.name != "input_shape"}
vars(estimate)["__signature__"] = with_keywords(estimate, _OPTIONS)


def _described(input: Any) -> tuple[Any, dict[str, int]]:
    """Shapes as ``--input-shape`` has them, and the batch size of an example: images (B, C, H, W), or inputs (B, ...).

    Raises:
        UsageError, DataError: as for :func:`estimate`.
    """
    values = list(input.values() if isinstance(input, Mapping) else input if isinstance(input, (tuple, list)) else ())
    if any(isinstance(value, Tensor) for value in values):
        size = batch_size(values)
        first = [value[0] for value in values]
        named = dict(zip(input, first, strict=True)) if isinstance(input, Mapping) else first
        return inputs_text(inputs_of(named, 0)), {"batch_size": size}
    if isinstance(input, Tensor):
        if input.dim() != 4 or not input.is_floating_point():
            raise UsageError(
                f"an example must be images (batch, channels, height, width) in floats, not {input.dtype} of shape "
                f"{tuple(input.shape)}."
            )
        return input.shape[1:], {"batch_size": max(len(input), 1)}
    if not isinstance(input, (Sequence, Mapping)):
        raise UsageError(f"the input is a shape like (3, 224, 224), or an example batch, not {shown(input)}.")
    return input, {}
