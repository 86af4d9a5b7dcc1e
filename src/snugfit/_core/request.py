"""The user's request: groups of options, and the options of all strategies as one group."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from snugfit._core.budget import Aim
from snugfit._core.option_groups import BaseRequest, BaseStrategyOptions
from snugfit._core.options import ANY_STRATEGY, Names, help_of, with_help
from snugfit._core.registry import strategies
from snugfit._core.serial import from_data, to_data
from snugfit._core.strategy_config import declared_options, merged_options
from snugfit.errors import UnknownNameError


def _strategy_options() -> type[BaseStrategyOptions]:
    """One dataclass with the options of all strategies, in their order; raises TypeError if two differ."""
    names = tuple(strategies())
    found = declared_options(BaseStrategyOptions)
    hint, default = found["strategy"]
    found["strategy"] = (Annotated[hint, Names((*ANY_STRATEGY, *names))], default)
    found |= merged_options(config.options for config in strategies().values())
    texts: dict[str, dict[str, str]] = {}
    for config in strategies().values():
        own = help_of(config.options)
        for option in fields(config.options):
            texts.setdefault(option.name, {})[config.name] = own.get(option.name, "")
    common = help_of(BaseStrategyOptions)
    common["strategy"] = f"{', '.join((*ANY_STRATEGY, *names[:-1]))} or {names[-1]}. {common['strategy']}"
    shown = common | {name: _joined(each) for name, each in texts.items()}
    declared = [(name, hint, field(default=default)) for name, (hint, default) in found.items()]
    made = make_dataclass("StrategyOptions", declared, bases=(BaseStrategyOptions,), frozen=True)
    made.__doc__ = with_help("The strategy, and the options of all strategies.", shown)
    made.__module__ = __name__
    return made


def _joined(texts: dict[str, str]) -> str:
    """Help of an option by strategy as one text."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return " ".join(f"In ``{strategy}``: {text}" for strategy, text in texts.items())


if TYPE_CHECKING:

    class StrategyOptions(BaseStrategyOptions):
        """The strategy, and the options of all strategies."""

        def __init__(self, strategy: str = "auto", aim: Aim | None = None, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    StrategyOptions = _strategy_options()


@dataclass(frozen=True)
class Request(BaseRequest):
    """All options of one run; JSON-able, and kept in the run folder so that a run can be resumed.

    >>> request = Request.of(model="resnet18", image_size=32, memory="100MB")
    >>> request.model.image_size, request.budget.memory
    ('32', '100MB')
    >>> Request.from_json(request.to_json()) == request
    True
    """

    strategy: StrategyOptions = field(default_factory=StrategyOptions)

    @classmethod
    def of(cls, **options: Any) -> Request:
        """A request by options of the command line, with underscores; each goes into the group that declares it.

        Raises:
            UnknownNameError: no group has such an option.
        """
        request = cls()
        groups = {group.name: getattr(request, group.name) for group in fields(request)}
        known = {option.name: group for group, value in groups.items() for option in fields(value)}
        for key, value in options.items():
            if key not in known:
                raise UnknownNameError("option", key, known)
            group = known[key]
            groups[group] = replace(groups[group], **{key: value})
        return cls(**groups)

    def with_strategy(self, name: str) -> Request:
        """The request for one strategy, with the options that were given."""
        return replace(self, strategy=replace(self.strategy, strategy=name))

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return dict(to_data(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        """Inverse of :meth:`to_json`."""
        return from_data(cls, data)
