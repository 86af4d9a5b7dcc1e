"""``--config FILE.yaml``: flags from a file; flags on the command line win."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cyclopts import UNSET, Token
from cyclopts.argument import Argument

from snugfit._core.options import checked, read
from snugfit._core.yaml_text import read_yaml
from snugfit.errors import UnknownNameError, UsageError


def read_config(path: str) -> dict[str, Any]:
    """Read a flat YAML mapping of option names (``batch_size`` or ``batch-size``) to single values, by kebab-case name.

    Raises:
        UsageError: the file cannot be read, is not a flat mapping, or names an option twice.
    """
    content = read_yaml(path, UsageError, "--config takes lines like 'epochs: 10'.")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"the config file {path} must hold lines like 'epochs: 10', not a {type(content).__name__}.")
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name in options:
            raise UsageError(f"'{name}' appears twice in the config file {path}; keep one.")
        if isinstance(value, (dict, list)):
            raise UsageError(f"'{key}' in the config file {path} must be a single value, not a {type(value).__name__}.")
        options[name] = value
    return options


def apply_config(app: Any, commands: tuple[str, ...], arguments: Iterable[Argument]) -> None:
    """Fill the arguments that are not on the command line from the file of ``--config``: a cyclopts config source.

    Raises:
        UsageError: the file is unusable, or a value does not fit its option.
        UnknownNameError: the file names an option that this command does not have.
    """
    flags = {n.removeprefix("--"): argument for argument in arguments for n in argument.names if n.startswith("--")}
    config = flags.pop("config", None)
    if config is None or not config.tokens:
        return
    given = {id(argument) for argument in flags.values() if argument.tokens}
    path = config.tokens[-1].value
    for name, value in read_config(path).items():
        if name not in flags:
            raise UnknownNameError("option", name, flags)
        if value is not None and id(flags[name]) not in given:
            try:
                _fill(flags[name], name, value)
            except UsageError as error:
                error.args = (f"{error}\nIt is in the config file {path}.",)
                raise


def _fill(argument: Argument, name: str, value: Any) -> None:
    """Give an argument a value of the file: text is read as on the command line, true and false are kept."""
    if not isinstance(value, bool):
        value = read(argument.field_info.annotation, str(value))
    value = checked(name, argument.field_info.annotation, value)
    if f"--{name}" in argument.negatives:
        value = not value
    argument.append(Token(keyword=f"--{name}", implicit_value=value))


def read_values(app: Any, commands: tuple[str, ...], arguments: Iterable[Argument]) -> None:
    """Read the values of all flags by the declarations of their options, before cyclopts reads them by type alone.

    Raises:
        UsageError: a value does not fit its option.
    """
    for argument in arguments:
        for number, token in enumerate(argument.tokens):
            if token.keyword and token.implicit_value is UNSET:
                value = read_value(argument, token.value)
                argument.tokens[number] = token.evolve(implicit_value=value)


def read_value(argument: Argument, text: str) -> Any:
    """The value that text gives an argument.

    Raises:
        UsageError: it does not fit.
    """
    hint, name = argument.field_info.annotation, argument.names[0].removeprefix("--")
    return checked(name, hint, read(hint, text))
