"""What tests in all folders share."""

import os
import signal
import uuid
from dataclasses import replace

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only wait for each other; read by torch's import

os.environ.pop("COLUMNS", None)  # lines of captured output stay whole
os.unsetenv("COLUMNS")  # the readline library sets it for child processes alone

import torch

from snugfit.profiling import TensorProbe, operator, tensors
from snugfit.strategies.elastic import drift

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs begin; processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One change, one verdict: the same examples every time. `--hypothesis-profile=default` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


@pytest.fixture(autouse=True, scope="module")
def nothing_measured_before_by_other_files(tmp_path_factory):
    """What a file's own fixtures measure is kept from all others, and from the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"))
        yield


@pytest.fixture(autouse=True)
def nothing_measured_before(monkeypatch, tmp_path_factory):
    """What a test measures is kept from all others; and small numbers count again, which hypothesis draws."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"))
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def measured_once(monkeypatch, tmp_path_factory, request):
    """What is measured for one test of a file serves its others: planning takes longer than their runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{request.module.__name__}"))


@pytest.fixture(autouse=True)
def nothing_waits_for_the_disk(monkeypatch):
    """No test takes away the power, after which alone it would matter."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


PER_MAC, PER_BYTE, PER_PARAMETER = 1e-9, 1e-9, 1e-9


def steady(found):
    """A tensor profile whose seconds follow from multiply-accumulates, bytes and parameters."""

    def timed(facts):
        seconds = found.batch * (facts.macs * PER_MAC + facts.output_bytes * PER_BYTE)
        parts = [
            replace(
                part,
                seconds=found.batch * (part.macs * PER_MAC + facts.output_bytes * PER_BYTE / 10),
                update_seconds=part.parameters * PER_PARAMETER,
            )
            for part in facts.tensors
        ]
        return replace(facts, forward_seconds=seconds, pass_seconds=seconds, tensors=tuple(parts))

    return replace(found, operators=tuple(map(timed, found.operators)), seconds=0.0)


@pytest.fixture
def steady_times(monkeypatch):
    """Networks are profiled as they are, but for the times: those of tiny operators are mostly noise. No drift."""
    use_steady_times(monkeypatch)


def use_steady_times(monkeypatch):
    """What the fixture does; for a process of its own."""
    measure = TensorProbe.measure_operators

    def measured(probe, limit):
        found = measure(probe, limit)
        return None if found is None else steady(found)

    for module in (operator, tensors):
        monkeypatch.setattr(module, "enough", bool)
    monkeypatch.setattr(drift, "MIN_STEP_SECONDS", float("inf"))
    monkeypatch.setattr(TensorProbe, "measure_operators", measured)
    monkeypatch.setattr(TensorProbe, "measure", measured)
