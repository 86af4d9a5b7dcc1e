"""Predicted peaks from measured lines: safety margins, smallest budgets, and synthetic batches and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.options import CacheDtype
from snugfit._core.profile import Profile
from snugfit._core.workload import Workload
from snugfit._quantities import MB
from snugfit._storage.activation_cache import RowFormat
from snugfit._training.average_precision import bytes_of_scores
from snugfit._training.statistics import images_for
from snugfit._training.task import Classification, Task
from snugfit._upstream import kept_shared, to_channels_last
from snugfit.memory.device import uses_devices
from snugfit.memory.process import is_own_process


@dataclass(frozen=True)
class Safety:
    """What is added to a peak for memory that no probe sees: reading, augmentation, saving, heap fragments.

    Attributes:
        share: share of the peak.
        bytes: bytes, whatever the peak.
    """

    share: float
    bytes: int

    def added_to(self, peak_bytes: float) -> int:
        """A peak with it."""
        return int(peak_bytes * (1 + self.share)) + self.bytes


SAFETY = Safety(0.015, 2_500_000)
"""Where other networks were trained before in the same process, phases were up to 2.9 MB above their probes."""
OWN_SAFETY = Safety(0.01, 2_000_000)
"""In a process that was started for the run, phases were 2 MB below to 2.1 MB above their probes."""
DEVICE_SAFETY = Safety(0.01, 22 * 2**20)
"""Where a device has a memory of its own: its allocator takes memory in pieces of 2 and of 20 MiB, so a peak between
two measured ones may lie that far above its tensors."""
RESERVED_BYTES = 5_000_000
"""Bytes that a budget must have beyond the predicted peak: a dry run reserves space for kernels (4.2 MB) in its first
step, and for the real phase (1 MB) in both."""
LEAST_RESERVED_BYTES = 1_000_000
"""What of them remains where the optimizer state, which the first step begins without, is larger."""
HOLE_BYTES = 26_000
"""Holes in the heap per parameter tensor where weights are stored in bfloat16, or optimizer state in 8 bits: so small,
these share the heap with the float32 copies that come and go. Measured per tensor in MobileNetV2 and ResNet-50 at 224
pixels with such weights, beyond the safety: 13 to 21 kB. With such state runs measured 16 to 27 kB more above their
probes than with float32 (VGG-16, VGG-19, ResNet-18)."""
PASS_SHARE = 1 / 3
"""Kernels of a forward pass without training over those of a training step, which has two more passes."""
DRIFT_BYTES = 2_000_000
"""Difference in memory before training between two processes; a recommended budget must suffice in the next one."""
TENSOR_TO_PROCESS = 1.12
"""Upper bound of process peak over tensor peak: measured 2-9 %, and workspace of the first layers."""
MAX_PARTIALS = 3
"""Most additional partial weight gradients that oneDNN sums: 1 with 2 or 4 threads, 3 with 8 or 16."""
SYNTHETIC_SAMPLES = 8
"""Distinct samples in a synthetic batch, which repeats them: drawing takes longer than copying."""
DISTINCT_WEIGHTS = 4099
"""Distinct values in synthetic weights; a prime number, so that no two rows of a matrix are equal."""


def safety() -> Safety:
    """What is added to every peak that this process predicts."""
    return OWN_SAFETY if is_own_process() and not uses_devices() else full_safety()


def full_safety() -> Safety:
    """The safety by which every process decides what fits."""
    return DEVICE_SAFETY if uses_devices() else SAFETY


def with_safety(resident_bytes: float, step_bytes: float) -> int:
    """Predicted peak of a phase: resident bytes, bytes of its step, and the safety margin."""
    return safety().added_to(resident_bytes + step_bytes)


def with_full_safety(peak_bytes: int) -> int:
    """A peak that this process predicted, with the safety by which every process decides what fits."""
    added = safety()
    return full_safety().added_to((peak_bytes - added.bytes) / (1 + added.share))


def step_headroom(budget: Budget, resident_bytes: float, reserved_bytes: float = RESERVED_BYTES) -> float:
    """Bytes available to a step such that its predicted peak leaves ``reserved_bytes``; infinite without a budget."""
    memory = float("inf") if budget.memory_bytes is None else budget.memory_bytes
    return available_headroom(memory, reserved_bytes) - resident_bytes


def available_headroom(available_bytes: float, reserved_bytes: float = RESERVED_BYTES) -> float:
    """Bytes available to resident memory plus a step such that their peak leaves ``reserved_bytes``.

    It is the same in every process, because a budget that was enough in one has to be enough in the next.
    """
    least = full_safety()
    return (available_bytes - reserved_bytes - least.bytes) / (1 + least.share)


def reserved_bytes(state_bytes: float, passing_bytes: float) -> float:
    """Bytes that a budget must have beyond a predicted peak, at which a first step has no ``state_bytes`` yet.

    ``passing_bytes`` bounds :func:`passing_kernel_bytes`, which a predicted peak includes.
    """
    return max(RESERVED_BYTES - state_bytes, LEAST_RESERVED_BYTES + passing_bytes * (1 + SAFETY.share))


def partial_gradient_bytes(workload: Workload, device: str, *modules: nn.Module) -> int:
    """Workspace of the largest convolution's weight gradient that depends on the batch size.

    In bfloat16 oneDNN splits a convolution's weight gradient among threads by channels or by images. By images, every
    group of threads has its own float32 gradient, and these are summed. oneDNN does so above some batch size, and
    earlier for multiples of the number of threads: 512 to 512 channels on 12x12 feature maps with 2 threads needed
    14.4 MB at 31, 33 and 35 images, and 24.1 MB at 32, 34 and 36. In float32 the workspace does not depend on the
    batch size.
    """
    if workload.precision != "bfloat16" or device != "cpu":
        return 0
    layers = (layer for module in modules for layer in module.modules())
    largest = max((layer.weight.numel() for layer in layers if isinstance(layer, nn.Conv2d)), default=0)
    return min(torch.get_num_threads() // 2, MAX_PARTIALS) * largest * torch.float32.itemsize


def passing_kernel_bytes(workload: Workload, batch: int, shape_bytes: float) -> int:
    """Kernels of passes without training that are in memory while later epochs train.

    The last batch of such a pass may be smaller, and every batch size has kernels of its own.
    """
    counts = (workload.val_count, images_for(workload.train_count))
    sizes = {count % batch for count in counts} - {0}
    return int(len(sizes) * PASS_SHARE * shape_bytes) if workload.epochs > 1 else 0


def evaluation_bytes(workload: Workload) -> int:
    """What an evaluation keeps of a whole split: logits and targets, if images may have several labels."""
    if workload.task != "multi-label":
        return 0
    return bytes_of_scores(max(workload.val_count, workload.test_count), workload.classes)


def heap_hole_bytes(workload: Workload, tensors: int) -> int:
    """Free memory in the heap that nothing else fits into, of a network with a number of parameter tensors."""
    rounds = workload.weight_dtype != "float32" or workload.optimizer.state == "int8"
    return HOLE_BYTES * tensors if rounds else 0


def forward_images(workload: Workload, *, tracks: bool) -> int:
    """Images of an epoch that only pass forward: for validation, and if norms track statistics, to recompute these."""
    return workload.val_count + (images_for(workload.train_count) if tracks else 0)


def smallest_budget(profile: Profile, floor_bytes: int) -> int:
    """Smallest memory budget that holds a step of ``floor_bytes`` of tensors, rounded up to the next MB.

    Where a device's allocator rounds up, a measured step exceeds its tensors by as much as the safety allows for.
    """
    rounding = DEVICE_SAFETY.bytes if uses_devices() else 0
    peak = full_safety().added_to(profile.base_bytes + int(floor_bytes * TENSOR_TO_PROCESS) + rounding)
    needed = peak + RESERVED_BYTES + DRIFT_BYTES
    return -(-needed // MB) * MB


def require_images(batch: int, most: int, *modules: nn.Module) -> None:
    """Refuse to train batch norms on micro-batches of one image, as torch does for 1x1 feature maps only.

    Normalising the few values of a small feature map removes the difference between classes: MobileNetV2 at 96 px
    diverged at step 3. Norms in evaluation mode use their stored statistics and accept any batch. If ``most``, the
    user's batch size, is 1, it is accepted.

    Raises:
        ValueError: batch norms cannot train on one image.
    """
    norms = (layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm))
    if batch == 1 < most and any(norm.training for norm in norms):
        raise ValueError("batch norms need more than one image")


def random_batch(shape: tuple[int, ...], classes: int, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Random inputs (batch, *shape) in channels_last and labels (batch,) below ``classes``."""
    return synthetic_batch(Classification(classes), shape, batch, device)


