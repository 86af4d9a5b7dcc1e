"""The queue's order, resumption and staleness, with fake runs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.queue import __main__ as program
from benchmarks.queue import estimate, page, runner
from benchmarks.queue.arms import CAPPED, Arm, all_arms
from benchmarks.queue.rows import Rows, read_rows
from benchmarks.queue.rungs import RUNGS, Row, Task, order, rungs_of
from benchmarks.queue.runner import Place, Runner, best_epoch
from queue_samples import DIGESTS, arm, done, rows_of

from snugfit._core.known import check_foreign_options
from snugfit._core.request import Request


def test_every_arm_runs_short_before_any_runs_longer() -> None:
    tasks = order([arm("a"), arm("b", images=900, epochs=5)], {}, DIGESTS)
    place = [0 if task.rung == rungs_of(task.arm)[0] else task.rung for task in tasks]
    assert place == sorted(place) and set(place) == {0, 1, 2}
    assert [(task.images, task.epochs) for task in tasks[:2]] == [(2_000, 10), (900, 5)]
    assert [(task.images, task.epochs) for task in (tasks[6], tasks[-1])] == [(10_000, 25), (45_000, 100)]


def test_priorities_come_before_seeds_and_seeds_before_the_order_of_the_list() -> None:
    tasks = order([arm("last", priority=2), arm("first"), arm("second")], {}, DIGESTS)
    assert [(task.seed, task.arm.name) for task in tasks[:9]] == [
        *itertools.product((0, 1, 2), ("first", "second")),
        *((seed, "last") for seed in (0, 1, 2)),
    ]


def test_an_infeasible_arm_is_recorded_once_and_left_out() -> None:
    tuned = arm("t", lrs=(0.01, 0.1))
    first = order([tuned, arm("other")], {}, DIGESTS)[0]
    left = order([tuned, arm("other")], rows_of([first], code=3), DIGESTS)
    assert first.arm == tuned and {task.arm.name for task in left} == {"other"} and len(left) == 9
    assert {task.arm.name for task in order([tuned], rows_of([first], code=3, digest="b0"), DIGESTS)} == {"t"}


def test_the_capped_arms_run_first_and_only_their_methods_and_caps_differ() -> None:
    arms = all_arms()
    tasks = order(arms, {}, dict.fromkeys((each.sources for each in arms), "x"))
    experiments = list(dict.fromkeys(task.arm.experiment.partition(",")[0] for task in tasks if task.rung == 0))
    assert experiments[:2] == [CAPPED, "NeuroFlux"]
    capped = [each for each in arms if each.experiment.startswith(CAPPED)]
    assert len({each.lrs for each in capped}) == 1
    for model, caps in (("resnet20", 4), ("vgg11", 3)):
        settings = [each.settings for each in capped if each.settings["model"] == model]
        assert ["memory" in each for each in settings].count(False) == 1
        assert len({each["memory"] for each in settings if "memory" in each}) == caps
        ours = [each for each in settings if each["strategy"] != "benchmarks.peer"]
        assert {(each["optimizer"], each["schedule"], each["profile_cache"]) for each in ours} == {
            ("sgd", "cosine", "off")
        }
    runs = [Task(each, rung, seed=0) for each in capped for rung in rungs_of(each)]
    assert {(task.rung > 0, task.settings.get("warmup_epochs")) for task in runs} == {(False, None), (True, 1)}


@pytest.mark.parametrize(
    ("images", "epochs", "rungs"),
    [(45_000, 100, [0, 1, 2]), (900, 5, [2]), (900, 19, [2]), (900, 20, [0, 2]), (2_000, 50, [0, 1, 2])],
)
def test_a_rung_is_left_out_where_the_next_is_hardly_longer(images: int, epochs: int, rungs: list[int]) -> None:
    assert rungs_of(arm(images=images, epochs=epochs)) == rungs


def test_short_rungs_limit_images_and_validation_and_the_last_limits_nothing() -> None:
    short, full = (Task(arm(), rung, 0).settings for rung in (0, 2))
    assert (short["max_train"], short["max_val"], short["epochs"]) == (2_000, 1_000, 10)
    assert "max_train" not in full and "max_val" not in full and full["epochs"] == 100
    assert "max_train" not in Task(arm(images=900), 0, 0).settings


def test_a_row_counts_until_its_sources_change_and_is_then_run_after_what_is_missing() -> None:
    tasks = order([arm()], {}, DIGESTS)
    rows = rows_of(tasks[:1], digest="b0") | rows_of(tasks[1:2])
    left = order([arm()], rows, DIGESTS)
    assert [(task.rung, task.seed, task.stale) for task in left[:2]] == [(0, 2, False), (1, 0, False)]
    assert [(task.rung, task.seed) for task in left if task.stale] == [(0, 0)] and left[-1].stale


@pytest.mark.parametrize(("code", "again"), [(0, False), (3, False), (7, False), (1, True), (6, True)])
def test_failures_are_run_again_on_request_alone(code: int, again: bool) -> None:
    rows = rows_of(order([arm()], {}, DIGESTS), code=code)
    assert order([arm()], rows, DIGESTS) == []
    assert bool(order([arm()], rows, DIGESTS, retry=True)) == again


def test_the_real_arms_differ_and_start_with_short_runs() -> None:
    arms = all_arms()
    tasks = order(arms, {}, dict.fromkeys((each.sources for each in arms), "x"))
    runnable = [task for task in tasks if not task.provisional]
    assert len({task.key for task in runnable}) == len(runnable)
    short = [task for task in tasks if task.rung == rungs_of(task.arm)[0]]
    assert tasks[: len(short)] == short and {task.arm for task in short} == set(arms)
    assert all(task.images * task.epochs <= 22_000 for task in short)


def test_the_command_line_takes_the_settings_of_all_arms() -> None:
    for each in all_arms():
        if not each.is_peer:
            check_foreign_options(Request.of(**each.implied | each.settings | each.longer))


class FakeRun:
    """Finishes every run at once, but for the ``stop_at``-th, at which the queue is stopped."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stopped, self.tasks, self.stop_at = False, [], stop_at

    def __call__(self, task: Task, digest: str) -> Row | None:
        self.tasks.append(task)
        self.stopped = len(self.tasks) == self.stop_at
        return None if self.stopped else done(task, digest, val=0.6 if task.lr == 0.03 else 0.5)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> program.Folders:
    monkeypatch.setattr(program, "all_arms", lambda: [arm("a"), arm("t", lrs=(0.01, 0.03, 0.1)), arm("w", images=900)])
    monkeypatch.setattr(program, "digest_of", lambda *sources: "b1")
    return program.Folders(runs=tmp_path / "runs", results=tmp_path / "results", page=tmp_path / "page.md")


