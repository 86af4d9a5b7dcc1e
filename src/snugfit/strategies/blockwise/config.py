"""The strategy ``blockwise``, described without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from snugfit._core import known
from snugfit._core.budget import Aim
from snugfit._core.option_groups import BaseRequest
from snugfit._core.options import CacheDtype, Checked, Count, Share, Text
from snugfit._core.record import Record
from snugfit._core.strategy_config import StrategyConfig, present
from snugfit.strategies.blockwise.loss_choice import AUTO, MODULE_BATCH, LossChoice, LossCost


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
        return "Smaller budgets take more modules, each with a local loss."
    return f"Fewer modules, which come closer to backpropagation, do not fit{or_smaller(batch)}."


def or_smaller(batch: int) -> str:
    """The rest of a clause about something that does not fit at a batch size, and perhaps at none."""
    return f", or only at a batch below {batch}" if batch > 1 else ""


def _named(module: tuple[int, int, str], name: str) -> str:
    first, last, _ = module
    count = last - first + 1
    return f"{name.replace('..', ' to ')} ({count} unit{'s' if count > 1 else ''})"


def _module_units(text: str) -> bool:
    return text == "auto" or (text.isdecimal() and int(text) >= 1)


@dataclass(frozen=True)
class BlockwiseOptions(Checked):
    """How blocks train.

    Attributes:
        local_loss: local loss of ``blockwise``: aan, auglocal, classic, linear, lls, lls-m or lls-mxm, with options if
            needed, like ``auglocal:depth=3``; auto takes the one of the most expected accuracy that memory and the aim
            allow, and auglocal without a depth the largest depth up to 4.
        module_units: units that train together by backpropagation, as a gradient-isolated module with one local loss;
            ``auto`` makes the modules as few and as large as the budget allows, down to one, which is backpropagation.
            It keeps one unit per module with ``--saturation-stop``, ``--exit-tolerance`` above 0, ``--block-units``,
            ``--residency all`` or ``--aim memory``.
        rho: grouping threshold of Algorithm 1 in NeuroFlux.
        block_units: most units in a block; 2 with the saturation stop, any number without.
        adaptive_batch: give every block its own batch size (off: the smallest one everywhere).
        residency: keep only the active ``block`` in memory, or ``all`` units as classic local learning does.
        saturation_stop: stop before deeper blocks once a block no longer improves validation accuracy.
        exit_tolerance: validation accuracy to give up for a smaller exit; one standard error by default.
        cache: keep activations on disk (``always``), recompute them (``never``), or recompute only if the storage
            budget is too small (``auto``).
        cache_dtype: stored type of cached activations.
        views: augmented passes that are cached.
    """

    local_loss: str = AUTO
    module_units: Annotated[str, Text("auto or a whole number of at least 1", _module_units)] = "auto"
    rho: Share = 0.4
    block_units: Count | None = None
    adaptive_batch: bool = True
    residency: Literal["block", "all"] = "block"
    saturation_stop: bool = False
    exit_tolerance: Share | None = None
    cache: Literal["auto", "always", "never"] = "auto"
    cache_dtype: CacheDtype = "float16"
    views: Count = 1


LayerCost = tuple[int, int]
"""Bytes of a layer's weights, and of one image in memory while it computes."""


@dataclass(frozen=True)
class BlockwiseSettings(BlockwiseOptions):
    """Settings of ``blockwise``: the options, and what planning sets.

    Attributes:
        loss_aim: the plan's aim, by which a local loss is chosen.
        loss_costs: the local losses to choose from, with bytes and multiply-accumulates; empty if one was named.
        modules: first unit, last unit and recomputation schedule (empty without recomputation) of each module.
        blocks: (first module, last module, batch size) of each block.
        wanted_batch: batch size at which modules and local losses are preferred over leaner ones.
        test_batch: batch size of the test of the exit model.
        exit_costs: for each local loss to choose from, the layers that may need most memory in that test.
    """

    name: ClassVar[str] = "blockwise"

    local_loss: str = "aan"
    loss_aim: Aim = "time"
    loss_costs: tuple[LossCost, ...] = ()
    modules: tuple[tuple[int, int, str], ...] = ()
    blocks: tuple[tuple[int, int, int], ...] = ()
    wanted_batch: int = MODULE_BATCH
    test_batch: int = 1
    exit_costs: tuple[tuple[str, tuple[LayerCost, ...]], ...] = ()

    @property
    def exact(self) -> bool:
        """Whether gradients are those of plain backpropagation: a single module has the network's own loss."""
        return len(self.modules) == 1


