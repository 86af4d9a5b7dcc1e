"""Random numbers of the global generators on the processor, which planning must not draw."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Undo what is drawn of torch's, Python's and numpy's global generators on the processor in the context."""
    numpy = sys.modules.get("numpy.random")
    python, of_torch = random.getstate(), torch.get_rng_state()
    of_numpy = numpy.get_state(legacy=False) if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(of_torch)
        if numpy:
            numpy.set_state(of_numpy)


@contextlib.contextmanager
def random_numbers_watched() -> Iterator[Callable[[], bool]]:
    """As :func:`random_numbers_kept`; gives a function that says after the context whether anything was drawn."""
    drawn: list[bool] = []
    with random_numbers_kept():
        before, of_torch = random_state(), torch.get_rng_state()
        yield lambda: any(drawn)
        drawn += [random_state() != before, not torch.equal(torch.get_rng_state(), of_torch)]


def random_state() -> object:
    """The state of Python's generator, and of numpy's if anything has imported it."""
    loaded = sys.modules.get("numpy.random")
    if loaded is None:
        return random.getstate()
    _, key, *rest = loaded.get_state()
    return random.getstate(), key.tobytes(), rest
