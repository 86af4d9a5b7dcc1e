"""Text files of unknown origin: within limits, and refused with one line that names the file."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit._core.documents import MAX_DEPTH, DocumentError, parse_json, read_as, read_data, read_text
from snugfit._core.yaml_text import MAX_NODES, parse_yaml, read_yaml
from snugfit.errors import CheckpointError, DataError, UsageError


def read_json(*args):
    return read_as(lambda data: data, *args)


@dataclass(frozen=True)
class Inner:
    count: int
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None = None
    kind: Literal["a", "b"] = "a"
    on: bool = True
    pairs: tuple[int, int] = (1, 2)
    sizes: tuple[int, ...] = ()
    by_name: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe{}", "not UTF-8"),
        (b"{", "line 1 column 2"),
        (b"[" * 100_000, "nested"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "inf"),
        (b'{"a": 1' + b"0" * 30 + b"}", "64 bits"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "digits"),
        (b'["\\ud800"]', "half a character"),
        (b'{"a": [{"\\ud800": 1}]}', "half a character"),
        (b'{"a": 1, "b": {"seed": 1, "x": 2, "seed": 1}}', "'seed' occurs twice"),
        (b'{"": 1, "": 2}', "'' occurs twice"),
    ],
)
def test_json_is_refused_with_the_reason(tmp_path, content, says):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_json(path, DataError, "Get it anew.")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_names_that_are_not_utf_8_are_read_again_as_they_were_written(tmp_path):
    name = os.fsdecode(b"\xff")
    (tmp_path / "x.json").write_text(json.dumps([name]))
    assert read_json(tmp_path / "x.json") == [name]


def test_only_regular_files_of_limited_size_are_read(tmp_path):
    fifo, big = tmp_path / "fifo", tmp_path / "big"
    os.mkfifo(fifo)
    big.write_text("x" * 11)
    for path, says in ((fifo, "no regular file"), (tmp_path, "no regular file"), (tmp_path / "no", "No such file"),
                       ("/dev/zero", "no regular file"), (tmp_path / ("n" * 300), "too long")):  # fmt: skip
        with pytest.raises(CheckpointError, match=says):
            read_text(path, most=10)
    with pytest.raises(CheckpointError, match="larger than"):
        read_text(big, most=10)
    assert read_text(big, most=11) == "x" * 11


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')
    assert read_json(tmp_path / "x.json") == {"a": "é"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "'the whole' must be an object, not a list"),
        ({}, "'name' must be there, as text"),
        ({"name": 3}, r"'name' must be text, not an integer \(3\)"),
        ({"name": None}, "'name' must be text, not null"),
        ({"name": "x", "inner": {"count": 1.5}}, r"'inner.count' must be an integer, not a number \(1.5\)"),
        ({"name": "x", "inner": {"count": True}}, "'inner.count' must be an integer, not a boolean"),
        ({"name": "x", "inner": []}, "'inner' must be an object"),
        ({"name": "x", "kind": "c"}, "'kind' must be one of a, b, not text"),
        ({"name": "x", "kind": []}, "'kind' must be one of a, b, not a list"),
        ({"name": "x", "on": 1}, "'on' must be true or false"),
        ({"name": "x", "pairs": [1, 2, 3]}, "'pairs' must be a list of 2"),
        ({"name": "x", "sizes": "12"}, "'sizes' must be a list, not text"),
        ({"name": "x", "sizes": [1, "2"]}, r"'sizes\[1\]' must be an integer"),
        ({"name": "x", "by_name": [1]}, "'by_name' must be an object"),
        ({"name": "x", "by_name": {"k": [1, "a"]}}, r"'by_name.k\[1\]' must be a number"),
        ({"name": "x", "notes": 1}, "'notes' must be an object"),
    ],
)
def test_data_of_a_wrong_type_names_the_field(tmp_path, data, says):
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=says):
        read_data(Outer, tmp_path / "x.json")


def test_integers_are_numbers_and_unknown_fields_are_ignored(tmp_path):
    (tmp_path / "x.json").write_text('{"name": "x", "inner": {"count": 2, "share": 1}, "of_tomorrow": [[1]]}')
    assert read_data(Outer, tmp_path / "x.json") == Outer("x", Inner(2, 1))


def bomb(levels: int, fan: int) -> str:
    lines = ["a0: &a0 x"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * fan)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (bomb(9, 10), f"more than {MAX_NODES:,}"),
        ("a: &a {x: 1}\n" + "\n".join(f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}' if n else '*a'] * 10)}]}}"
                                      for n in range(8)), f"more than {MAX_NODES:,}"),
        ("&a [*a]", "alias"), ("[" * 5_000, "nested"), ("a: " + "[" * 70 + "]" * 70, "nested"),
        ("- " * 5_000 + "x", "nested"), ("a: .nan", "no finite number"), ("a: .inf", "no finite number"),
        ("a: 1\nb: 2\na: 3", "'a' occurs twice, again in line 3"), ("!!python/object/apply:os.getcwd []", "python"),
        ("a: !!binary aGk=", "bytes"), ("a: !!set {x, y}", "set"), ("a: b: c", "mapping values"),
        ("a: " + "9" * 30, "64 bits"), ("a: " + "9" * 5000, "digits"), ("? [a]\n: 1", "unhashable"),
        ("a: {.nan: 1}", "no finite number"), ("9" * 30 + ": 1", "64 bits"), ("!!binary aGk=: 1", "bytes"),
        ('"\\udc00": 1', "half a character"),
        ("a: !!timestamp 1", "groupdict"), ("a: !!bool x", "'x'"), ('a: "\\udc00"', "half a character"),
    ],
    ids=lambda value: value[:12],
)  # fmt: skip
def test_yaml_is_refused_with_the_reason(tmp_path, text, says):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_plain_yaml_is_read_as_yaml_1_2_has_it():
    text = (
        "names: {0: no, 1: on, 2: 2024-01-01}\naugment: false\nlr: 0.5\nnothing:\nbase: &b {x: 1}\nmore: {<<: *b, x: 2}"
    )
    assert parse_yaml(text) == {
        "names": {0: "no", 1: "on", 2: "2024-01-01"},
        "augment": False,
        "lr": 0.5,
        "nothing": None,
        "base": {"x": 1},
        "more": {"x": 2},
    }
    assert parse_yaml("# nothing") is None


@given(st.text(alphabet="&*abc:{}[]-,<!|>?'\"# \n\t01.~%@`é\x00", max_size=60) | st.text(max_size=30))
def test_any_text_is_yaml_or_refused(text):
    try:
        parse_yaml(text)
    except DocumentError as error:
        assert "\n" not in str(error)


@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:0123456789.eE-+nulltrueNaI \\u', max_size=40))
def test_any_text_is_json_or_refused(text):
    try:
        parse_json(text)
    except DocumentError as error:
        assert "\n" not in str(error)


def test_a_small_file_is_not_given_the_memory_of_the_largest(tmp_path: Path) -> None:
    """Within a memory budget that would be refused."""
    path = tmp_path / "small.json"
    path.write_text("{}")
    tracemalloc.start()
    try:
        assert read_text(path) == "{}"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
