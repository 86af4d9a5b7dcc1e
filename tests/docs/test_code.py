"""The code in the documents and the examples runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import NETWORKS
from forked import run_copies
from pages import PAGES, ROOT, code_blocks, name
from PIL import Image

from snugfit._upstream import GROUP_NORM_MENDED

BACKPROP = ROOT / "docs/methods/backprop.md"


def run(code: str, folder) -> str:
    """Run a script in a fresh process, as a reader would, and return what it printed."""
    script = folder / "script.py"
    script.write_text(code)
    command = [sys.executable, script.name]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(name: str, folder) -> str:
    return run((ROOT / "examples" / f"{name}.py").read_text(), folder)


def page_code(page: str) -> str:
    return "\n".join(code_blocks(ROOT / "docs" / f"{page}.md", "python"))


def trained(out: str, **options: object) -> str:
    """Code of a short run, as the pages have it before their scripts."""
    options |= {"epochs": 1, "strategy": "backprop"}
    return f"import snugfit\nsnugfit.plan(**{options}).run((), out={out!r})\n"


def unbudgeted_scripts() -> dict[str, str]:
    """Scripts without a memory budget, or that only plan in one: a budget counts from a process's start."""
    parts = ("lean", "local", "selection", "surgery", "tiling")
    scripts = {part: (ROOT / "examples" / f"own_loop_with_{part}.py").read_text() for part in parts}
    for page in ("methods/tiled", "howto/several_labels", "profiling"):
        scripts[page] = page_code(page)
    planned = [f"{block}\nassert plan.plan.choice is not None\n" for block in code_blocks(BACKPROP, "python")]
    scripts["methods/backprop"] = "".join(planned)
    prepared, several = code_blocks(ROOT / "docs/data_and_models.md", "python")
    prepared += "\nassert plan.plan.workload.input_shape == (3, 24, 40) and plan.plan.choice is not None\n"
    several += "\nassert len(plan.plan.workload.inputs) == 3 and plan.plan.choice is not None\n"
    scripts["data_and_models"] = prepared + several
    first = trained("runs/first", model="smallconv", data="digits", image_size=8, max_train=32)
    scripts["howto/finished_runs"] = first + page_code("howto/finished_runs")
    boxes = trained("runs/boxes", task="detect", model="tiny_nets:detector", data="boxes", image_size=32)
    scripts["detection"] = boxes + page_code("detection")
    return scripts


@pytest.fixture(scope="module")
def unbudgeted(tmp_path_factory) -> dict[str, str]:
    """What each of them printed, in one process, with a folder for each."""
    folder = tmp_path_factory.mktemp("unbudgeted")
    scripts = unbudgeted_scripts()
    for number, code in enumerate(scripts.values()):
        (folder / str(number)).mkdir()
        (folder / str(number) / "script.py").write_text(code)
    write_boxes(folder / str(list(scripts).index("detection")) / "boxes")
    code = f"import os, runpy, sys\nsys.path.append({str(NETWORKS)!r})\nfor number in range({len(scripts)}):\n"
    code += f"    print('=====')\n    os.chdir(f'{folder}/{{number}}')\n"
    code += "    runpy.run_path('script.py', run_name='__main__')\n"
    return dict(zip(scripts, run(code, folder).split("=====\n")[1:], strict=True))


def write_boxes(folder: Path) -> None:
    """A data set of four images with a box each."""
    for part in ("images", "labels"):
        (folder / part / "train").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / "images" / "train" / f"{number}.png")
        (folder / "labels" / "train" / f"{number}.txt").write_text("0 0.5 0.5 0.2 0.3\n")


def numbers(text: str, unit: str) -> list[float]:
    return [float(found) for found in re.findall(rf"(\d[\d.]*) ?{unit}", text)]


def test_own_module(tmp_path):
    printed = run_example("own_module", tmp_path)
    assert "logits of an empty image: (1, 10)" in printed
    assert (tmp_path / "small_net.safetensors").stat().st_size > 0


