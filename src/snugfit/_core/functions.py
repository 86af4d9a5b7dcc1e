"""Functions of the user's own that options name: ``package.module:function``, found from the current folder too."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from snugfit.errors import SnugfitError, is_out_of_memory, reason_of

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_function(name: str) -> bool:
    """Whether a name has the form of a function's.

    >>> is_function("package.module:function"), is_function("folder:photos/2"), is_function("digits")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None and not name.startswith("folder:")


def import_function(name: str, kind: type[SnugfitError]) -> Callable[..., Any]:
    """Import a function or class; another error than a refusal of memory becomes one of this kind."""
    module, _, attribute = name.partition(":")
    with _current_directory_importable():
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            if is_out_of_memory(error):  # because of the budget, not of the module
                raise
            raise kind(f"cannot import {name}: {reason_of(error)}. {_advice(module, attribute, error)}") from error
    return function


def _advice(module: str, attribute: str, error: Exception) -> str:
    """What to do where a function of a module cannot be imported."""
    if module.endswith(".py"):
        return f"Write {module.removesuffix('.py').strip('./').replace('/', '.')}:{attribute}."
    if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
        return "Run the command in the folder that holds the module, or put this folder on PYTHONPATH."
    return "Write it as package.module:function."


def call_function(
    name: str, kind: type[SnugfitError], arguments: Callable[[Callable[..., Any]], dict[str, Any]] | None = None
) -> Any:
    """Import and call a function, with the ``arguments`` that it takes; for errors see :func:`import_function`."""
    function = import_function(name, kind)
    with _current_directory_importable():
        return attempt(name, lambda: function(**(arguments(function) if arguments else {})), kind)


def attempt(name: str, call: Callable[[], Any], kind: type[SnugfitError]) -> Any:
    """Call what has this name; an error that is neither snugfit's nor a refusal of memory becomes one of this kind."""
    try:
        return call()
    except Exception as error:
        if isinstance(error, SnugfitError) or is_out_of_memory(error):
            raise
        raise kind(f"{name} failed: {reason_of(error)}.") from error


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    directory = str(Path.cwd())
    added = directory not in sys.path
    if added:
        sys.path.insert(0, directory)
    try:
        yield
    finally:
        if added:
            sys.path.remove(directory)
