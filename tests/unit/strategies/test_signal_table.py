"""The table of ``profile --learning-signal``: its rows, their peaks, and where it stands in a profile."""

from functools import partial

import pytest
import torch
from torch import nn

import snugfit
from snugfit._chain import Chain
from snugfit._core.hardware import Hardware
from snugfit._core.option_groups import DataOptions, MachineOptions, ModelOptions, TrainingOptions
from snugfit._core.request import Request
from snugfit._core.workload import Workload
from snugfit._training.network import NetworkTrainer
from snugfit.local import LOCAL_LOSSES, LLSMxM, learning_signal
from snugfit.local.assignment import Layout
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.blockwise.probes import signal_table
from snugfit.strategies.blockwise.worker import BlockTrainer, LocalUnit

HARDWARE = Hardware("cpu", "a processor", 1, 10**9, "Linux", "2.13", True)
BATCH = 64


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def workload(batch=BATCH):
    return Workload("net", "data", (1, 8, 8), 10, 100, 10, 10, batch_size=batch)


def table(batch=BATCH, local_losses=None):
    chain = Chain.from_module(network().to("meta"), (1, 8, 8))
    return signal_table(chain, workload(batch), HARDWARE, local_losses)


@pytest.fixture
def few_losses(monkeypatch):
    """Two losses are enough where every registered one has a row."""
    for name in set(LOCAL_LOSSES) - {"aan", "lls-mxm"}:
        monkeypatch.delitem(LOCAL_LOSSES, name)


def test_a_row_for_backpropagation_and_each_registered_loss(few_losses, monkeypatch):
    monkeypatch.setitem(LOCAL_LOSSES, "another", LLSMxM)
    rows = table()
    chain = Chain.from_module(network().to("meta"), (1, 8, 8))
    assert list(rows) == ["backprop", *LOCAL_LOSSES]
    for method, signal in learning_signal(chain, 10).items():
        assert set(rows[method]) == {"macs", "additional_parameters", "peak_bytes"}
        assert (rows[method]["macs"], rows[method]["additional_parameters"]) == tuple(signal)


def two_steps(trainer, batch):
    return tensor_peak_bytes(lambda: trainer.step(*batch()), trainer.modules, repeats=2)


def test_peaks_are_those_of_real_steps():
    """Of the whole network, and of the hungriest unit with nothing but that unit in memory."""

    def batch(*shape):
        return torch.randn(BATCH, *shape), torch.zeros(BATCH, dtype=torch.int64)

    whole = network()
    trainer = NetworkTrainer(whole, whole.forward, workload())
    peaks = {"backprop": two_steps(trainer, lambda: batch(1, 8, 8)), "lls": 0}
    layout = Layout.of(Chain.from_module(network(), (1, 8, 8)), "lls", 10)
    for index, unit in enumerate(layout.chain.units):
        local = LocalUnit(unit.module, layout.make_loss(index).to_empty(device="cpu"), workload())
        peak = two_steps(BlockTrainer([local]), partial(batch, *unit.input_shape))
        peaks["lls"] = max(peaks["lls"], peak)
    rows = table(local_losses=["lls"])
    assert list(rows) == list(peaks)
    for method, peak in peaks.items():
        assert rows[method]["peak_bytes"] == pytest.approx(peak, rel=0.02)


def test_peaks_grow_with_the_batch_and_one_image_is_counted_as_two_where_it_must_be():
    one, two, more = (table(batch, ["lls"]) for batch in (1, 2, 16))
    assert one["backprop"] == two["backprop"]
    for method in one:
        assert one[method]["peak_bytes"] <= two[method]["peak_bytes"] < more[method]["peak_bytes"]
        assert one[method]["macs"] == more[method]["macs"]


def test_a_profile_has_the_table_when_asked(few_losses):
    request = Request(
        ModelOptions("smallconv", image_size=8),
        DataOptions("digits", max_train=32, max_val=8),
        training=TrainingOptions(batch_size=4),
        machine=MachineOptions(threads=1),
    )
    data = snugfit.profile_request(request, learning_signal=True)
    assert set(data) == {"model", "input_shape", "units", "learning_signal", "batch_size"} and data["batch_size"] == 4
    assert list(data["learning_signal"]) == ["backprop", *LOCAL_LOSSES]
    assert data["learning_signal"]["backprop"]["macs"] == sum(unit["macs"] for unit in data["units"][1:])