def test_own_loop_with_budget(tmp_path):
    printed = run_example("own_loop_with_budget", tmp_path)
    assert "loss fell: True" in printed and "within the budget: True" in printed
    assert int(re.search(r"images at once: (\d+) of 64", printed)[1]) < 64


OF_LIBRARIES = [f"{library}_with_budget" for library in ("lightning", "huggingface", "timm", "ultralytics")]


@pytest.mark.parametrize("example", OF_LIBRARIES)
def test_loops_of_other_libraries(example, tmp_path):
    library = {"huggingface_with_budget": "transformers"}.get(example, example.removesuffix("_with_budget"))
    pytest.importorskip(library, exc_type=ImportError)
    printed = run_example(example, tmp_path)
    steps = r"[1-9]\d*" if library == "ultralytics" else "6"  # its warm-up changes how many batches are added up
    assert "within the budget: True" in printed and re.search(rf"; steps: {steps}$", printed, re.MULTILINE)
    assert int(re.search(r"images at once: (\d+) of 64", printed)[1]) < 64


def test_scripts_of_other_libraries_change_by_five_lines_at_most():
    for example in OF_LIBRARIES:
        script = (ROOT / "examples" / f"{example}.py").read_text()
        assert 0 < len(re.findall(r"# (?:new|changed)\b", script)) <= 5
        assert len(re.findall(r"\b(?:snugfit|step)(?:\.integrations\.\w+)?\.?\w*\(", script)) <= 5, "calls"


def test_own_loop_with_memory(tmp_path):
    printed = run_example("own_loop_with_memory", tmp_path)
    refused = re.findall(r"^(\d+) images at once are refused$", printed, re.MULTILINE)
    micro, enforced = re.search(r"of 256 images, (\d+) at once; enforced: (\w+)$", printed, re.MULTILINE).groups()
    assert int(micro) * 2 ** len(refused) == 256 and "within the budget: True" in printed
    if sys.platform == "linux":
        assert enforced == "True" and refused


def test_own_loop_with_lean(unbudgeted):
    printed = unbudgeted["lean"]
    before, after = numbers(printed.splitlines()[0], "MB")
    assert after < 0.7 * before
    assert "same weights after training: True\nplain again: True" in printed


def test_own_loop_with_local(unbudgeted):
    printed = unbudgeted["local"]
    exits = numbers(printed, "%")
    assert len(exits) == 2 and min(exits) > 60, "ten classes"


def test_own_loop_with_selection(unbudgeted):
    printed = unbudgeted["selection"]
    told = re.findall(r"^trains for (\d+)% of a full step: (.+)$", printed, re.MULTILINE)
    assert len(told) == 3
    assert all(int(share) <= 80 and "11.weight 11.bias" in names for share, names in told)
    assert numbers(printed.splitlines()[-1], "%")[-1] > 60, "ten classes"


def test_own_loop_with_surgery(unbudgeted):
    printed = unbudgeted["surgery"]
    assert "widths [8, 16, 24], same outputs: True\nsame outputs with the side network: True" in printed
    trained, full = map(int, re.search(r"trains: (\d+) of (\d+) parameters", printed).groups())
    assert trained < full
    first, last = map(float, re.search(r"loss from (\S+) to (\S+)$", printed.strip()).groups())
    assert last < first / 2


def test_own_loop_with_tiling(unbudgeted):
    lines = unbudgeted["tiling"].splitlines()
    assert len(lines) == 3
    for line in lines:
        assert float(re.search(r"differ by (\S+) of", line)[1]) < 1e-10
        whole, tiles = numbers(line, "MB")
        assert tiles < whole / 3


def test_ray_train(tmp_path):
    pytest.importorskip("ray")
    assert "trained by 2 workers: True" in run_example("ray_train", tmp_path)


