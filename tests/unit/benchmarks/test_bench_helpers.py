"""Helpers of the benchmark scripts: flags, parsing, result files, search for the tightest budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from bench_cells import finished, infeasible
from benchmarks import accuracy, common, peer, speed, store
from torch import nn

from snugfit._core.workload import OptimizerSettings
from snugfit._training.optimizers import lr_factor
from snugfit.memory import Baseline


def test_flags_say_what_settings_say() -> None:
    settings = {"max_train": 64, "saturation_stop": True, "adaptive_batch": False, "device": None}
    assert common.to_flags(settings) == ["--max-train", "64", "--saturation-stop", "--no-adaptive-batch"]


def test_the_named_budget_is_read_in_bytes() -> None:
    assert common.smallest_named(infeasible("backprop", smallest="167.0 MB")) == 167_000_000
    assert common.smallest_named(infeasible("backprop", smallest="1.2 GB")) == 1_200_000_000
    assert common.smallest_named(finished("backprop", 1.0)) is None


def test_repetitions_alternate() -> None:
    assert list(common.alternate("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_command_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('{}', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    cell = common.run(["slow"], common.Options(timeout=2.0))
    assert cell["exit_code"] is None
    assert cell["seconds"] < 30


def test_a_command_tells_its_code_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quick.py").write_text("import json, os, sys\nprint(json.dumps(dict(os.environ)))\nsys.exit(3)\n")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    cell = common.run(["quick"], common.Options(data_dir="somewhere"))
    assert cell["exit_code"] == 3
    assert cell["output"]["SNUGFIT_DATA"] == "somewhere"


def test_a_record_loses_its_folder_and_keeps_its_lines() -> None:
    line = {"fixed_bytes": 1, "sample_bytes": 2, "residual_bytes": 0, "sample_seconds": 0.1, "points": []}
    slim = common.slim({"run_dir": "/x", "profile": {"lines": {"unit:a": line}}, "measured": {}})
    assert set(slim) == {"measured", "lines"}
    assert "points" not in slim["lines"]["unit:a"]


class TestResultFile:
    @pytest.fixture
    def options(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> common.Options:
        monkeypatch.setattr(sys, "argv", ["x", "--epochs", "2", "--data-dir", "/private", "--work=/private", "--again"])
        return common.Options(results=tmp_path / "new" / "budgets.json")

    def test_what_is_there_is_not_run_again(self, options: common.Options) -> None:
        calls = []
        for _ in range(2):
            results = store.ResultFile("budgets", options)
            cell = results.once("snugfit train", lambda: calls.append(1) or {"exit_code": 0, "seconds": 1.0}, arm="a")
        assert calls == [1]
        assert (cell["arm"], cell["exit_code"]) == ("a", 0)
        assert len(results.cells) == 1

    @pytest.mark.parametrize(("code", "runs"), [(0, 1), (3, 1), (5, 1), (1, 2)])
    def test_failures_are_tried_again(self, options: common.Options, code: int, runs: int) -> None:
        calls = []
        results = store.ResultFile("budgets", options)
        for _ in range(2):
            results.once("x", lambda: calls.append(1) or {"exit_code": code, "seconds": 1.0})
        assert (len(calls), len(results.cells)) == (runs, 1)

    def test_a_time_out_is_tried_again_with_more_time_only(self, options: common.Options) -> None:
        calls = []
        for timeout, expected in ((10.0, 1), (10.0, 1), (20.0, 2)):
            longer = common.Options(results=options.results, timeout=timeout)
            results = store.ResultFile("budgets", longer)
            results.once("x", lambda: calls.append(1) or {"exit_code": None, "seconds": 10.5})
            assert len(calls) == expected

    def test_a_run_is_known_by_its_command(self, options: common.Options, monkeypatch: pytest.MonkeyPatch) -> None:
        runs: list[common.Settings] = []
        monkeypatch.setattr(store, "train", lambda settings, *_: runs.append(settings) or {"exit_code": 0})
        results = store.ResultFile("budgets", options)
        first, same = (results.train({"model": "vgg8", "seed": 1}, arm="x") for _ in range(2))
        assert first == same and len(runs) == 1
        assert first["command"] == "snugfit train --model vgg8 --seed 1"
        assert (first["arm"], first["settings"]) == ("x", {"model": "vgg8", "seed": 1})

    def test_again_runs_everything_once_more(self, options: common.Options) -> None:
        calls = []
        store.ResultFile("budgets", options).once("x", lambda: {"exit_code": 0, "seconds": 1.0})
        results = store.ResultFile("budgets", common.Options(results=options.results, again=True))
        for _ in range(2):
            results.once("x", lambda: calls.append(1) or {"exit_code": 0, "seconds": 1.0})
        assert calls == [1]

    def test_a_defect_is_tried_again_at_another_commit_only(
        self, options: common.Options, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls, found = [], iter((["lost"], ["lost"], [], []))
        for commit, runs in (("a", 1), ("a", 1), ("b", 2), ("c", 3), ("d", 3)):
            monkeypatch.setattr(store, "commit", lambda commit=commit: commit)
            results = store.ResultFile("soak", options, failed=lambda cell: bool(cell["failures"]))
            results.once("x", lambda: calls.append(1) or {"failures": next(found)})
            assert len(calls) == runs, commit
        assert [(cell["commit"], cell["failures"]) for cell in results.cells] == [("c", [])]

    def test_what_is_put_replaces_what_was_there(self, options: common.Options) -> None:
        results = store.ResultFile("mutants", options)
        for count in (1, 2):
            results.put("tiling: a.py", {"commit": "e52e8d7", "noticed": count})
        assert [(cell["commit"], cell["noticed"]) for cell in results.cells] == [("e52e8d7", 2)]

    def test_the_file_names_machine_and_command_but_no_folders(self, options: common.Options) -> None:
        store.ResultFile("budgets", options).once("x", lambda: {"exit_code": 0, "seconds": 1.0})
        text = options.results.read_text()
        data = json.loads(text)
        assert data["commands"] == ["python -m benchmarks.budgets --epochs 2"]
        assert data["machine"]["torch"] == torch.__version__
        assert "private" not in text

    def test_the_command_can_be_copied_where_words_have_spaces(
        self, options: common.Options, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.argv", ["x", "--schemes", "by weight"])
        store.ResultFile("budgets", options).once("x", lambda: {"exit_code": 0, "seconds": 1.0})
        assert json.loads(options.results.read_text())["commands"] == [
            "python -m benchmarks.budgets --schemes 'by weight'"
        ]


@pytest.mark.parametrize("resolution", [1, 4, 7])
@pytest.mark.parametrize("start", [90, 118, 140])
def test_the_tightest_budget_is_found(resolution: int, start: int) -> None:
    found = speed.smallest_accepted(lambda mb: mb >= 118, lambda mb: mb >= 118, start, resolution, limit=40)
    assert 118 <= found < 118 + resolution


def test_the_tightest_budget_also_trains() -> None:
    assert speed.smallest_accepted(lambda mb: mb >= 100, lambda mb: mb >= 110, 120, 1) == 110
    assert speed.smallest_accepted(lambda mb: True, lambda mb: False, 120, 1) is None


def test_the_peer_halves_what_is_refused() -> None:
    tried = []

    def attempt(micro: int) -> dict[str, int]:
        tried.append(micro)
        if micro > 32:
            raise MemoryError
        return {"micro": micro}

    assert peer.largest_that_fits(attempt, 128) == {"micro": 32}
    assert tried == [128, 64, 32]


def test_the_peer_gives_up_at_single_images() -> None:
    def attempt(micro: int) -> dict[str, int]:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    assert peer.largest_that_fits(attempt, 4) is None


@pytest.mark.parametrize("warm_up", [0.0, 0.25, 1.0, 2.0])
def test_the_peers_learning_rate_is_that_of_runs(warm_up: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = peer.schedule_of(optimizer, 4, 5, warm_up)
    settings = OptimizerSettings(lr=0.3, warmup_epochs=warm_up)
    for step in range(20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * lr_factor(settings, step, 4, 5))
        optimizer.step()
        schedule.step()


def test_the_peer_tests_the_last_of_its_best_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracies stand in for the true ones; each is noted with the sum of the weights that were measured."""
    measured, values = list[float](), [0.2, 0.6, 0.6, 0.4, 0.9]

    def accuracy_of(network: nn.Module, *others: object) -> float:
        measured.append(sum(float(tensor.double().sum()) for tensor in network.state_dict().values()))
        return values[len(measured) - 1]

    monkeypatch.setattr(peer, "accuracy", accuracy_of)
    monkeypatch.setattr(peer, "prepare_process", lambda threads: Baseline(0, 0))
    said = []
    monkeypatch.setattr("builtins.print", said.append)
    flags = {"model": "smallconv", "data": "digits", "max_train": 64, "max_val": 20, "epochs": 4, "batch_size": 16}
    assert peer.main(**flags, warmup_epochs=1.0) == 0
    found = json.loads(said[0])
    assert found["kept"] == {"epoch": 2, "val_accuracy": 0.6}
    assert found["accuracy"] == {"val": 0.6, "test": 0.9}
    assert len(set(measured[:4])) == 4 and measured[4] == measured[2]


def test_the_peer_hides_no_other_error() -> None:
    def attempt(micro: int) -> dict[str, int]:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        peer.largest_that_fits(attempt, 4)


def test_a_larger_network_has_a_lower_throughput() -> None:
    small, large = nn.Conv2d(3, 4, 1), nn.Sequential(*[nn.Conv2d(3, 3, 7, padding=3) for _ in range(20)])
    found = accuracy.throughput({"small": small, "large": large}, (3, 16, 16), batch=4, rounds=5)
    assert found["small"] > found["large"] > 0
