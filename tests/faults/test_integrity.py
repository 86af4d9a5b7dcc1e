"""Real runs, finished and interrupted, whose files are damaged one by one: noticed by name, or no matter."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import snugfit
from snugfit._cli.app import run as command
from snugfit._cli.worker import COMMANDS
from snugfit._engine.inference import RunImages
from snugfit._engine.running import FIRST_FILES
from snugfit._storage import lock
from snugfit._storage.digests import FileDigest
from snugfit._storage.files import write_json_atomic
from snugfit._storage.manifest import Manifest
from snugfit._storage.outputs import require_run_folder
from snugfit.errors import CheckpointError, UsageError

MAKE = """
import sys
import snugfit
from snugfit._training.events import StepDone

small = {"image_size": 8, "max_train": 48, "max_val": 24, "batch_size": 16, "epochs": 2, "threads": 1, "memory": "90MB"}
blocks = {"strategy": "blockwise", "local_loss": "linear", "block_units": 2}
stop = snugfit.StopFlag()

def in_the_second_block(event):
    if isinstance(event, StepDone) and event.phase != first and event.epoch == 1:
        stop.request()

plan = snugfit.plan("smallconv", "digits", **small, **blocks)
first = plan.plan.choice.predicted.phases[0].name
plan.run((), out="finished")
try:
    snugfit.plan("smallconv", "digits", **small, **blocks).run((in_the_second_block,), out="interrupted", stop=stop)
except snugfit.errors.InterruptedRunError as error:
    print(error)
"""


def script(text: str, folder: Path, *arguments: str) -> str:
    """Run Python in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert "--resume interrupted" in script(MAKE, folder)
    assert any((folder / "interrupted" / "cache").iterdir()), "it was stopped while a cache was in use"
    return folder


