"""YAML files within limits: plain values, few aliased values, unique keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from snugfit._core.documents import MAX_DEPTH, DocumentError, check_plain, read_text
from snugfit.errors import SnugfitError, UsageError

MAX_YAML_BYTES = 2 * 2**20
"""Largest YAML text; the parser takes seconds per MB."""
MAX_NODES = 200_000
"""Most values in a document, including those repeated by aliases."""


def read_yaml(
    path: str | Path, error: type[SnugfitError] = UsageError, advice: str = "Correct it.", *, numbers: bool = True
) -> Any:
    """Read a YAML file; limits are those of :func:`parse_yaml`. An empty file gives None."""
    text = read_text(path, error, advice, MAX_YAML_BYTES)
    try:
        return parse_yaml(text, numbers=numbers)
    except DocumentError as wrong:
        raise error(f"{path} is not valid YAML: {wrong}. {advice}") from wrong


def parse_yaml(text: str, *, numbers: bool = True) -> Any:
    """Parse YAML into objects, lists, texts, finite numbers, booleans and None; raises DocumentError.

    Only ``true`` and ``false`` are booleans, as in YAML 1.2 (``no`` and ``on`` are texts), and dates are texts. Without
    ``numbers``, so are numbers, as they are written: as one, 2026_11_26 would be 20261126.
    """
    try:
        value = yaml.load(text, _Loader if numbers else _TextLoader)
    except RecursionError:
        raise DocumentError(f"it is nested more than {MAX_DEPTH} deep") from None
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        raise DocumentError(" ".join(str(error).split())) from error
    check_plain(value)
    return value


class _Loader(yaml.SafeLoader):
    """Counts nodes, including aliases, while the document is composed and before values are built."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = self._depth = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node as YAML does, within the limits."""
        event = self.peek_event()
        anchor, before = event.anchor, self._nodes
        if isinstance(event, yaml.AliasEvent):
            self._nodes += self._sizes.get(anchor, MAX_NODES)  # an alias of an enclosing value has no size yet
        self._nodes, self._depth = self._nodes + 1, self._depth + 1
        if self._nodes > MAX_NODES:
            raise DocumentError(f"it holds more than {MAX_NODES:,} values, or an alias of an enclosing value")
        if self._depth > MAX_DEPTH + 1:  # texts and numbers are nodes too
            raise DocumentError(f"it is nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[anchor] = self._nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose an object with unique keys; merged objects are separate."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise DocumentError(f"'{key.value}' occurs twice, again in line {key.start_mark.line + 1}")
            seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] not in ("timestamp", "bool")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _TextLoader(_Loader):
    """Leaves numbers as they are written."""


_TextLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] not in ("int", "float")]
    for first, forms in _Loader.yaml_implicit_resolvers.items()
}
