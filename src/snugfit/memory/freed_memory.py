"""Freed memory that the heap keeps between two steps, as far as a predicted peak has room for it.

Memory that goes back to the system has to be mapped again, page by page, for the next tensor, which takes up to half of
a step. Freed memory in the heap has holes that not every tensor fits into, so peaks grow with what is kept, by an
amount that differs from run to run. So before every layer, forward and backward, it is checked that there is room for
what the layer takes, and where there is not, everything that is free goes back to the system at once.

Where there is ample room, memory is kept between passes and epochs too, large blocks as well.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from snugfit._core.profile import WHOLE_GROWTH
from snugfit.memory.address_space import KERNEL_BYTES
from snugfit.memory.heap import (
    MMAP_THRESHOLD_BYTES,
    free_held_blocks,
    hold_free_blocks,
    map_large_blocks,
    set_thresholds,
    sets_thresholds,
    trim_free_pages,
)
from snugfit.memory.limit import MemoryLimit
from snugfit.memory.meter import PeakMeter
from snugfit.memory.process import PAGE_BYTES, has_proc, quick_readings

KEEP_ALL_BYTES = -1
"""glibc's trim threshold with which the end of the heap never goes back."""
KEPT_BLOCK_BYTES = MMAP_THRESHOLD_BYTES << 9
"""Freed blocks of fewer bytes are kept: 32 MiB, the most that glibc allows while larger ones are mapped."""
OBSERVED_STEPS, SCALED_STEPS = 1, 10
"""Steps at the beginning of a phase that keep nothing and show what every layer takes. The second is for a scaled loss:
its first steps may be skipped, so that optimizer state is made later."""
AMPLE_GROWTH = 0.4
"""Growth of a peak for which ample room is needed."""
SPARE_SHARE = 0.1
"""Share of the allowed peak that is free where memory is kept between passes: checkpoints and scores take some."""
MARGIN, UNSEEN_MARGIN, MARGIN_BYTES = 1.25, 4.0, 1_000_000
"""Factor and summand to the most that a layer took while freed memory was kept, and the factor to the most before. What
a layer frees on its way stays, so that it may take more then: 12.4 MB instead of 3.5 in a layer of VGG-16. The first
factor counts once a layer has run directly after everything was given back, when no hole could serve it. All that is
at most what the layer touched while nothing was kept, or took since if that is more."""
COARSE_SHARE = 0.5
"""Share of a step's growth that one layer takes, above which a check before every layer says too little."""
_BETWEEN = "between steps"
GROWTH = 1 + WHOLE_GROWTH
"""Most by which keeping freed memory may raise a peak. Without a bound it raised most by 1.0 to 1.2, and SmallConv's,
whose feature maps all have one size, by 1.58."""
LOOP_GROWTH = 1.9
"""The same in loops whose images are not channels_last: 1.79 without a bound in a network of equal convolutions."""
UNKEPT_SHARE, UNKEPT_BYTES = 0.02, 1_000_000
"""Part of a predicted peak that is not filled with freed memory."""
LEFT_SHARE = 0.03
"""Share of a memory budget that is left free."""
FREE_SHARE = 0.5
"""Share of the machine's free memory up to which a peak may grow for speed."""


def kept_peak(peak_bytes: int, budget_bytes: int | None, free_bytes: int, growth: float = GROWTH) -> int:
    """The peak that keeping freed memory may lead to, in a budget and in the machine's free memory.

    It is ``peak_bytes`` where these have no room for more, and where malloc is not glibc's.
    """
    return max(min(int(peak_bytes * growth), room_bytes(budget_bytes, free_bytes)), peak_bytes)


def is_ample(peak_bytes: int, kept_bytes: int) -> bool:
    """Whether a peak, ``kept_bytes`` of which are for freed memory, has ample room for it."""
    return kept_bytes >= AMPLE_GROWTH * (peak_bytes - kept_bytes) > 0


def room_bytes(budget_bytes: int | None, free_bytes: int) -> int:
    """The largest peak that a budget and the machine's free memory have room for; 0 where malloc is not glibc's."""
    if not sets_thresholds():
        return 0
    room = int(free_bytes * FREE_SHARE)
    return room if budget_bytes is None else min(room, int(budget_bytes * (1 - LEFT_SHARE)) - KERNEL_BYTES)


def fillable_bytes(peak_bytes: int) -> int:
    """What of a predicted peak may be filled with freed memory; the rest is for what happens beside layers."""
    return max(int(peak_bytes * (1 - UNKEPT_SHARE)) - UNKEPT_BYTES, 0)


