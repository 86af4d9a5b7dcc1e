"""Batches that are read while a device computes: nothing but the time changes."""

import pytest
import torch
from training_samples import PHASE, OneWeight, Source, make_run

from snugfit._training import feed
from snugfit._training.loop import train_phase
from snugfit._training.task import StepResult
from snugfit.errors import InterruptedRunError


class RandomSource(Source):
    """Its transform draws random numbers, as a user's may."""

    def __init__(self, log):
        super().__init__(11)
        self.log = log

    def batch(self, samples):
        self.log.append("read")
        inputs, labels = super().batch(samples)
        return inputs + torch.rand(len(inputs), 1), labels


class Value:
    """A number that a device has yet to compute."""

    def __init__(self, log):
        self.log = log

    def __float__(self):
        self.log.append("wait")
        return 1.0


class OnDevice(OneWeight):
    """A step returns before the device has computed it."""

    def __init__(self, log, micro_batches=1, stop_after=None):
        super().__init__(micro_batches)
        self.log, self.run, self.stop_after = log, None, stop_after

    def step(self, inputs, labels, share=1.0, update=True):
        self.log.append("step")
        super().step(inputs, labels, share, update)
        if len(self.calls) == self.stop_after:
            self.run.stop.request()
        return StepResult(Value(self.log), 1)


@pytest.fixture(params=[1, 2])
def parts(request):
    return request.param


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(feed, "has_own_memory", lambda device: True)


def train(trainable, folder, log):
    trainable.run = make_run(folder)
    if trainable.run.resume():
        trainable.load_state(trainable.run.resumed_tensors)
    train_phase(trainable, RandomSource(log), PHASE, trainable.run, lambda: None)
    return trainable.weight


def on_the_host(folder, parts):
    log = []
    return train(OnDevice(log, parts), folder, log), log


def test_the_next_batch_is_read_before_the_device_is_waited_for(tmp_path, device):
    log = []
    train(OnDevice(log), tmp_path, log)
    assert log[:7] == ["read", "step", "read", "wait", "step", "read", "wait"]
    assert log.count("read") == log.count("step") == log.count("wait") == 15


def test_on_the_processor_it_is_read_when_it_is_needed(tmp_path):
    _, log = on_the_host(tmp_path, 1)
    assert log[:6] == ["read", "step", "wait"] * 2


def test_random_transforms_draw_the_same_numbers(tmp_path, parts, monkeypatch):
    expected, _ = on_the_host(tmp_path / "host", parts)
    monkeypatch.setattr(feed, "has_own_memory", lambda device: True)
    assert torch.equal(train(OnDevice([], parts), tmp_path / "device", []), expected)


def test_a_resumed_run_draws_the_same_numbers(tmp_path, device, parts):
    expected = train(OnDevice([], parts), tmp_path / "whole", [])
    with pytest.raises(InterruptedRunError):
        train(OnDevice([], parts, stop_after=3 * parts), tmp_path / "run", [])
    assert torch.equal(train(OnDevice([], parts), tmp_path / "run", []), expected)
