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


def test_a_copy_is_prepared_once_and_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "_COPIED", ("pyproject.toml", "src"))
    monkeypatch.setattr(mutants, "ROOT", tmp_path / "project")
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "project" / "src" / "a.py").write_text("")
    (tmp_path / "project" / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    copy = tmp_path / "copy"
    mutants.prepare(mutants.GROUPS["memory"], copy)
    project = (copy / "pyproject.toml").read_text()
    assert 'only_mutate = ["src/snugfit/memory/model.py"]' in project
    assert "-n logical" not in project and "addopts" in project
    (copy / "mutants").mkdir()
    (copy / "src" / "a.py").write_text("changed")
    mutants.prepare(mutants.GROUPS["memory"], copy)
    assert (copy / "src" / "a.py").read_text() == "changed"
