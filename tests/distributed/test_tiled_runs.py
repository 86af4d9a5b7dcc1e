"""Whole runs over several processes: the same weights as one process ends with, also after some were lost."""

import json
import signal
import time

import psutil
import pytest
import torch
from command_line import NETWORKS, start
from safetensors.torch import load_file

import snugfit

TRAIN = (
    "train", "--model", "tiny_nets:cnn", "--data", "digits", "--image-size", "16", "--max-train", "96", "--max-val",
    "40", "--batch-size", "32", "--seed", "3", "--threads", "1", "--no-report",
)  # fmt: skip
LAUNCH = ("cluster", "launch", "--timeout", "5s")
TILED = ("--strategy", "tiled")
STEADY = ("--epochs", "3", "--lr", "0.002")
"""At this rate rounding decides about no image of the validation, and the last epoch is the best."""


def ended(process, code=0):
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return err


def trained(folder, *arguments):
    ended(start(*arguments, cwd=folder))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Three epochs of plain backpropagation, in this process."""
    folder = tmp_path_factory.mktemp("alone")
    options = {"image_size": 16, "max_train": 96, "max_val": 40, "batch_size": 32, "seed": 3, "threads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(NETWORKS)
        snugfit.plan("tiny_nets:cnn", "digits", strategy="backprop", epochs=3, lr=0.002, **options).run((), out=folder)
    return load_file(folder / "model.safetensors")


def assert_near(found, wanted, weights=2e-5):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # statistics are sums over all weights of a channel, of which each may be off
        tolerance = 5 * weights if "running_" in name else weights
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--recompute", "on", "--tiles", "2x2"), marks=pytest.mark.slow),
        ("--rest", "replicated"),
    ],
)
def test_all_processes_evaluate_the_kept_weights(tmp_path, monkeypatch, options):
    """At this rate the seventh of eight epochs is the best: one process measures what all of them did."""
    launch = (*LAUNCH, "--processes", "2", "--max-restarts", "0", "--")
    unsteady = ("--epochs", "8", "--lr", "0.3", "--schedule", "constant")
    trained(tmp_path, *launch, *TRAIN, *TILED, *unsteady, "--out", "run", *options)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["strategy"] == "tiled" and record["settings"]["processes"] == 2
    assert record["measured"]["peak_bytes"] <= record["predicted"]["peak_bytes"]
    peaks = record["measured"]["process_peak_bytes"]
    assert len(peaks) == 2 and max(peaks) <= record["predicted"]["peak_bytes"]
    assert record["kept"]["epoch"] < 7 and record["kept"]["val_accuracy"] == record["accuracy"]["val"]
    monkeypatch.syspath_prepend(NETWORKS)
    assert snugfit.evaluate(tmp_path / "run")["accuracy"] == record["accuracy"]["test"]


def lose(launch, rank, number, run, epoch):
    """Send a signal to the process of a rank once an epoch is over; what remains of the launch goes on."""
    deadline = time.monotonic() + 200
    while not (run / "metrics.csv").exists() or f",{epoch}," not in (run / "metrics.csv").read_text():
        assert launch.poll() is None and time.monotonic() < deadline, launch.communicate()
        time.sleep(0.05)
    for child in psutil.Process(launch.pid).children(recursive=True):
        if "snugfit._cli.worker" in " ".join(child.cmdline()) and child.environ().get("RANK") == str(rank):
            child.send_signal(number)
            return
    raise AssertionError("there is no such process")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rank", "number", "options"),
    [
        (0, signal.SIGKILL, ("--replicas", "2")),
        pytest.param(1, signal.SIGSTOP, ("--rest", "gateway"), marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, ("--rest", "replicated"), marks=pytest.mark.slow),
    ],
)
def test_a_launch_that_loses_a_process_starts_again_and_goes_on(tmp_path, alone, rank, number, options):
    """From the last checkpoint, with the weights in the end of a run that lost nobody."""
    launch = (*LAUNCH, "--processes", "2", "--max-restarts", "2", "--")
    process = start(*launch, *TRAIN, *TILED, *options, *STEADY, "--out", "run", cwd=tmp_path)
    lose(process, rank, number, tmp_path / "run", 0)
    assert "restart 1 of 2" in ended(process)
    assert_near(load_file(tmp_path / "run" / "model.safetensors"), alone)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("left", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_lost_a_process_for_good_goes_on_with_those_that_are_left(tmp_path, alone, left):
    """The lost one is named; whoever takes the run up cuts it anew for as many as there are, or one."""
    launch = (*LAUNCH, "--processes", str(left + 1), "--max-restarts", "0", "--")
    options = ("--weight-update", "gateway", "--recompute", "on", "--tiles", "2x2")
    groups = ("--forward-groups", "every", "--backward-groups", "one")
    process = start(*launch, *TRAIN, *TILED, *options, *groups, *STEADY, "--out", "run", cwd=tmp_path)
    lose(process, left, signal.SIGKILL, tmp_path / "run", 0)
    told = ended(process, 8)
    assert f"rank {left}: the train process was killed by SIGKILL" in told
    resumed = ("--processes", str(left), "--max-restarts", "0", "--", "train", "--resume", "run")
    again = start(*LAUNCH, *resumed, cwd=tmp_path)
    assert f"{left + 1} processes are {left} now: 2x2 tiles become " in ended(again)
    assert_near(load_file(tmp_path / "run" / "model.safetensors"), alone)
