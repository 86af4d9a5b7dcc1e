"""Sentences of a plan's explanation about the modules of ``blockwise``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def explain_modules(modules: Sequence[tuple[int, int, str]], names: Sequence[str]) -> Iterator[str]:
    """How many modules there are, of which units, and which run units again.

    Args:
        modules: first unit, last unit and schedule of each; the schedule is empty if nothing is recomputed.
        names: of their units, as ``first..last`` or the name of a single unit.
    """
    units = modules[-1][1] + 1
    if len(modules) == units:
        yield f"Each of its {units} units is a module that learns by a local loss; no gradient crosses between units."
        return
    if len(modules) == 1:
        yield f"All {units} units form one module, inside which gradients are those of backpropagation."
    else:
        listed = ", ".join(_named(module, name) for module, name in zip(modules, names, strict=True))
        yield f"Its {units} units form {len(modules)} modules, between which no gradient crosses: {listed}."
    again = [str(number) for number, module in enumerate(modules, start=1) if module[2]]
    if again:
        where = "" if len(modules) == 1 else f" of module{'s' if again[1:] else ''} {', '.join(again)}"
        yield f"Some units{where} run again in the backward pass, which saves memory and costs time."


def _named(module: tuple[int, int, str], name: str) -> str:
    first, last, _ = module
    count = last - first + 1
    return f"{name.replace('..', ' to ')} ({count} unit{'s' if count > 1 else ''})"
