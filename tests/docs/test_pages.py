"""What the documents say of commands, options, names and files is so."""

import dataclasses
import re
from importlib.metadata import metadata

import pytest
from packaging.requirements import Requirement
from pages import PAGES, ROOT, code_blocks, name, prose, snugfit_commands

import snugfit
from snugfit import _models as models
from snugfit import errors
from snugfit._cli.app import build
from snugfit._cli.launch import ClusterOptions
from snugfit._cli.options import PlanOptions, ProfileOptions
from snugfit._core.estimate import EstimateOptions
from snugfit._core.option_groups import PLAIN_ONNX
from snugfit._core.registry import strategies
from snugfit._core.request import Request
from snugfit._data.catalog import SOURCES
from snugfit.local import LOCAL_LOSSES

README = ROOT / "README.md"
DOCS = [page for page in PAGES if name(page).startswith("docs/")]
INSTALLED = metadata("snugfit")
COMMANDS = [
    (name(page), command)
    for page in PAGES
    for command in snugfit_commands(page)
    if page.name != "troubleshooting.md"  # test_troubleshooting.py runs these, and some are refused
]


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, part = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if part:
            assert part in [anchor(h) for h in re.findall(r"^#+ (.+)$", prose(file), re.MULTILINE)], target


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: value if isinstance(value, str) else value[0])
def test_commands_are_accepted(page, command):
    build().parse_args(command, exit_on_error=False, print_error=False)


def test_readme_begins_with_the_two_commands():
    first, second = code_blocks(README, "sh")[:2]
    needed = [Requirement(text) for text in INSTALLED.get_all("Requires-Dist")]
    torch = next(requirement for requirement in needed if requirement.name == "torch")
    for command, extra in ((first, "demo"), (second, "test")):
        environment, install, _ = command.strip().split(" && ")
        assert environment == "python3 -m venv .venv"
        found = re.fullmatch(r'\.venv/bin/pip install torch==(\S+) "\.\[(\w+)\]"', install)
        assert found is not None and torch.specifier.contains(found[1])
        assert found[2] == extra and extra in INSTALLED.get_all("Provides-Extra")
    assert " && .venv/bin/snugfit train --model vgg16 --data digits --memory 100MB " in first
    assert second.strip().endswith(" && .venv/bin/pytest")


def test_the_page_of_errors_tells_every_exit_code():
    page = ROOT / "docs" / "troubleshooting.md"
    rows = [cells(row) for row in re.findall(r"^\|.*\|$", prose(page), re.MULTILINE)]
    told = {int(cell) for row in rows for cell in row[::2] if cell.isdigit()}
    known = {getattr(value, "exit_code", 0) for value in vars(errors).values()}
    assert told == known


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_start_page_begins_as_the_readme_does():
    assert code_blocks(ROOT / "docs" / "index.md", "sh")[0] == code_blocks(README, "sh")[0]


def test_every_row_about_other_trainers_names_a_test_or_a_command_that_exists():
    tables = re.findall(r"^\|.*\|$", (ROOT / "docs" / "adoption.md").read_text(), re.MULTILINE)
    rows = [cells(row) for row in tables if cells(row)[-1].startswith("`")]
    assert len(rows) > 15 and all(len(row) == 7 for row in rows)
    for row in rows:
        file, _, test = row[-1].strip("`").partition("::")
        if not test:
            assert (ROOT / f"{file.split()[2].replace('.', '/')}.py").exists(), row[-1]
        else:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), row[-1]


def test_every_page_is_in_the_navigation_of_the_site():
    told = re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    others = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
    assert sorted(told) == sorted([*(name(page).removeprefix("docs/") for page in DOCS), *others])


@pytest.mark.parametrize("package", ["", *snugfit.PUBLIC])
def test_every_public_package_has_a_page_of_the_api(package):
    page = (ROOT / "docs" / "api" / f"{package or 'snugfit'}.md").read_text()
    assert f"\n::: {'.'.join(filter(None, ('snugfit', package)))}\n" in page
    if not package:
        assert re.findall(r"^        - (\w+)$", page, re.MULTILINE) == snugfit.__all__


def test_every_strategy_has_a_card_and_a_row():
    cards = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")}
    assert cards == {*strategies(), "lls"}, "lls is a local loss of blockwise"
    for strategy in strategies():
        assert f"[`{strategy}`](docs/methods/{strategy}.md)" in README.read_text()


def test_every_model_data_set_and_local_loss_is_told_of():
    names, card = ((ROOT / "docs" / page).read_text() for page in ("data_and_models.md", "methods/blockwise.md"))
    for known in (*models.names(), *SOURCES):
        assert f"`{known}`" in names, known
    row = next(line for line in card.splitlines() if line.startswith("| `--local-loss`"))
    for loss in LOCAL_LOSSES:
        assert f"`{loss}`" in row, loss


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_flags_exist(page):
    request = Request()
    groups = [getattr(request, group.name) for group in dataclasses.fields(request)]
    fields = [
        field
        for group in (*groups, PlanOptions(), ProfileOptions(), EstimateOptions("1x8x8"), PLAIN_ONNX, ClusterOptions())
        for field in dataclasses.fields(group)
    ]
    known = {field.name.replace("_", "-") for field in fields}
    known |= {"resume", "report", "json", "quiet", "debug", "config"}
    known |= {f"no-{flag}" for flag in known} | {
        "top",
        "pictures",
        "format",
        "split",
        "check",
        "help",
        "help-all",
        "max-restarts",
        "min-hosts",
    }
    told = set(re.findall(r"`--([a-z][a-z0-9-]*)", prose(page)))
    assert told <= known


def test_the_card_of_blockwise_names_every_local_loss():
    text = (ROOT / "docs" / "methods" / "blockwise.md").read_text()
    assert all(f"`{loss}`" in text for loss in LOCAL_LOSSES)
