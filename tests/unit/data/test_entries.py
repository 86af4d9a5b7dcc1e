"""Reading a JSON file's lists entry by entry."""

import json
import tracemalloc

import pytest

import snugfit._data.coco as module
from snugfit._data.coco import entries
from snugfit.errors import DataError

CONTENT = {
    "empty": [],
    "info": {"a": [1, {"b": "]}"}], "c": None},
    "numbers": [1, -2.5e3, 123456789, 0],
    "year": 20142014,
    "texts": ["", "\\", '"', "é\u2028\n", "x" * 300, "[,]"],
    "nested": [{"a": [[1, 2], []]}, [], [[True, False, None]]],
}


def expected(content):
    return [(name, entry) for name, value in content.items() if isinstance(value, list) for entry in value]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 18])
@pytest.mark.parametrize("options", [{}, {"indent": 3}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_equals_the_whole_file_wherever_chunks_end(tmp_path, monkeypatch, chunk, options):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(CONTENT, **options) + "\n", encoding="utf-8")
    assert list(entries(path)) == expected(CONTENT)


def test_object_without_members(tmp_path):
    (tmp_path / "a.json").write_text(" { } ")
    assert list(entries(tmp_path / "a.json")) == []


def test_every_truncation_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 5)
    whole, path = json.dumps(CONTENT), tmp_path / "a.json"
    for length in range(len(whole)):
        path.write_text(whole[:length])
        with pytest.raises(DataError, match=r"a.json .*character [\d,]+.* Restore it"):
            list(entries(path))


def test_the_place_of_the_fault_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 5)
    (tmp_path / "a.json").write_text('{"images": [{"id": 1}, {"id": 2} {"id": 3}]}')
    with pytest.raises(DataError, match=r"expected ',' or ']' at character 34\b"):
        list(entries(tmp_path / "a.json"))
    (tmp_path / "a.json").write_text('{"images": [{"id": 1}, {"id: 2}, {"id": 3}]}')
    with pytest.raises(DataError, match=r"a value is wrong or breaks off at character 24\b"):
        list(entries(tmp_path / "a.json"))


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"a.json"):
        list(entries(tmp_path / "a.json"))


@pytest.fixture
def peak():
    """What Python has allocated at most since the test began, in bytes."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def test_damaged_file_is_not_read_into_memory_as_a_whole(tmp_path, peak):
    with (tmp_path / "a.json").open("w") as file:
        file.write('{"images": ["')
        for _ in range(60):
            file.write("x" * 1_000_000)
    with pytest.raises(DataError, match="longer than"):
        list(entries(tmp_path / "a.json"))
    assert peak() < 8 * module._LONGEST


def test_large_file_is_never_in_memory_as_a_whole(tmp_path, peak):
    path, count = tmp_path / "a.json", 20_000
    with path.open("w") as file:
        file.write('{"annotations": [')
        for i in range(count):
            file.write(json.dumps({"id": i, "counts": "x" * 600}) + ("," if i < count - 1 else "]}"))
    assert path.stat().st_size > 10_000_000
    assert sum(entry["id"] for _, entry in entries(path)) == count * (count - 1) // 2
    assert peak() < 2_000_000