def test_every_example_is_run_and_short():
    tested = {name.removeprefix("test_") for name in globals()}
    tested |= {*OF_LIBRARIES}
    for example in (ROOT / "examples").glob("*.py"):
        assert example.stem in tested
        assert len(example.read_text().splitlines()) <= 80


TRAINING = ("README.md", "docs/howto/own_network.md", "docs/memory_budget.md", "docs/adding_a_local_loss.md")
"""Pages whose scripts train, and end with whether that was right."""


@pytest.mark.parametrize("page", TRAINING)
def test_python_of_a_page(page, tmp_path):
    printed = run("\n".join(code_blocks(ROOT / page, "python")), tmp_path)
    assert printed.splitlines()[-1].endswith("True")
    assert list(tmp_path.glob("runs/*/model.safetensors"))


def test_python_of_finished_runs(unbudgeted):
    shape, accuracy, sound = unbudgeted["howto/finished_runs"].splitlines()
    assert shape == "torch.Size([1, 10])" and 0 <= float(accuracy.split()[-1]) <= 1 and sound.endswith("True")


def test_python_of_detection(unbudgeted):
    assert unbudgeted["detection"].startswith("tensor(")


def test_python_of_tiles(unbudgeted):
    assert "tiled" in unbudgeted["methods/tiled"]


def test_python_of_several_labels(unbudgeted):
    assert 0 <= float(unbudgeted["howto/several_labels"]) <= 1


def test_python_of_an_estimate(unbudgeted):
    printed = unbudgeted["profiling"]
    assert "what would lower" in printed and int(printed.split()[-1]) > 0


@pytest.mark.parametrize("page", ["methods/backprop", "data_and_models"])
def test_python_that_plans(page, unbudgeted):
    assert page in unbudgeted, "its own assertions hold"


@pytest.mark.slow
def test_python_of_planning(tmp_path):
    printed = run(page_code("planning"), tmp_path)
    trials = re.findall(r"^(\w+) ([\d.]+) ([\d.]+) None$", printed, re.MULTILINE)
    assert {"backprop", "checkpoint"} <= {name for name, *_ in trials}
    assert all(0 < float(peak) <= 1 and float(seconds) > 0 for _, peak, seconds in trials)


def test_defects_of_torch_are_as_the_page_says():
    """The page names the versions that were looked at; of others it says nothing, but for the first defect."""
    (crash, _), (_, update), copy, (_, depthwise), shared = run_copies(
        "import torch", *code_blocks(ROOT / "docs/upstream.md", "python")
    )
    assert crash == (-11 if torch.__version__ < GROUP_NORM_MENDED else 0)
    if torch.__version__.split("+")[0] == "2.13.0":
        assert float(re.search(r"tensor\(([\d.]+)", update)[1]) == pytest.approx(0.6, abs=0.1)
        assert (copy, shared) == ((0, "1.0\n"), (0, "False\n"))
        assert float(depthwise) > 25


def test_no_page_is_left_out():
    """The code of docs/adding_a_strategy.md is run by test_plugins.py."""
    elsewhere = {
        *("adding_a_strategy", "detection", "howto/finished_runs", "methods/backprop", "methods/tiled"),
        *("own_training_loop", "planning", "profiling", "data_and_models", "howto/several_labels", "upstream"),
    }
    found = {name(page) for page in PAGES if code_blocks(page, "python")}
    assert found == {*TRAINING, *(f"docs/{page}.md" for page in elsewhere)}


def test_a_subscriber_of_the_page_stops_the_run(tmp_path):
    printed = run("\n".join(code_blocks(ROOT / "docs/own_training_loop.md", "python")), tmp_path)
    assert "stopped; continue with: snugfit train --resume runs/patient" in printed
    assert int(re.search(r"stopped after (\d+) of 16 steps", printed)[1]) < 16
    assert printed.splitlines()[-1] == "all steps by now: True"
