"""What became of mutants, from the files that mutmut leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import mutants
from benchmarks.common import ROOT


def test_outcomes_are_counted_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "mutants" / "src" / "snugfit" / "tiling"
    folder.mkdir(parents=True)
    codes = {"a": 1, "b": 0, "c": 33, "d": None, "e": 36, "f": 3, "g": 34}
    (folder / "geometry.py.meta").write_text(json.dumps({"exit_code_by_key": codes}))
    (folder / "plan.py.meta").write_text(json.dumps({"exit_code_by_key": {}}))
    found = dict(mutants.counted(tmp_path))
    assert found == {"tiling/geometry.py": {"noticed": 3, "survived": 1, "untested": 1, "skipped": 1, "left": 1}}
    assert mutants.share(found["tiling/geometry.py"]) == pytest.approx(0.6)
    cell = {"source": "tiling/geometry.py", **found["tiling/geometry.py"]}
    assert "| tiling/geometry.py | 3 | 1 | 1 | 1 | 1 | 60.0 % |" in mutants.render([cell])


@pytest.mark.parametrize("name", mutants.GROUPS)
def test_the_files_of_every_group_are_there(name: str) -> None:
    group = mutants.GROUPS[name]
    assert all((ROOT / "src" / "snugfit" / source).is_file() for source in group.sources)
    assert all((ROOT / "tests" / "unit" / test).exists() for test in group.tests)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one source and one test, that mutants are made of."""
    monkeypatch.setattr(mutants, "_COPIED", ("pyproject.toml", "src", "tests"))
    monkeypatch.setattr(mutants, "ROOT", tmp_path / "project")
    for name in ("src/a.py", "tests/test_a.py"):
        (tmp_path / "project" / name).parent.mkdir(parents=True)
        (tmp_path / "project" / name).write_text("")
    (tmp_path / "project" / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    return tmp_path / "project"


def test_a_copy_is_configured(project: Path, tmp_path: Path) -> None:
    mutants.prepare(mutants.GROUPS["memory"], tmp_path / "copy")
    text = (tmp_path / "copy" / "pyproject.toml").read_text()
    assert 'only_mutate = ["src/snugfit/memory/line_fit.py"]' in text
    assert "-n logical" not in text and "addopts" in text


@pytest.mark.parametrize("changed", ["src/a.py", "tests/test_a.py", "tests/test_new.py", "pyproject.toml"])
def test_a_copy_is_made_anew_where_the_project_has_changed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    copy, group = tmp_path / "copy", mutants.GROUPS["memory"]
    monkeypatch.setattr(mutants, "commit", lambda: "a")
    assert mutants.prepare(group, copy) == "a"
    (copy / "mutants").mkdir()
    monkeypatch.setattr(mutants, "commit", lambda: "b")
    assert mutants.prepare(group, copy) == "a", "that of the copy, which is the same"
    assert (copy / "mutants").is_dir(), "outcomes so far are kept"
    with (project / changed).open("a") as file:
        file.write("\n# more\n")
    assert mutants.prepare(group, copy) == "b"
    assert not (copy / "mutants").exists() and "# more" in (copy / changed).read_text()


def test_a_copy_of_another_group_is_made_anew(project: Path, tmp_path: Path) -> None:
    mutants.prepare(mutants.GROUPS["memory"], tmp_path / "copy")
    mutants.prepare(mutants.GROUPS["solver"], tmp_path / "copy")
    assert "selection/solver.py" in (tmp_path / "copy" / "pyproject.toml").read_text()


def test_a_sample_is_drawn_from_what_is_left_of_every_file(tmp_path: Path) -> None:
    folder = tmp_path / "mutants" / "src" / "snugfit" / "tiling"
    folder.mkdir(parents=True)
    tried = {f"done{i}": 1 for i in range(3)}
    for name, left in (("geometry", 20), ("plan", 4)):
        codes = {**tried, **{f"{name}{i}": None for i in range(left)}}
        (folder / f"{name}.py.meta").write_text(json.dumps({"exit_code_by_key": codes}))
    names = mutants.drawn_names(tmp_path, 10)
    assert names == mutants.drawn_names(tmp_path, 10)
    assert len(set(names)) == len(names) == 7 + 4
    assert sum(name.startswith("plan") for name in names) == 4
    assert not any(name.startswith("done") for name in names)
    assert mutants.drawn_names(tmp_path, 2) == []
