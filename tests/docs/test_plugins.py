"""Strategies, local losses and models are added from one folder or from an installed package; no other file changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from pages import ROOT, code_blocks, project

import snugfit
from snugfit._core.registry import strategies, strategy_class
from snugfit._core.request import StrategyOptions

SOURCE = Path(snugfit.__file__).parent
PAGE = ROOT / "docs/adding_a_strategy.md"
LOSS = """
from torch import nn
from snugfit.local import LocalLoss

class Mean(LocalLoss):
    '''A linear layer on the means of channels.'''
    def __init__(self, unit, network):
        super().__init__()
        self.linear = nn.Linear(unit.output_shape[0], network.classes)
    def predict(self, features):
        return self.linear(features.flatten(2).mean(2) if features.dim() == 4 else features)

LOSSES = {"mean-only": Mean}
"""
MODEL = """
from torch import nn

def tiny(classes, image_size, channels=3):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    )

MODELS = {"tiny": tiny}
"""
WORK = {"model": "tiny", "data": "digits", "image_size": 8, "max_train": 64, "max_val": 32, "batch_size": 16,
        "epochs": 2, "memory": "100MB", "threads": 1, "profile_cache": "off"}  # fmt: skip
OPTIONS = {"strategy": "head-only", "trained_units": 1, "feature_scale": 0.5}
LOCAL = {"strategy": "blockwise", "module_units": "1", "local_loss": "mean-only"}
TRAIN = """
import json, snugfit
for out, options in {runs}.items():
    print(json.dumps(snugfit.plan(**options).run((), out=out).to_json()))
"""
STOP = """
import snugfit, sys
flag = snugfit.StopFlag()
def stop(event):
    if isinstance(event, snugfit.StepDone):
        flag.request()
try:
    snugfit.plan(**{{**{options}, "memory": "1MB"}}).run()
except snugfit.errors.InfeasibleBudgetError as error:
    print("head-only" in str(error))
try:
    snugfit.plan(**{options}).run((stop,), out="stopped", stop=flag)
except snugfit.errors.InterruptedRunError:
    print("stopped")
"""
LOAD = """
import snugfit, torch
first, second, local = (snugfit.load(run) for run in ("trained", {second!r}, "local"))
shapes = [net(torch.zeros(2, 1, 8, 8)).shape == (2, 10) for net in (first, second, local)]
one, other = first.state_dict(), second.state_dict()
print(*shapes, one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one))
"""


@dataclass(frozen=True)
class Installation:
    """A folder to work in, and the path where Python finds packages."""

    work: Path
    path: Path

    def process(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.path), "XDG_CACHE_HOME": str(self.work / "cache")}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.work, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done

    def python(self, *arguments: str) -> str:
        return self.process(*arguments).stdout

    def snugfit(self, *arguments: str) -> str:
        return self.python("-m", "snugfit", *arguments)

    def config(self, options: dict) -> str:
        lines = (f"{key}: {value}" for key, value in {**WORK, **options}.items())
        (self.work / "options.yaml").write_text("\n".join(lines))
        return "options.yaml"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def modules() -> dict[str, str]:
    """The modules of the page, by their paths."""
    blocks = [code for code in code_blocks(PAGE, "python") if code.startswith("# head_only/")]
    return {code.splitlines()[0].removeprefix("# "): code for code in blocks}


@pytest.fixture
def folder(tmp_path):
    """snugfit's own sources, with one folder and two files added."""
    package = tmp_path / "src" / "snugfit"
    opened = ("strategies", "local", "_models")
    for part in ("", *opened):
        (package / part).mkdir(parents=True)
        for each in (SOURCE / part).iterdir():
            if part or each.name not in opened:
                (package / part / each.name).symlink_to(each)
    mine = {name: text.replace("head_only.strategy:", "snugfit.strategies.head_only.strategy:")
            for name, text in modules().items()}  # fmt: skip
    write(package / "strategies", {"head_only/__init__.py": "", **mine})
    write(package, {"local/mean_only.py": LOSS, "_models/tiny.py": MODEL})
    return Installation(tmp_path, package.parent)


@pytest.fixture
def installed(tmp_path):
    """A package with entry points, as pip installs it."""
    site = tmp_path / "site"
    described = project(code_blocks(PAGE, "toml")[0])
    points = {
        **described["entry-points"],
        "snugfit.local_losses": {"mean-only": "head_only.loss:Mean"},
        "snugfit.models": {"tiny": "head_only.model:tiny"},
    }
    lines = []
    for group, each in points.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in each.items())]
    info = f"{described['name'].replace('-', '_')}-{described['version']}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: {described['version']}\n"
    write(site, {**modules(), "head_only/__init__.py": "", "head_only/loss.py": LOSS, "head_only/model.py": MODEL,
                 f"{info}/METADATA": metadata, f"{info}/entry_points.txt": "\n".join(lines)})  # fmt: skip
    (site / "snugfit").symlink_to(SOURCE)
    return Installation(tmp_path, site)