@pytest.fixture
def finished(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return Path("finished")


@pytest.fixture
def interrupted(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return Path("interrupted")


def files(run: Path) -> list[Path]:
    """Every file of a run but its lock."""
    return sorted(path for path in run.rglob("*") if path.is_file() and path.name != lock.LOCK_FILE)


def flip(content: bytes, chance: random.Random) -> bytes | None:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def truncate(content: bytes, chance: random.Random) -> bytes | None:
    return content[: chance.randrange(len(content))]


def delete(content: bytes, chance: random.Random) -> bytes | None:
    return None


DAMAGES = (flip, truncate, delete)


@contextmanager
def damaged(path: Path, damage: Callable[[bytes, random.Random], bytes | None]) -> Iterator[None]:
    """Damage a file, at a place that depends on its name alone."""
    good = path.read_bytes()
    bad = damage(good, random.Random(f"{path} {damage.__name__}"))
    path.unlink()
    if bad is not None:
        path.write_bytes(bad)
    try:
        yield
    finally:
        path.write_bytes(good)


def predicted(run: Path) -> Any:
    return list(snugfit.predict(run, "photo.png", top=3))


def exported(run: Path) -> Any:
    snugfit.export(run, "out", format="safetensors")
    return [path.read_bytes() for path in sorted(Path("out").iterdir())]


def evaluated(run: Path) -> Any:
    return snugfit.evaluate(run, split="val")


def reported(run: Path) -> Any:
    page = Path(snugfit.draw_report(run)["report"])
    return page.read_text()


def looked_at(run: Path) -> Any:
    """A unit's weights and its exit, as pictures read them."""
    from snugfit._engine.figure_data import FinishedRun

    return [FinishedRun(run).stored(kind, 0) for kind in ("weights", "exits")]


@pytest.fixture
def one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of a run are opened once."""
    known: dict[Any, RunImages] = {}
    from snugfit._engine import inference as images

    real = images.run_images

    def opened(folder: Path, *where: Any) -> RunImages:
        images.Architecture.read(folder), images.read_data(images.Request, folder / "request.json")
        images.images_at_once(folder)
        return known.setdefault(where, known.get(where) or real(folder, *where))

    monkeypatch.setattr(images, "run_images", opened)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page tells what it would be drawn from, for drawing takes a second."""
    monkeypatch.setattr("snugfit._report.run_page.render", lambda *drawn: repr(drawn))


@pytest.mark.parametrize("use", [predicted, exported, evaluated, reported, looked_at], ids=lambda use: use.__name__)
@pytest.mark.usefixtures("one_read", "undrawn")
def test_damage_to_a_finished_run_is_noticed_or_no_matter(finished: Path, use: Any) -> None:
    from PIL import Image

    Image.new("L", (8, 8), 100).save("photo.png")
    right, noticed = use(finished), set()
    for path in files(finished):
        for damage in DAMAGES:
            with damaged(path, damage):
                try:
                    assert equal(use(finished), right), f"{path}, {damage.__name__}: another outcome"
                except CheckpointError as error:
                    assert path.name in str(error) and "\n" not in str(error), error
                    noticed.add(path.name)
    assert noticed >= READ[use.__name__], "what it reads is checked"


READ = {
    "predicted": {"model.safetensors", "architecture.json", "record.json", "manifest.json"},
    "exported": {"model.safetensors", "architecture.json", "record.json"},
    "evaluated": {"model.safetensors", "architecture.json", "record.json", "request.json"},
    "reported": {"record.json", "metrics.csv"},
    "looked_at": {"unit_000_features.0.safetensors"},
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list) and one and isinstance(one[0], dict):
        return all(a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def test_damage_to_an_interrupted_run_stops_its_resumption(interrupted: Path) -> None:
    found = files(interrupted)
    assert {path.parent.name for path in found} >= {"weights", "exits", "cache"}
    for path in found:
        for damage in DAMAGES:
            if path.name == "metrics.csv":
                continue  # below: no matter for the weights
            with damaged(path, damage), pytest.raises(CheckpointError) as caught:
                snugfit.resume(interrupted, subscribers=())
            assert path.name in str(caught.value) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("change", ["seed", "max_train", "data"])
def test_a_changed_request_is_noticed(interrupted: Path, change: str) -> None:
    path = interrupted / "request.json"
    request = json.loads(path.read_text())
    group = request["training" if change == "seed" else "data"]
    group[change] = "mnist" if change == "data" else 7
    with damaged(path, lambda content, chance: json.dumps(request, indent=1).encode()):
        with pytest.raises(CheckpointError, match=r"request\.json"):
            snugfit.resume(interrupted, subscribers=())
        assert snugfit.verify(interrupted).damaged.keys() == {"request.json"}


def test_a_changed_list_of_classes_is_noticed(finished: Path) -> None:
    path = finished / "architecture.json"
    with damaged(path, lambda content, chance: content.replace(b'"3"', b'"8"')), pytest.raises(CheckpointError):
        snugfit.evaluate(finished)


RESUME = """
import sys
import snugfit
from snugfit._training.events import Notice

record = snugfit.resume(sys.argv[1], subscribers=[lambda event: isinstance(event, Notice) and print(event)])
assert record.enforced and record.measured["peak_bytes"] <= record.predicted["peak_bytes"], record.measured
"""


def test_a_damaged_log_changes_no_weights(made: Path) -> None:
    run, finished = made / "no-log", made / "finished"
    shutil.copytree(made / "interrupted", run, symlinks=True)
    log = run / "metrics.csv"
    log.write_bytes(flip(log.read_bytes(), random.Random(1)) or b"")
    said = script(RESUME, made, run.name)
    assert "metrics.csv is damaged" in said and "training continues" in said
    for name in (*(path.relative_to(finished) for path in files(finished / "weights")), Path("model.safetensors")):
        assert (run / name).read_bytes() == (finished / name).read_bytes()
    found = snugfit.verify(run)
    assert found.sound and not found.extra
    shutil.rmtree(run)


USES = {
    "evaluate": "finished", "predict": "finished", "export": "finished", "report": "finished", "verify": "finished",
    "train": "interrupted",
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_a_lost_manifest_is_said_by_every_command(
    made: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    module = "train" if name == "train" else "finished_runs"
    monkeypatch.setattr(f"snugfit._cli.{module}.run_job", in_this_process, raising=False)
    before = files(made / USES[name])
    words = {"predict": ["predict", "finished", "photo.png"], "train": ["train", "--resume", "interrupted"]}
    with damaged(made / USES[name] / "manifest.json", delete):
        assert command(words.get(name, [name, USES[name]])) == 4
        shown = capsys.readouterr().err
        assert f"{USES[name]} is not a run folder, or incomplete: it has no manifest.json" in shown
        assert len(shown.strip().splitlines()) == 1, "one line"
    assert files(made / USES[name]) == before, "nothing was written"


def in_this_process(asked: dict[str, Any], on_row: Any = None) -> dict[str, Any]:
    """A job of the command line, without a process of its own."""
    rows: list[Any] = []
    return dict(COMMANDS[asked["command"]](snugfit._api, asked, (), lambda **said: rows.append(said)))


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_run_that_was_killed_before_it_began_is_started_again(made: Path, kept: int, tmp_path: Path) -> None:
    """SIGKILL between two of the files that a run is resumed from, and before the first of them."""
    manifest = Manifest.reopen(tmp_path)
    for name in FIRST_FILES[:kept]:
        write_json_atomic(tmp_path / name, json.loads((made / "interrupted" / name).read_text()), manifest)
    if kept == 0:
        (tmp_path / "lock").touch()
        with pytest.raises(CheckpointError, match=r"so no run has begun\. Repeat the command of the run"):
            snugfit.resume(tmp_path)
        return require_run_folder(tmp_path)
    (tmp_path / f"{FIRST_FILES[kept]}.tmp").write_text("{")
    again = f"was stopped before training began, and has no {FIRST_FILES[kept]} .* start the run again"
    with pytest.raises(CheckpointError, match=again):
        snugfit.resume(tmp_path)
    manifest.announce({tmp_path / FIRST_FILES[kept]: FileDigest(1, "x")})
    with pytest.raises(CheckpointError, match=again):
        snugfit.resume(tmp_path)
    return None


def verified(run: Path, *flags: str) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as out:
        code = command(["verify", str(run), *flags])
    return code, out.getvalue()


def test_verify_names_each_file(finished: Path) -> None:
    snugfit.draw_report(finished)
    code, said = verified(finished)
    assert code == 0 and "all as written" in said and len(said.splitlines()) == 1
    (finished / "notes.txt").write_text("mine")
    unit = next(iter(finished.glob("weights/unit_000*"))).relative_to(finished).as_posix()
    with damaged(finished / unit, flip), damaged(finished / "record.json", delete):
        code, said = verified(finished)
        found = json.loads(verified(finished, "--json")[1])
    (finished / "notes.txt").unlink()
    assert code == 4 and f"damaged  {unit}: it is damaged" in said and "missing  record.json" in said
    assert "extra    notes.txt" in said and "2 of them not as written" in said
    assert found["sound"] is False and found["missing"] == ["record.json"] and found["extra"] == ["notes.txt"]
    assert list(found["damaged"]) == [unit] and snugfit.verify(finished).sound


def test_verify_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose disk was full at its start leaves its lock alone."""
    for name, file in {"empty": "", "begun": "lock", "other": "notes.txt"}.items():
        (tmp_path / name).mkdir()
        if file:
            (tmp_path / name / file).touch()
    reasons = {
        **dict.fromkeys(("empty", "begun"), "it is empty, so no run has begun"),
        "none": "not a run folder: it does not exist",
        "other": "not a run folder, or incomplete: it has no manifest.json",
    }
    for name, reason in reasons.items():
        assert command(["verify", str(tmp_path / name)]) == 4
        assert reason in capsys.readouterr().err


def test_a_folder_in_another_place_is_as_good(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    assert snugfit.verify(tmp_path / "copy").sound
    assert equal(evaluated(tmp_path / "copy"), evaluated(finished))


HOLD = """
import sys, time
from pathlib import Path
from snugfit._storage.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_only_one_process_continues_a_run(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.0)
    Path("new").mkdir(exist_ok=True)
    before = {path: path.read_bytes() for path in files(interrupted)}
    for folder in (interrupted, Path("new")):
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
            with pytest.raises(UsageError, match=f"another process is at work on the run in {folder}"):
                if folder == interrupted:
                    snugfit.resume(folder, subscribers=())
                else:
                    from snugfit._engine.planning import Planned
                    from snugfit._engine.running import execute

                    execute(Planned(None, None, None, assembly=None, baseline=None), (), folder)  # type: ignore[arg-type]
        finally:
            os.kill(holder.pid, signal.SIGKILL)
            holder.communicate()
    assert before == {path: path.read_bytes() for path in files(interrupted)}
    assert [path.name for path in Path("new").iterdir()] == [lock.LOCK_FILE]
