"""Imports of torch that eager training triggers and does not need: 68 MiB of dynamo, inductor and sympy.

Operators on the meta device, dispatch modes, ``torch.utils.checkpoint`` and ``torch.optim`` import ``torch._dynamo`` to
hide from a compiler, and ``torch.fx.experimental.symbolic_shapes`` to compare sizes that may be symbols. Without a
compiler there is nothing to hide from, and without symbols a comparison is one of plain numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce, wraps
from types import ModuleType
from typing import Any

import torch
from torch.utils._ordered_set import OrderedSet

SYMPY, FUNCTIONS = "sympy", "torch.utils._sympy.functions"
SHAPES, DYNAMO = "torch.fx.experimental.symbolic_shapes", "torch._dynamo"
_ORDER = (SYMPY, FUNCTIONS, SHAPES, DYNAMO)
"""Each imports those before it."""
_PACKAGES = (DYNAMO, SYMPY)


_Light = Mapping[str, Any]


class _Deferred(ModuleType):
    """Stands for a module of torch; any attribute but those given loads it, and it takes this one's place."""

    def __init__(self, name: str, light: _Light) -> None:
        super().__init__(name)
        self.__spec__ = importlib.util.find_spec(name)
        self.__file__ = self.__spec__.origin if self.__spec__ is not None else None
        vars(self).update(light, _light=light)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not (name == "__path__" and self.__name__ in _PACKAGES):  # read by every import
            raise AttributeError(name)
        return getattr(load(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the module itself once it is loaded: the import system sets submodules."""
        real = None if name.startswith("__") else _loaded(self.__name__)
        (super() if real is None else real).__setattr__(name, value)

    def give_way(self) -> None:
        """Leave the place to the module itself; whoever holds this one reads that one's attributes from now on."""
        del sys.modules[self.__name__]
        parts = [part for part in self._light.values() if isinstance(part, _Part)]
        for held in map(vars, (self, *parts)):
            for name in held["_light"]:
                held.pop(name, None)


def load(name: str) -> ModuleType:
    """The module itself; what it imports is no longer deferred either."""
    for each in _ORDER[: _ORDER.index(name) + 1]:
        deferred = sys.modules.get(each)
        if isinstance(deferred, _Deferred):
            deferred.give_way()
    with _around[0]():
        return importlib.import_module(name)


_around: list[Callable[[], AbstractContextManager[None]]] = [nullcontext]


def _loaded(name: str) -> ModuleType | None:
    module = sys.modules.get(name)
    return None if isinstance(module, _Deferred) else module


def defer_imports(around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Let eager code run without these modules.

    Whatever else uses them, such as a compiler, loads them as before, inside the context ``around()``.
    """
    _around[:] = [around]
    lights: tuple[_Light, ...] = ({"Basic": _Basic()}, {"Max": _maximum}, _SHAPES, _DYNAMO)
    for name, light in zip(_ORDER, lights, strict=True):
        if name not in sys.modules:
            parent, _, child = name.rpartition(".")
            sys.modules[name] = deferred = _Deferred(name, light)
            if parent:
                setattr(importlib.import_module(parent), child, deferred)


def _disable(fn: Any = None, *args: Any, **options: Any) -> Any:
    """``torch._dynamo.disable``, which takes effect once dynamo is loaded; without a function, its decorator."""
    if fn is None:
        return lambda function: _disable(function, *args, **options)
    if isinstance(fn, (type, torch.nn.Module)):
        return load(DYNAMO).disable(fn, *args, **options)
    hidden: list[Callable[..., Any]] = []

    @wraps(fn)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not hidden and (real := _loaded(DYNAMO)) is not None:
            hidden.append(real.disable(fn, *args, **options))
        return (hidden[0] if hidden else fn)(*arguments, **keywords)

    return call


def _graph_break(*args: Any, **options: Any) -> None:
    if (real := _loaded(DYNAMO)) is not None:
        real.graph_break(*args, **options)


def _plain(name: str, light: Callable[..., Any]) -> Callable[..., Any]:
    """A function of symbolic shapes that computes ``light`` for plain numbers."""

    def call(*args: Any, **options: Any) -> Any:
        plain = not options and all(map(_is_plain, args))
        return light(*args) if plain else getattr(load(SHAPES), name)(*args, **options)

    return call


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value._has_symbolic_sizes_strides
    return type(value) in (bool, int) or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))


def _maximum(*values: Any) -> Any:
    return load(FUNCTIONS).Max(*values)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


class _Basic:
    """Stands for the class of sympy's expressions, which has no instances before sympy is loaded."""

    def __instancecheck__(self, value: object) -> bool:
        real = _loaded(SYMPY)
        return real is not None and isinstance(value, real.Basic)

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (load(SYMPY).Basic,)

    def __getattr__(self, name: str) -> Any:
        return getattr(load(SYMPY).Basic, name)


class _Part:
    """Stands for a submodule of dynamo; any attribute but those given is the submodule's own."""

    def __init__(self, name: str, **light: Any) -> None:
        vars(self).update(light, _name=name, _light=light)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(load(DYNAMO), self._name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(load(DYNAMO), self._name), name, value)


_DYNAMO: _Light = {
    "disable": _disable,
    "graph_break": _graph_break,
    "config": _Part("config", error_on_nested_fx_trace=True),  # checkpoints read it; it matters while a graph is traced
    "trace_rules": _Part("trace_rules", clear_lru_cache=lambda: None),  # called by torch.distributed
}
_PLAIN: dict[str, Callable[..., Any]] = {
    "guard_or_false": bool,
    "guard_size_oblivious": bool,
    "guard_or_true": bool,
    "statically_known_true": bool,
    "expect_true": bool,
    "guard_int": int,
    "guarding_hint_or_throw": lambda value: value,
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "has_free_unbacked_symbols": lambda _: False,
    "free_unbacked_symbols": lambda _: OrderedSet(),
    "sym_and": lambda *values: reduce(operator.and_, values),
    "sym_or": lambda *values: reduce(operator.or_, values),
    "sym_eq": _equal,
}
_SHAPES = {name: _plain(name, light) for name, light in _PLAIN.items()}