def go(folders: program.Folders, run: FakeRun, **more: object) -> list[Task]:
    rows = Rows(folders.results)
    for _, row in program.work(folders, run, {}, **more):  # type: ignore[arg-type]
        rows.keep(row)
    return run.tasks


def test_a_queue_that_was_stopped_goes_on_with_the_run_that_it_left(folders: program.Folders) -> None:
    whole = order(program.all_arms(), {}, DIGESTS)
    first = go(folders, FakeRun(stop_at=4))
    second = go(folders, FakeRun())
    assert len(first) == 4 and second[0] == first[3]
    assert len(first) - 1 + len(second) == len(whole)
    assert go(folders, FakeRun()) == []


@pytest.mark.parametrize(("only", "names"), [("", "atw"), ("table", "atw"), ("table: t", "t"), ("t: a", "")])
def test_arms_are_chosen_by_how_their_lines_begin(folders: program.Folders, only: str, names: str) -> None:
    tasks = replace(folders, only=only).wanted(order(program.all_arms(), {}, DIGESTS))
    assert {task.arm.name for task in tasks} == set(names)


def test_arms_with_a_memory_cap_wait_on_a_gpu(folders: program.Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": "smallconv", "strategy": "backprop"}
    free, capped = (
        Arm("table", name, settings | more, 900, 5, 1) for name, more in (("f", {}), ("c", {"memory": "9MB"}))
    )
    monkeypatch.setattr(program, "all_arms", lambda: [free, capped])
    assert {task.arm.name for task in go(folders, FakeRun(), capped=False)} == {"f"}
    assert {task.arm.name for task in go(folders, FakeRun())} == {"c"}


def test_on_a_gpu_a_cap_that_is_a_gpus_holds_above_its_context(
    folders: program.Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": "smallconv", "strategy": "backprop", "memory": "9MB"}
    capped = Arm("table", "c", settings, 900, 5, 1, above_context=True)
    monkeypatch.setattr(program, "all_arms", lambda: [capped])
    assert {task.arm.name for task in go(folders, FakeRun(), capped=False)} == {"c"}
    words = Runner(Place(folders.runs, None, {}, device="cuda", context_mb=600))._command(
        Task(capped, 2, 0), folders.runs
    )
    assert words[words.index("--memory") + 1] == "609MB"


def test_several_runs_go_on_at_once_and_none_twice(folders: program.Folders) -> None:
    together, started = threading.Barrier(3, timeout=30), itertools.count()

    class Waiting(FakeRun):
        def __call__(self, task: Task, digest: str) -> Row | None:
            if next(started) < 3:
                together.wait()
            return super().__call__(task, digest)

    tasks = go(folders, Waiting(), jobs=3)
    assert len({task.key for task in tasks}) == len(tasks) == len(order(program.all_arms(), {}, DIGESTS))
    assert folders.running.read_text() == ""


def test_arms_without_their_weights_wait(folders: program.Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    needy = Arm("table", "n", {"model": "smallconv", "strategy": "backprop", "weights": "net"}, 900, 5, 1)
    monkeypatch.setattr(program, "all_arms", lambda: [needy])
    assert go(folders, FakeRun()) == []
    assert len(list(program.work(folders, FakeRun(), {"net": Path("net")}))) == 3


def test_a_failing_run_is_tried_once_in_a_start(folders: program.Folders) -> None:
    class Failing(FakeRun):
        def __call__(self, task: Task, digest: str) -> Row | None:
            self.tasks.append(task)
            return done(task, digest, code=1)

    tried = go(folders, Failing(), retry=True)
    assert len(tried) == len({task.key for task in tried})
    assert len(go(folders, Failing(), retry=True, limit=2)) == 2
    assert go(folders, Failing()) == []


def test_the_file_is_the_same_in_whatever_order_rows_come(tmp_path: Path) -> None:
    found = [done(task) for task in order([arm("a"), arm("b")], {}, DIGESTS)]
    for name, some in (("x", found), ("y", found[::-1] + found[:3])):
        rows = Rows(tmp_path / name)
        for row in some:
            rows.keep(row)
    paths = [next((tmp_path / name).glob("experiments_*.json")) for name in "xy"]
    assert paths[0].read_text() == paths[1].read_text()
    assert read_rows(tmp_path / "x") == {row["key"]: row for row in found}


def test_the_best_epoch_is_the_last_of_equals_and_lines_without_validation_do_not_count() -> None:
    values = ("", "0.5", "0.7", "", "0.7", "0.6")
    metrics = [{"phase": "p", "epoch": str(i), "val_accuracy": value} for i, value in enumerate(values)]
    assert best_epoch(metrics) == {"phase": "p", "epoch": 5, "val": 0.7}
    assert best_epoch(metrics[:1]) is None is best_epoch([])


def test_rows_name_no_folder_of_this_machine() -> None:
    row = done(Task(arm(), 0, 0), code=4)
    assert row["error"] == "no such file: x. Look there."
    assert row["test"] is None and row["seconds"] is None


SNUGFIT = """
import json, pathlib, signal, sys, time
words = sys.argv[1:]
resumed = "--resume" in words
folder = pathlib.Path(words[words.index("--resume" if resumed else "--out") + 1])
folder.mkdir(parents=True, exist_ok=resumed)
(folder / "request.json").write_text(json.dumps(words))
def stop(*_):
    print(json.dumps({"error": {"type": "InterruptedRunError", "message": "stopped"}}))
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
if resumed and (folder / "broken").exists():
    print(json.dumps({"error": {"type": "CheckpointError", "message": "broken"}}))
    sys.exit(4)
(folder / "ready").write_text("")
if "--seed" in words and words[words.index("--seed") + 1] == "9":
    time.sleep(60)
if "--seed" in words and words[words.index("--seed") + 1] == "8":
    print(json.dumps({"error": {"type": "BudgetExceededError", "message": "memory ran out"}}))
    sys.exit(5)
(folder / "metrics.csv").write_text("phase,seconds\\nnetwork,3.5\\n")
accuracy = {"val": 0.25 if resumed else 0.5, "test": 0.5}
print(json.dumps({"accuracy": accuracy, "measured": {"seconds": 4.0, "peak_bytes": 1}}))
"""


class TestRunner:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        (tmp_path / "fake_snugfit.py").write_text(SNUGFIT)
        words = (sys.executable, "-S", str(tmp_path / "fake_snugfit.py"))
        return Place(tmp_path / "runs", None, {"net": tmp_path / "net.pt"}, program=words)

    def interrupted(self, place: Place, task: Task) -> Path:
        """Stop a run as soon as it is there, and return its folder."""
        runner, folder = Runner(place), place.runs / task.key

        def stop() -> None:
            while not (folder / "ready").exists():
                time.sleep(0.01)
            runner.stop()

        waiting = threading.Thread(target=stop)
        waiting.start()
        assert runner(task, "b1") is None
        waiting.join()
        return folder

    def test_a_finished_run_leaves_a_row_and_no_files(self, place: Place) -> None:
        row = Runner(place)(Task(arm(), 0, 0), "b1")
        assert row is not None and (row["val"], row["training_seconds"], row["seconds"]) == (0.5, 3.5, 4.0)
        assert row["load"] >= 0
        assert list(place.runs.iterdir()) == []

    def test_the_folder_of_a_failed_run_is_kept(self, place: Place) -> None:
        task = Task(arm(), 0, 8)
        for _ in range(2):  # the folder of a second failure replaces that of the first
            row = Runner(place)(task, "b1")
            assert row is not None and row["exit_code"] == 5
            assert [path.name for path in place.runs.iterdir()] == [f"{task.key}.failed"]
            assert (place.runs / f"{task.key}.failed" / "request.json").is_file()

    def test_a_stopped_run_is_resumed(self, place: Place) -> None:
        folder = self.interrupted(place, Task(arm(), 0, 9))
        row = Runner(place)(Task(arm(), 0, 9), "b1")
        assert row is not None and row["val"] == 0.25 and not folder.exists()

    def test_a_run_begun_with_other_sources_starts_again(self, place: Place) -> None:
        folder = self.interrupted(place, Task(arm(), 0, 9))
        runner = Runner(place)
        threading.Timer(0.5, runner.stop).start()
        assert runner(Task(arm(), 0, 9), "b2") is None
        assert "--resume" not in json.loads((folder / "request.json").read_text())

    def test_a_checkpoint_that_cannot_be_read_starts_again(self, place: Place) -> None:
        task = Task(arm(), 0, 9)
        folder = self.interrupted(place, task)
        (folder / "broken").write_text("")
        runner = Runner(place)

        def stop_once_another_is_there() -> None:
            until = time.monotonic() + 60
            while ((folder / "broken").exists() or not (folder / "ready").exists()) and time.monotonic() < until:
                time.sleep(0.05)
            runner.stop()

        threading.Thread(target=stop_once_another_is_there).start()
        assert runner(task, "b1") is None
        assert not (folder / "broken").exists()

    def test_a_run_that_ended_unseen_is_only_read(self, place: Place) -> None:
        folder = self.interrupted(place, Task(arm(), 0, 9))
        record = {"accuracy": {"val": 0.75, "test": 0.5}, "measured": {"seconds": 1.0, "peak_bytes": 1}}
        (folder / "record.json").write_text(json.dumps(record))
        row = Runner(place)(Task(arm(), 0, 9), "b1")
        assert row is not None and row["val"] == 0.75

    def test_weights_are_named_in_the_row_and_given_as_a_file(self, place: Place) -> None:
        needy = Arm("table", "n", {"strategy": "backprop", "weights": "net"}, 900, 5, 1)
        folder = self.interrupted(place, Task(needy, 2, 9))
        words = json.loads((folder / "request.json").read_text())
        assert words[words.index("--weights") + 1] == str(place.weights["net"])
        assert Task(needy, 2, 9).settings["weights"] == "net"
        assert "--device" not in words
        assert Runner(replace(place, device="cuda"))._command(Task(needy, 2, 3), folder / "none")[-4:-2] == [
            "--device",
            "cuda",
        ]

    def test_a_peer_is_a_script_of_its_own(self, place: Place) -> None:
        peer = Arm("table", "p", {"model": "vgg11", "strategy": "benchmarks.peer"}, 900, 5, 1)
        words = Runner(place)._command(Task(peer, 2, 9), place.runs)
        assert words[1:] == ["-m", "benchmarks.peer", "--model", "vgg11", "--epochs", "5", "--seed", "9"]
        on_gpu = Runner(replace(place, device="cuda"))._command(Task(peer, 2, 9), place.runs)
        assert on_gpu == [*words, "--device", "cuda"]

    @pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="processes are not grouped by session")
    def test_a_session_of_its_own_keeps_the_niceness_of_the_queue(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "nice", lambda added: 7 + added)
        group = ["cat", "/proc/self/autogroup"]
        said = subprocess.check_output(group, text=True, start_new_session=True, preexec_fn=runner._prepare_child)
        assert said.endswith("nice 7\n")

    def test_a_killed_queue_takes_its_run_with_it(self, place: Place, tmp_path: Path) -> None:
        script = tmp_path / "parent.py"
        script.write_text(
            "import sys, pathlib\n"
            "from benchmarks.queue.arms import Arm\n"
            "from benchmarks.queue.rungs import Task\n"
            "from benchmarks.queue.runner import Place, Runner\n"
            f"place = Place(pathlib.Path({str(place.runs)!r}), None, {{}}, program={place.program!r})\n"
            "Runner(place)(Task(Arm('table', 'k', {'strategy': 'backprop'}, 900, 5, 1), 2, 9), 'b1')\n"
        )
        root = Path(program.ROOT)
        queue = subprocess.Popen([sys.executable, str(script)], env={"PYTHONPATH": f"{root}:{root / 'src'}"}, cwd=root)
        task = Task(Arm("table", "k", {"strategy": "backprop"}, 900, 5, 1), 2, 9)
        while not (place.runs / task.key / "ready").exists():
            assert queue.poll() is None
            time.sleep(0.05)
        queue.send_signal(signal.SIGKILL)
        queue.wait()
        for _ in range(200):
            if not _processes_with(str(tmp_path / "fake_snugfit.py")):
                break
            time.sleep(0.05)
        assert _processes_with(str(tmp_path / "fake_snugfit.py")) == []


def _processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        found += [path.parent.name] if word in words else []
    return found


def test_time_is_estimated_from_the_nearest_kin() -> None:
    task = Task(arm("a"), 1, 0)  # 250,000 images
    assert estimate.seconds(task, []) is None
    kin = done(Task(arm("b"), 0, 0), seconds=20.0)  # 20,000 images, so 1 ms each, and 2 s beside it
    assert estimate.seconds(task, [kin]) == pytest.approx(252.0)
    own = done(Task(arm("a"), 0, 0), seconds=40.0)
    assert estimate.seconds(task, [kin, own]) == pytest.approx(502.0)
    assert [estimate.duration(value) for value in (None, 40, 400, 7_500, 100_000)] == [
        "unknown", "40 s", "6 min", "2 h 5 min", "1 d 3 h",
    ]  # fmt: skip


def test_progress_counts_rungs_and_adds_up_what_is_left() -> None:
    tasks = order([arm()], {}, DIGESTS)
    rows = rows_of(tasks[:1], seconds=20.0) | rows_of(tasks[1:2], code=1)
    table = page.progress(order([arm()], rows, DIGESTS), rows, [tasks[2].key]).splitlines()
    assert table[2] == "| short | 2 | 1 | 0 | 1 | 1 | 22 s |"
    assert table[3] == "| medium | 0 | 0 | 0 | 0 | 3 | 12 min |"
    assert page.progress([], rows, []).splitlines()[2].endswith("| 0 | - |")
    other = Task(Arm("table", "r", {"model": "vgg16", "data": "mnist", "strategy": "backprop"}, 900, 50, 1), 0, 0)
    assert page.progress([other, tasks[2]], rows, []).splitlines()[2].endswith("| 2 | 22 s, 1 unknown |")


def test_the_page_gives_medians_with_their_spread_beside_the_paper() -> None:
    short = [Task(arm("a", paper=60.0), 0, seed) for seed in (0, 1, 2)]
    rows = {t.key: done(t, val=value) for t, value in zip(short, (0.50, 0.60, 0.52), strict=True)}
    text = page.page([arm("a", paper=60.0), arm("unrun")], rows)
    line = next(line for line in text.splitlines() if line.startswith("| a "))
    assert "| 2,000 | 10 | default | 3 | 52.0 % (50.0 - 60.0) | 52.0 % | 3 (60.0 %), 3 (70.0 %), 3 (62.0 %) |" in line
    assert line.endswith("| 60.0 % | -8.00 | 0.25 | 2000 | 5.0 | 12 s | abc |")
    assert "unrun" not in text and "## table" in text


def test_the_page_shows_the_rate_that_was_chosen_and_what_could_not_run() -> None:
    tuned = arm("t", lrs=(0.01, 0.1))
    rows = rows_of([Task(tuned, 0, 0, 0.01)], val=0.4) | rows_of([Task(tuned, 0, 0, 0.1)], val=0.6)
    rows |= rows_of([Task(arm("broken"), 0, 0)], code=3)
    text = page.page([tuned, arm("broken")], rows)
    assert "| t | 2,000 | 10 | 0.1 | 1 | 60.0 %" in text
    assert "exit 3: no such file: x. Look there." in text


def test_pause_ends_the_queue_and_says_when_there_is_none(folders: program.Folders) -> None:
    assert program.pause(folders=folders) == 1
    with queue_of(folders) as queue:
        assert program.pause(folders=folders) == 0
        assert queue.wait() == -signal.SIGTERM


def test_pause_after_the_queue_was_killed_signals_nobody(
    folders: program.Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that outlives its queue holds the lock; the queue's number may be another process's by then."""
    signalled: list[int] = []
    with queue_of(folders, run_seconds=0.5) as queue:
        assert program._busy(folders)
        queue.kill()
        queue.wait()
        assert program._busy(folders), "the run goes on"
        monkeypatch.setattr(os, "kill", lambda number, _: signalled.append(number))
        assert program.pause(folders=folders) == 0
        assert not signalled and not program._busy(folders)
    assert "the queue was killed; its run saves a checkpoint" in capsys.readouterr().err


QUEUE = """
import pathlib, subprocess, sys, time
from benchmarks.queue.__main__ import Folders, _locked
with _locked(Folders(runs=pathlib.Path(sys.argv[1]))) as lock:
    subprocess.Popen(["sleep", sys.argv[2]], pass_fds=(lock,))
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def queue_of(folders: program.Folders, run_seconds: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """A queue in a process of its own, with a run that ends by itself."""
    command = [sys.executable, "-c", QUEUE, str(folders.runs), str(run_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as queue:
        assert queue.stdout is not None and queue.stdout.readline() == b"held\n"
        try:
            yield queue
        finally:
            queue.kill()


def test_status_names_the_next_runs(folders: program.Folders, capsys: pytest.CaptureFixture[str]) -> None:
    go(folders, FakeRun(stop_at=3))
    program.status(folders=folders)
    shown = capsys.readouterr().out
    assert f"| {RUNGS[0]} | 2 |" in shown
    assert "no queue is running; next:" in shown and "table: w, " in shown


def test_the_committed_page_is_up_to_date() -> None:
    assert program.page(check=True) == 0
