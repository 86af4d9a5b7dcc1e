"""Console progress: what appears in a log and in a terminal, and the time left."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import fake_runs
import fake_selections
import pytest
from rich.console import Console

from snugfit._core.plan import Cost, Phase
from snugfit._core.record import KeptEpoch
from snugfit._report.console import PRIOR, REFRESH_SECONDS, ConsoleProgress, TimeLeft, against
from snugfit._report.tables import make_console
from snugfit._training.events import (
    CacheProgress,
    EpochDone,
    ExitMeasured,
    Notice,
    PhaseDone,
    PhaseStarted,
    ProbeMeasured,
    RunDone,
    RunStarted,
    StepDone,
    TensorsSelected,
)

COST = Cost(98_600_000, 10.0, 100.0, phases=(Phase("block 1/2 a", 90, 60.0, 32), Phase("block 2/2 b", 90, 40.0, 64)))
MB = 1_000_000


class Clock:
    """A clock that each reading moves on by ``step`` seconds."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def run_events(steps: int = 4):
    yield ProbeMeasured("unit:a", 1, 2)
    yield ProbeMeasured("unit:b", 2, 2)
    yield RunStarted("runs/1", "blockwise", "vgg16", "cifar10", 100 * MB, True, COST)
    for index, phase in enumerate(COST.phases):
        yield PhaseStarted(phase.name, index, 2, ("u",), phase.batch_size, 2, steps, 93 * MB)
        for epoch in range(2):
            for step in range(1, steps + 1):
                yield StepDone(phase.name, epoch, step, steps, 1.234, 0.5, 0.05, 0.5, 40 * MB, 87_100_000)
            yield EpochDone(phase.name, epoch, 2, 1.2, 0.5, 0.61 if epoch else None, 20.0)
        yield ExitMeasured(phase.name, f"features.{index}", index, 0.61, 12_340)
        yield CacheProgress(phase.name, 5, 10, 1000)
        yield PhaseDone(phase.name, 93 * MB, 87_100_000, 61.0, 13 * MB)
    yield Notice("[red]the cache[/red] :smile: would not fit")
    yield TensorsSelected(0, fake_selections.elastic(Path("runs/1")).intervals[0], 158)
    yield RunDone(fake_runs.blockwise(Path("runs/1")))


def shown(terminal: bool, clock_step: float = 0.01, **options) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=terminal, width=110, highlight=False, markup=False, emoji=False,
        _environ={"TERM": "xterm-256color"},
    )  # fmt: skip
    with ConsoleProgress(console, clock=Clock(clock_step), **options) as progress:
        for event in run_events():
            progress(event)
    return stream.getvalue()


def test_log_has_a_line_per_epoch_phase_and_exit():
    text = shown(terminal=False)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "measuring 2 parts of the network"
    assert lines[1].startswith("vgg16 on cifar10  blockwise  budget 100.0 MB (enforced)  predicted 98.6 MB, 1m40s")
    assert sum("  epoch " in line for line in lines) == 4
    assert sum("val 61.0 %" in line for line in lines if "  epoch " in line) == 2
    assert "exit 2 after features.1  val 61.0 %  12.3k parameters" in lines
    assert "done  block 1/2 a  peak 87.1/100.0 MB (predicted 80.0 to 93.0 MB)  1m01s (predicted 1m00s)" in lines
    assert not any("  step " in line for line in lines), "steps are for the live bar"


def test_final_table_puts_predicted_measured_and_budget_side_by_side():
    lines = shown(terminal=False).splitlines()
    assert ["peak", "memory", "98.6", "MB", "92.7", "MB", "100.0", "MB"] in [line.split() for line in lines]
    assert any("567k of 14.7M (26.0 times smaller)" in line for line in lines)
    assert any("after features.14, unit 5 of 13" in line for line in lines)
    assert any("runs/1" in line for line in lines)