class FreedMemory:
    """Lets the heap keep freed memory in a phase, and returns it to the system before a layer that lacks room.

    The first step of a phase keeps nothing and shows what every layer takes, forward and backward: the growth of the
    peak until the next layer. From then on freed memory is kept. What a layer frees on its way is then kept, too, so
    that it may take more than was seen. Layers are leaf modules that torch calls, in the thread that keeps memory.

    In a phase with ample room freed memory is kept from the second step to the end. With room for all growth, only the
    first step checks layers. The growth of the process is read after each of the others.

    Attributes:
        has_ample_room: whether the phase has more room than freed memory needs.
    """

    def __init__(self, meter: PeakMeter, limit: MemoryLimit) -> None:
        self._meter, self._limit = meter, limit
        self._allowed_bytes, self._steps, self._active, self._paused = 0, 0, False, False
        self.has_ample_room, self._has_room_for_all, self._observed = False, False, OBSERVED_STEPS
        self._hooks: list[RemovableHandle] = []
        self._needs, self._first_needs, self._touched = dict[object, int](), dict[object, int](), dict[object, int]()
        self._bare = set[object]()
        self._faults = 0
        self._peak_bytes = self._least_bytes = 0
        self._layer: object = _BETWEEN
        self._is_bare, self._owner = False, (0, 0)
        self._before_bytes = 0
        self._read: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def begin(
        self, allowed_bytes: int, kept_bytes: int = 0, observed: int = OBSERVED_STEPS, growth: float = GROWTH
    ) -> None:
        """Begin a phase whose peak is to stay below ``allowed_bytes``, and which :meth:`close` ends; 0 keeps nothing.

        ``kept_bytes`` of it are more than the phase needs. The first ``observed`` steps keep nothing. ``growth`` is the
        most by which keeping freed memory may raise the peak.
        """
        self.close()
        self._observed = observed
        self.has_ample_room = is_ample(allowed_bytes, kept_bytes)
        self._has_room_for_all = kept_bytes >= (growth - 1) * (allowed_bytes - kept_bytes) > 0
        self._allowed_bytes, self._steps = allowed_bytes, 0
        self._needs, self._first_needs, self._touched, self._bare = {}, {}, {}, set()
        self._peak_bytes, self._least_bytes = 0, allowed_bytes

    @property
    def keeps(self) -> bool:
        """Whether the heap may keep freed memory now, so that it should not be trimmed."""
        active = self._active or (self.has_ample_room and not self._paused)
        return active and self._allowed_bytes > 0 and self._steps >= self._observed

    @contextmanager
    def kept(self, *, steps: bool = False) -> Iterator[None]:
        """Context of training ``steps``, or of passes; afterwards everything that is free goes back to the system.

        With ample room it stays. Passes keep nothing before layers were observed in steps.
        """
        observed = self._steps >= self._observed
        if not self._allowed_bytes or not (sets_thresholds() and has_proc() and (steps or observed)):
            yield
            return
        if not (steps and observed and self._has_room_for_all):
            self._hook_layers()
        self._owner = os.getpid(), threading.get_ident()
        try:
            with quick_readings() as self._read:
                self._active, self._paused = True, False
                self._layer, self._before_bytes, self._faults = _BETWEEN, self._growth(), _faults()
                try:
                    self._keep()
                    yield
                finally:
                    self.pause()
        finally:
            self._unhook_layers()
            self._active = False

    def after_step(self) -> None:
        """Count a training step, before the meter is read; nothing outside of :meth:`kept`."""
        if not self._active:
            return
        self.between_steps()
        self._steps += 1
        if self._steps == self._observed:
            if self._is_coarse():
                self._allowed_bytes = 0
            self._keep()
            if self._has_room_for_all:
                self._unhook_layers()

    def between_steps(self) -> None:
        """Note what the last layer took, or what was done since the last step, before the meter is read."""
        if self._hooks:
            self._before(_BETWEEN)
        elif self._active and self._allowed_bytes:
            self._make_room(self._growth(), self._allowed_bytes)

    def give_back(self) -> None:
        """Return everything that is free to the system, unless it may stay; what is freed afterwards is kept again."""
        if not self.keeps or self._may_stay():
            return
        if self._paused:
            self._pause()
        else:
            self._give_back()

    def pause(self, *, always: bool = False) -> None:
        """Return everything that is free to the system, unless it may stay, and keep nothing until the next layer."""
        if self.keeps and (always or not self._may_stay()):
            self._pause()

    def give_up(self) -> None:
        """Keep nothing for the rest of the phase."""
        self.pause(always=True)
        self.close()
        self._allowed_bytes = 0

    def close(self) -> None:
        """Return everything that is free to the system; from then on room is not ample."""
        if self.has_ample_room and not self._paused:
            self.pause(always=True)
        self.has_ample_room = False

    def _hook_layers(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        of_all: Any = nn_module._global_forward_hooks
        of_all.move_to_end(self._hooks[-1].id, last=False)  # or a refresh takes back what BatchNorm's backward may take

    def _unhook_layers(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _may_stay(self) -> bool:
        """Whether room is ample, and a part of it still free."""
        if not (self.has_ample_room and self._active) or self._paused:
            return False
        return self._growth() <= (1 - SPARE_SHARE) * self._allowed_bytes

    def _is_coarse(self) -> bool:
        """Whether one layer takes most of a step, as where a strategy calls no layers, and not all growth has room."""
        most = max(self._first_needs.values(), default=0)
        coarse = most > COARSE_SHARE * (self._peak_bytes - self._least_bytes)
        return coarse and self._allowed_bytes < GROWTH * self._peak_bytes

    def _keep(self) -> None:
        if self.keeps:
            free_held_blocks()
            set_thresholds(KEPT_BLOCK_BYTES, KEEP_ALL_BYTES)
            if self.has_ample_room:
                map_large_blocks(False)
            self._paused = False

    def _give_back(self) -> None:
        trim_free_pages()
        self._limit.refresh()

    def _pause(self) -> None:
        set_thresholds(MMAP_THRESHOLD_BYTES)
        hold_free_blocks()
        self._limit.refresh()
        self._paused = True

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not module._modules:
            self._before(id(module))

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not module._modules and isinstance(output, Tensor) and output.grad_fn is not None:
            layer = (id(module), "backward")
            output.grad_fn.register_prehook(lambda gradients: self._before(layer))

    def _before(self, layer: object) -> None:
        """Note what the layer before this one took, and give back what is free if this one lacks room."""
        here = os.getpid(), threading.get_ident()
        if not self._active or not self._allowed_bytes or here != self._owner:
            return
        grown = self._growth() if self.keeps else self._peak()
        if not self._paused:
            taken, needs = grown - self._before_bytes, self._needs if self.keeps else self._first_needs
            needs[self._layer] = max(needs.get(self._layer, 0), taken)
        if self._is_bare:
            self._bare.add(self._layer)
        if not self.keeps:
            self._peak_bytes = max(self._peak_bytes, grown)
            self._least_bytes = min(self._least_bytes, self._before_bytes)
            faults, self._faults = self._faults, _faults()
            touched = (self._faults - faults) * PAGE_BYTES
            self._touched[self._layer] = max(self._touched.get(self._layer, 0), touched)
        grown = self._make_room(grown, self._allowed_bytes - self._need(layer)) if self.keeps else self._growth()
        self._layer, self._before_bytes = layer, grown

    def _make_room(self, grown: int, most: int) -> int:
        """Give back what is free if the process has grown by more than ``most``; then keep nothing if it still has.

        Returns the bytes that it has grown by then.
        """
        self._is_bare = False
        if grown <= most:
            if self._paused:
                self._keep()
            return grown
        if not self._paused:
            self._give_back()
            self._is_bare = True
        if self._paused or self._growth() > most:
            self._pause()  # again, too: what was allocated before may have been freed since
            self._is_bare = False
        return self._growth()

    def _need(self, layer: object) -> int:
        """What a layer takes; the most of all if it was not seen, as in passes through other layers."""
        least = _of_layer(self._first_needs, layer)
        seen = max(self._needs.get(layer, 0), least)
        most = seen * MARGIN if layer in self._bare else max(seen * MARGIN, least * UNSEEN_MARGIN)
        return int(min(most, max(seen, _of_layer(self._touched, layer)))) + MARGIN_BYTES

    def _growth(self) -> int:
        resident, shared = self._read()
        return resident - shared - self._limit.resting_bytes

    def _peak(self) -> int:
        """The peak since the last call, which the meter notes, too."""
        meter, most = self._meter, self._meter.peak_bytes
        meter.peak_bytes = 0
        try:
            return meter.mark()
        finally:
            meter.peak_bytes = max(most, meter.peak_bytes)


def _of_layer(bytes_of: dict[object, int], layer: object) -> int:
    return bytes_of[layer] if layer in bytes_of else max(bytes_of.values(), default=0)


def _faults() -> int:
    """Pages that the process has touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
