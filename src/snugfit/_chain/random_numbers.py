"""Random numbers of the global generators on the processor, which planning must not draw."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[Callable[[], bool]]:
    """Undo what is drawn of torch's, Python's and numpy's global generators on the processor in the context.

    Gives a function that then says whether anything was.
    """
    numpy = sys.modules.get("numpy.random")
    python, of_torch = random.getstate(), torch.get_rng_state()
    of_numpy = numpy.get_state(legacy=False) if numpy else None
    drawn: list[bool] = []
    try:
        yield lambda: any(drawn)
    finally:
        drawn += [random.getstate() != python, not torch.equal(torch.get_rng_state(), of_torch)]
        random.setstate(python)
        torch.set_rng_state(of_torch)
        if numpy:
            drawn.append(_as_text(numpy.get_state(legacy=False)) != _as_text(of_numpy))
            numpy.set_state(of_numpy)


def _as_text(state: Any) -> str:
    """A state of numpy's generator, with the whole array of its numbers."""
    return repr({key: value.tolist() if hasattr(value, "tolist") else value for key, value in state["state"].items()})
