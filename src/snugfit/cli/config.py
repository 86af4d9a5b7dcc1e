"""``--config FILE.yaml``: flags from a file, under those on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cyclopts import Token
from cyclopts.argument import Argument

from snugfit.core.yaml_text import read_yaml
from snugfit.errors import UnknownNameError, UsageError


def read_config(path: str) -> dict[str, Any]:
    """Read a flat YAML mapping of option names (``batch_size`` or ``batch-size``) to single values.

    Returns:
        Values by name in kebab case.

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
            raise UsageError(f"'{name}' stands twice in the config file {path}; keep one.")
        if isinstance(value, (dict, list)):
            raise UsageError(f"'{key}' in the config file {path} must be a single value, not a {type(value).__name__}.")
        options[name] = value
    return options


def apply_config(app: Any, commands: tuple[str, ...], arguments: Iterable[Argument]) -> None:
    """Fill the arguments that the command line left open from the file named by ``--config``.

    The signature is that of a cyclopts config source.

    Raises:
        UsageError: the file is unusable.
        UnknownNameError: the file names an option that this command does not have.
    """
    flags = {n.removeprefix("--"): argument for argument in arguments for n in argument.names if n.startswith("--")}
    config = flags.pop("config", None)
    if config is None or not config.tokens:
        return
    path = config.tokens[-1].value
    given = {id(argument) for argument in flags.values() if argument.tokens}
    for name, value in read_config(path).items():
        if name not in flags:
            raise UnknownNameError("option", name, flags)
        if value is not None and id(flags[name]) not in given:
            flags[name].append(_token(flags[name], name, value, path))


def _token(argument: Argument, name: str, value: Any, path: str) -> Token:
    if f"--{name}" in argument.negatives and isinstance(value, bool):
        value = not value
    return Token(keyword=name, value=str(value), source=path)
