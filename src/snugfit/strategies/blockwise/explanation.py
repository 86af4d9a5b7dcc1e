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
        yield f"All {units} units form one module with the network's own loss, which is backpropagation."
    else:
        listed = ", ".join(_named(module, name) for module, name in zip(modules, names, strict=True))
        yield f"Its {units} units form {len(modules)} modules, between which no gradient crosses: {listed}."
    again = [str(number) for number, module in enumerate(modules, start=1) if module[2]]
    if again:
        where = "" if len(modules) == 1 else f" of module{'s' if again[1:] else ''} {', '.join(again)}"
        yield f"Some units{where} run again in the backward pass, which saves memory and costs time."


def explain_choice(modules: Sequence[tuple[int, int, str]], batch: int, option: str) -> str:
    """Why the modules are as many as they are, with ``module_units="auto"``.

    Args:
        modules: first unit, last unit and schedule of each.
        batch: at which fewer modules do not fit; they may fit at a smaller one.
        option: by which every unit is a module; empty without one.
    """
    if option:
        return f"{option} keeps one unit per module; otherwise modules are as few as the budget allows."
    if len(modules) == 1:
        return "In smaller budgets the modules are more, each with a local loss."
    return f"Fewer modules, which come closer to backpropagation, do not fit{or_smaller(batch)}."


def or_smaller(batch: int) -> str:
    """The rest of a clause about something that does not fit at a batch size, and perhaps at none."""
    return f", or only at a batch below {batch}" if batch > 1 else ""


def _named(module: tuple[int, int, str], name: str) -> str:
    first, last, _ = module
    count = last - first + 1
    return f"{name.replace('..', ' to ')} ({count} unit{'s' if count > 1 else ''})"