def synthetic_batch(task: Task, shape: tuple[int, ...], batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Random inputs (batch, *shape) in channels_last and targets (batch, ...) of a task."""
    memory_format = torch.channels_last if len(shape) == 3 else torch.contiguous_format
    inputs = torch.empty((batch, *shape), device=device, memory_format=memory_format)
    if device != "meta":
        few = torch.randn((min(batch, SYNTHETIC_SAMPLES), *shape), device=device)
        for start in range(0, batch, len(few)):
            inputs[start : start + len(few)] = few[: batch - start]
    return inputs, task.synthetic_targets(batch, device)


def stored_batches(shape: tuple[int, ...], batch: int, dtype: CacheDtype) -> Tensor:
    """Memory of two batches of cached activations, one in use and one being read: (2, batch, bytes), uint8."""
    return torch.ones((2, batch, RowFormat(shape, dtype).row_bytes), dtype=torch.uint8)


def place_synthetic_weights(module: nn.Module, device: str) -> None:
    """Put a module on a device with synthetic weights in the layout of a real run.

    On the meta device only the layout changes. Autograd copies a gradient whose layout differs from its weight's, so
    floors of networks with wide convolutions on small feature maps counted a gradient twice: VGG-11 at 32 px 132.8 MB
    instead of 123.4 MB.
    """
    if device == "meta":
        to_channels_last(module)
    else:
        with kept_shared(module):
            module.to_empty(device=device)
        fill_synthetic_weights(module)


def fill_synthetic_weights(module: nn.Module) -> None:
    """Give a module synthetic weights in channels_last, so that steps neither diverge nor meet denormals.

    The layout changes afterwards, as for real weights; this briefly takes a copy of the largest weight.
    """
    for parameter in module.parameters():
        if parameter.dim() > 1:
            _fill_normal(parameter.data)
        else:
            nn.init.ones_(parameter)
    for name, buffer in module.named_buffers():
        buffer.fill_(1 if name.endswith("var") else 0)
    to_channels_last(module)


def weight_layers(chain: Chain) -> int:
    """Number of convolutions and linear layers."""
    layers = (layer for unit in chain.all_units for layer in unit.module.modules())
    return sum(isinstance(layer, (nn.Conv2d, nn.Linear)) for layer in layers)


def _fill_normal(weight: Tensor) -> None:
    """Fill a weight of any shape with repeated normal draws; drawing every value takes a fifth of a plan's time."""
    is_dense = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    if not is_dense or weight.numel() < DISTINCT_WEIGHTS:
        weight.normal_(std=0.02)
        return
    drawn = torch.randn(DISTINCT_WEIGHTS, device=weight.device) * 0.02
    for part in weight.as_strided((weight.numel(),), (1,), weight.storage_offset()).split(DISTINCT_WEIGHTS):
        part.copy_(drawn[: len(part)])