@pytest.mark.parametrize(
    ("kept", "keep", "words"),
    [
        (KeptEpoch(2, 0.61), "best", "those of epoch 3 of 8, best on validation images; the accuracy is theirs"),
        (KeptEpoch(7, 0.61), "last", "those of epoch 8 of 8, the last; the accuracy is theirs"),
        (KeptEpoch(7), "best", "those of epoch 8 of 8, the last; the accuracy is theirs"),
    ],
)
def test_the_end_says_which_weights_are_kept(kept, keep, words):
    lines = selecting(kept=kept, workload={"epochs": 8, "keep": keep})
    assert [line.split("  ", 1)[1].strip() for line in lines if line.startswith("kept weights")] == [words]
    assert not [line for line in selecting() if line.startswith("kept weights")]


def test_outside_text_is_shown_as_it_is():
    assert "[red]the cache[/red] :smile: would not fit" in shown(terminal=False)


def selecting(**changes) -> list[str]:
    record = fake_selections.elastic(Path("runs/2"))
    record = dataclasses.replace(record, **changes)
    stream = io.StringIO()
    with ConsoleProgress(make_console(stream)) as progress:
        for index, interval in enumerate(record.intervals):
            progress(TensorsSelected(index, interval, len(record.tensors)))
        progress(RunDone(record))
    return stream.getvalue().splitlines()


def test_a_selection_says_how_many_tensors_train_and_what_a_step_should_take():
    interval = dataclasses.replace(fake_selections.elastic(Path("r")).intervals[0], predicted_seconds=0.31)
    chosen = dataclasses.replace(interval, tensors=interval.tensors[-7:])
    unmeasured = dataclasses.replace(chosen, full_seconds=0.0, profiled=True)
    first, second = selecting(intervals=(chosen, unmeasured))[:2]
    assert first == "interval 1  7 of 158 tensors, step predicted 310ms = 0.50 of full (622ms)"
    assert second == "interval 2  7 of 158 tensors, step predicted 310ms, operators measured again"


def step_row(lines: list[str]) -> str:
    return next((" ".join(line.split()) for line in lines if line.startswith("step time")), "none")


def test_final_table_tells_the_step_time_of_runs_that_select():
    times = dict(predicted_seconds=0.311, measured_seconds=0.280, full_seconds=0.622, epochs=1)
    first = dataclasses.replace(fake_selections.elastic(Path("r")).intervals[0], **times)
    second = dataclasses.replace(first, epochs=3, measured_seconds=0.320)
    assert step_row(selecting(intervals=(first, second))) == "step time 311ms = 0.50 310ms = 0.50 0.50 of 622ms"
    assert step_row(selecting(intervals=(second,), budget={})) == "step time 311ms = 0.50 320ms = 0.51 \N{EN DASH}"
    untimed = dataclasses.replace(first, measured_seconds=0.0)
    row = step_row(selecting(intervals=(first, untimed)))
    assert row == "step time 311ms = 0.50 \N{EN DASH} 0.50 of 622ms"
    assert step_row(selecting(intervals=())) == step_row(shown(terminal=False).splitlines()) == "none"


def test_terminal_shows_the_step_and_the_memory():
    text = shown(terminal=True, clock_step=1.0)
    assert "epoch 2/2  step 4/4" in text
    assert "87.1/100.0 MB" in text
    assert "measuring" in text
    assert "\x1b[?25l" not in text.rsplit("\x1b[?25h", 1)[-1], "the cursor must be visible at the end"


def test_refreshes_are_throttled():
    fast, slow = shown(terminal=True, clock_step=REFRESH_SECONDS / 100), shown(terminal=True, clock_step=1.0)
    assert slow.count("lr 0.05") >= 16
    assert fast.count("lr 0.05") <= 2


def test_quiet_shows_notices_alone():
    assert shown(terminal=True, quiet=True).count("\n") == 1
    assert "would not fit" in shown(terminal=False, quiet=True)


def test_an_exception_takes_the_bar_away():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with pytest.raises(RuntimeError), ConsoleProgress(console) as progress:
        for event in list(run_events())[:5]:
            progress(event)
        assert progress._live is not None
        raise RuntimeError
    assert progress._live is None
    progress.close()


