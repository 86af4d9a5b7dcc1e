"""What a release consists of: one version everywhere, workflows that can be read, notes that exist."""

import re

import pytest
import yaml
from pages import ROOT, project

from snugfit._version import __version__

PROJECT = project((ROOT / "pyproject.toml").read_text())
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"], "it is read from _version.py"
    released = [("Unreleased", ""), (__version__, f" - {citation['date-released']}")]
    assert re.findall(r"^## \[(.+)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:2] == released
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])
    series = __version__.rpartition(".")[0]
    assert f"Version {series} " in (ROOT / "SECURITY.md").read_text()
    assert f"Version {series}, " in (ROOT / "README.md").read_text()
    assert f" to {__version__}\n" in (ROOT / "docs" / "migrating.md").read_text()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_says_when_and_what(name):
    workflow = WORKFLOWS[name]
    assert workflow[True], "YAML 1.1 reads the key `on` as a boolean"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "uses" in job or (job["runs-on"] and all(("run" in step) != ("uses" in step) for step in job["steps"]))
        assert set(job.get("needs", ())) <= set(workflow["jobs"])


def test_workflows_test_what_the_project_promises():
    matrix = WORKFLOWS["checks"]["jobs"]["tests"]["strategy"]["matrix"]
    told = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if " :: 3." in text]
    assert matrix["python"] == told and PROJECT["requires-python"] == f">={told[0]}"
    oldest = next(text for text in PROJECT["dependencies"] if text.startswith("torch>="))
    assert matrix["torch"][0].startswith(oldest.removeprefix("torch>="))
    assert f"torch=={matrix['torch'][-1]}" in (ROOT / "README.md").read_text()


def test_a_job_runs_the_tests_of_other_libraries_with_their_extras():
    folder = "tests/unit/integrations"
    libraries = {path.stem.removeprefix("test_") for path in (ROOT / folder).glob("test_*.py")}
    needed = libraries & set(PROJECT["optional-dependencies"]) | {"vision"}
    assert {"accelerate", "huggingface", "lightning", "ultralytics"} <= needed
    steps = ([step.get("run", "") for step in job["steps"]] for job in WORKFLOWS["checks"]["jobs"].values())
    runs = next(each for each in steps if any(run.startswith("pytest") and folder in run for run in each))
    installed = next(run for run in runs if run.startswith('pip install ".['))
    assert needed <= set(installed.partition("[")[2].partition("]")[0].split(","))
    tested = next(run for run in runs if run.startswith("pytest")).split()[1:]
    assert all((ROOT / path).exists() for path in tested)


def test_a_job_runs_the_tests_of_other_launchers_with_these():
    steps = [step.get("run", "") for step in WORKFLOWS["checks"]["jobs"]["launchers"]["steps"]]
    assert {"openmpi-bin", "mpich", "slurmctld", "slurmd", "munge"} <= {*steps[1].split()}
    assert "slow or not slow" in steps[-1] and (ROOT / steps[-1].split()[-1]).exists()


def test_issue_forms_can_be_read():
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    assert len(forms) == 3
    for form in forms:
        assert form["name"] and form["description"] and form["body"]
        assert all(part["type"] == "markdown" or part["id"] for part in form["body"])


def test_the_source_distribution_has_the_notes():
    told = (ROOT / "MANIFEST.in").read_text().split()
    for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"):
        assert name in told and (ROOT / name).is_file()