def asks_for_exit(settings: Mapping[str, Any]) -> bool:
    """Whether settings ask for a small exit."""
    return bool(settings.get("saturation_stop") or settings.get("exit_tolerance"))


def unit_option(settings: Mapping[str, Any]) -> str:
    """The option by which ``module_units="auto"`` keeps one unit per module; empty if it makes larger modules."""
    found = {
        "--saturation-stop": settings.get("saturation_stop"),
        "--exit-tolerance": settings.get("exit_tolerance"),
        "--block-units": settings.get("block_units"),
        "--residency all": settings.get("residency") == "all",
        "--aim memory": settings.get("loss_aim") == "memory",
    }
    return next((option for option, given in found.items() if given), "")


class Config(StrategyConfig):
    """Blocks of units train one after another on local losses."""

    name = "blockwise"
    implementation = "snugfit.strategies.blockwise.strategy:Blockwise"
    options = BlockwiseOptions
    trains_fresh = True
    order = 30
    rounds_state = True
    rebuild = "snugfit.strategies.blockwise.strategy:rebuild_exit"

    def check_names(self, request: BaseRequest) -> None:
        """Check the local loss.

        Raises:
            UnknownNameError: it is unknown.
        """
        local_loss = getattr(request.strategy, "local_loss", AUTO)
        if local_loss != AUTO:
            known.check_local_loss(local_loss)

    def settings(self, request: BaseRequest) -> dict[str, Any]:
        """The aim."""
        return {"loss_aim": request.aim}

    def changes_with(self, settings: Mapping[str, Any], aim: Aim) -> bool:
        """Whether the aim makes larger or smaller modules, or may choose another local loss."""
        if not (modules := settings.get("modules")):
            return False
        option, other = unit_option(settings), unit_option({**settings, "loss_aim": aim})
        several = len(modules) <= modules[-1][1]  # units in a module
        if settings.get("module_units") == "auto" and bool(option) != bool(other) and (option or several):
            return True
        if len(modules) == 1 or not (costs := settings.get("loss_costs")):
            return False
        now, then = (LossChoice(costs, each, asks_for_exit(settings)).order() for each in (settings["loss_aim"], aim))
        return now != then and then[0] != str(settings["local_loss"])

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The local loss, and the number of modules if they have several units; one module has no local loss."""
        modules, loss = settings.get("modules"), settings.get("local_loss", "")
        if not modules:
            return present({loss: loss not in ("", AUTO)})
        if len(modules) == 1:
            return ("1 module",)
        return present({loss: True, f"{len(modules)} modules": len(modules) <= modules[-1][1]})

    def explanation(self, settings: Mapping[str, Any], parts: Sequence[str]) -> Iterator[str]:
        """The modules and the local loss."""
        if not (modules := settings.get("modules")):
            return
        yield from explain_modules(modules, parts)
        batch = settings.get("wanted_batch", MODULE_BATCH)
        if settings.get("module_units") == "auto":
            yield explain_choice(modules, batch, unit_option(settings))
        if len(modules) > 1 and settings.get("loss_costs"):
            choice = LossChoice(settings["loss_costs"], settings["loss_aim"], asks_for_exit(settings))
            few = settings.get("module_units") == "auto" and not unit_option(settings)
            unfit = f"does not fit{' in as few modules' if few else ''}{or_smaller(batch)}"
            yield choice.reason(settings["local_loss"], unfit)

    def structure(self, record: Record) -> dict[str, Any]:
        """The exit that was chosen, and its local loss."""
        if record.exit is None:
            return {}
        return {"local_loss": record.settings["local_loss"], "exit": int(record.exit["index"])}