def test_resumed_run_in_the_middle_of_a_phase_does_not_fail():
    stream = io.StringIO()
    progress = ConsoleProgress(Console(file=stream, force_terminal=True, width=80), clock=Clock(1.0))
    progress(StepDone("b", 1, 3, 4, float("nan"), 0.5, 0.05, 0.0, 1, 1))
    progress(RunStarted("runs/1", "backprop", "vgg16", "digits", None, False, COST, resumed=True))
    progress(PhaseStarted("block 2/2 b", 1, 2, ("u",), 8, 2, 4, 93 * MB))
    progress(StepDone("block 2/2 b", 1, 3, 4, float("nan"), 0.5, 0.05, 0.0, 1, 1))
    progress.close()
    assert "resuming \x1b[1mvgg16 on digits" in stream.getvalue()
    assert "no memory budget" in stream.getvalue()


def test_against_colours_by_how_full_the_budget_is():
    assert [str(against(used, 100 * MB).style) for used in (80 * MB, 99 * MB, 101 * MB)] == ["green", "yellow", "red"]
    assert against(999_000, 100 * MB).plain == "999.0 kB/100.0 MB"
    assert against(5 * MB, None).plain == "5.0 MB"


def test_console_writes_to_stderr(capsys):
    ConsoleProgress()(Notice("hello"))
    captured = capsys.readouterr()
    assert "hello" in captured.err
    assert captured.out == ""
    assert make_console(io.StringIO()).width == 120


def test_nothing_is_imported_once_training_runs():
    """Modules that load during training would count against the memory budget."""
    here = Path(__file__).parent
    code = (
        "import io, sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_report_console import run_events, ConsoleProgress, Console\n"
        "events = list(run_events())\n"
        "plain = dict(highlight=False, markup=False, emoji=False)\n"
        "progress = ConsoleProgress(Console(file=io.StringIO(), force_terminal=True, width=100, **plain))\n"
        "before = set(sys.modules)\n"
        "for event in events: progress(event)\n"
        "progress.close()\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n"
    )
    subprocess.run([sys.executable, "-c", code, str(here), str(Path(fake_runs.__file__).parent)], check=True)


PHASES = (Phase("a", 1, 100.0, 8), Phase("b", 1, 300.0, 8), Phase("test", 1, 50.0, 8))
PHASES_COST = Cost(1, 40.0, 450.0, phases=PHASES)


def test_starts_with_the_prediction():
    left = TimeLeft(PHASES_COST, started=10.0)
    assert left.seconds(10.0) == 450.0
    left.start_phase("a", 0, 3)
    assert left.seconds(10.0) == 450.0


def test_on_time_run_counts_down():
    left = TimeLeft(PHASES_COST, 0.0)
    left.start_phase("a", 0, 3)
    left.progress(0.5)
    assert left.seconds(50.0) == pytest.approx(400.0)
    left.end_phase()
    assert left.seconds(100.0) == pytest.approx(350.0)
    left.start_phase("b", 1, 3)
    left.progress(1.0)
    assert left.seconds(400.0) == pytest.approx(50.0)


def test_slow_run_scales_what_remains():
    left = TimeLeft(PHASES_COST, 0.0)
    left.start_phase("a", 0, 3)
    left.end_phase()
    prior = PRIOR * 450
    assert left.seconds(200.0) == pytest.approx((200 + prior) / (100 + prior) * 350)
    assert 600 < left.seconds(200.0) < 700


def test_resumed_run_counts_only_what_it_did_itself():
    left = TimeLeft(PHASES_COST, 0.0)
    left.start_phase("b", 1, 3)
    left.progress(0.5, first=True)
    assert left.seconds(0.0) == pytest.approx(200.0)
    left.progress(0.75)
    assert left.seconds(75.0) == pytest.approx(125.0)
    left.end_phase()
    assert left.seconds(150.0) == pytest.approx(50.0)


def test_without_phases_all_are_taken_as_equal():
    left = TimeLeft(Cost(1, 10.0, 90.0), 0.0)
    left.start_phase("x", 1, 3)
    left.progress(0.5)
    assert left.seconds(15.0) == pytest.approx(45.0)


def test_nothing_predicted_is_no_division_by_zero():
    assert TimeLeft(Cost(1, 0.0, 0.0), 0.0).seconds(5.0) == 0.0