def take_part(place: Installation, record: dict, local: dict) -> None:
    """The command line names the options; records are of the strategy, and of the local loss and the model."""
    shown = place.snugfit("train", "--help-all")
    assert "--trained-units" in shown and "--feature-scale" in shown and "head-only" in shown
    assert record["strategy"] == "head-only" and record["measured"]["peak_bytes"] <= record["predicted"]["peak_bytes"]
    assert (record["settings"]["trained_units"], record["settings"]["feature_scale"]) == (1, 0.5)
    assert local["settings"]["local_loss"] == "mean-only" and local["exit"]


@pytest.mark.timeout(600)
def test_what_is_added_to_folders_takes_part(folder):
    """It is found in another way than an installed package; what is done with it then, is tested there."""
    runs = {"trained": {**WORK, **OPTIONS}, "local": {**WORK, **LOCAL}}
    *records, loaded = folder.python("-c", TRAIN.format(runs=runs) + LOAD.format(second="trained")).splitlines()
    take_part(folder, *map(json.loads, records))
    assert loaded.split() == ["True"] * 4


@pytest.mark.timeout(600)
def test_an_installed_package_takes_part_in_everything(installed):
    runs = {"local": {**WORK, **LOCAL}}
    code = TRAIN.format(runs=runs) + STOP.format(options={**WORK, **OPTIONS})
    local, *said = installed.python("-c", code).splitlines()
    assert said == ["True", "stopped"]
    record = installed.snugfit(
        "train", "--config", installed.config(OPTIONS), "--out", "trained", "--json", "--no-report"
    )
    take_part(installed, json.loads(record), json.loads(local))
    done = installed.process("-m", "snugfit", "plan", "--config", installed.config(OPTIONS), "--json")
    plan = json.loads(done.stdout)
    chosen = plan["candidates"][plan["chosen"]]
    assert chosen["strategy"] == "head-only" and "trains 1 units" in done.stderr
    assert (chosen["settings"]["trained_units"], chosen["settings"]["feature_scale"]) == (1, 0.5)
    installed.snugfit("train", "--resume", "stopped", "--quiet", "--no-report")
    assert installed.python("-c", LOAD.format(second="stopped")).split() == ["True"] * 4


def test_a_package_that_cannot_be_imported_is_left_out_with_a_warning(installed):
    (installed.path / "head_only" / "config.py").write_text("import no_such_module")
    code = "import warnings\nwith warnings.catch_warnings(record=True) as said:\n    warnings.simplefilter('always')\n"
    code += "    from snugfit._core.registry import strategies\n    names = list(strategies())\n"
    code += "print('head-only' in names, 'backprop' in names, said[0].message)"
    left, kept, *words = installed.python("-c", code).split()
    assert (left, kept) == ("False", "True")
    assert "'head-only' of the package head-only cannot be loaded" in " ".join(words)


BAD = {
    "an instance": "class Config(Base):\n    name = 'mine'\n    implementation = 'a:B'\nConfig = Config()",
    "a name that is taken": "class Config(Base):\n    name = 'backprop'\n    implementation = 'a:B'",
    "another default": "class Options(Checked):\n    interval: Count = 5\n" + "class Config(Base):\n    name = 'mine'\n"
    "    implementation = 'a:B'\n    options = dataclass(frozen=True)(Options)",
    "a common option": "class Options(Checked):\n    epochs: Count = 5\n" + "class Config(Base):\n    name = 'mine'\n"
    "    implementation = 'a:B'\n    options = dataclass(frozen=True)(Options)",
}
LISTED = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from snugfit._core.registry import strategies
    from snugfit._core.request import StrategyOptions
    assert strategies()["backprop"].implementation.startswith("snugfit.")
    assert set(strategies()) == {"backprop", "checkpoint", "blockwise", "elastic", "sidenet", "tiled", "feedback"}
print(*(each.message for each in said))
"""


@pytest.mark.parametrize("fault", BAD)
def test_an_unusable_config_is_left_out_with_a_warning(installed, fault):
    head = "from dataclasses import dataclass\nfrom snugfit.strategies import Checked, Count\n"
    head += "from snugfit.strategies import StrategyConfig as Base\n"
    (installed.path / "head_only" / "config.py").write_text(head + BAD[fault])
    assert "'head-only' is left out" in installed.python("-c", LISTED)


def test_a_strategy_whose_module_fails_is_left_out_with_a_warning(installed):
    (installed.path / "head_only" / "strategy.py").write_text("import no_such_module")
    code = "import snugfit; print(snugfit.plan('smallconv', 'digits', image_size=8, max_train=32).plan.choice.strategy)"
    done = installed.process("-c", code)
    assert done.stdout.strip() and "head-only is left out, since it cannot be imported" in done.stderr


def test_every_option_of_a_strategy_reaches_it():
    for name, config in strategies().items():
        own = {field.name for field in fields(config.options)}
        taken = {field.name for field in fields(strategy_class(name))} & {
            field.name for field in fields(StrategyOptions)
        }
        assert taken <= own, name
