"""The memory of a run's other processes: the one that waits, and children, each counted once."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from snugfit._core.machine_memory import private_bytes
from snugfit.memory import Baseline
from snugfit.memory import process as module
from snugfit.memory.meter import ProcessMeter
from snugfit.memory.process import OtherProcesses

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
MB = 10**6
HOLD = "block = bytearray(60_000_000); print('ready', flush=True); input()"
FORK = """
import os
from snugfit.memory.process import OtherProcesses
block = bytearray(60_000_000)
alone = OtherProcesses(None).read()
reading, writing = os.pipe()
ready, told = os.pipe()
if os.fork() == 0:
    more = bytearray(20_000_000)
    os.write(told, b"x")
    os.read(reading, 1)
    os._exit(0)
os.read(ready, 1)
found = OtherProcesses(None).read()
os.write(writing, b"x")
print(alone, found)
"""


@pytest.fixture
def child():
    """A child of this process with 60 MB."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.communicate("\n")


def test_the_process_that_waits_counts_until_it_ends():
    assert OtherProcesses(os.getpid()).read() >= private_bytes() - 5 * MB > 20 * MB
    assert private_bytes(2**22 + 1) == 0


def test_children_count_and_are_listed_at_intervals(child, monkeypatch):
    others = OtherProcesses(None)
    other_children = sum(private_bytes(each.pid) for each in psutil.Process().children(recursive=True)) - private_bytes(
        child
    )
    assert 60 * MB < others.read() < other_children + 60 * MB + 40 * MB
    monkeypatch.setattr(module, "_children", lambda process: pytest.fail("it was listed again"))
    assert others.read() > 60 * MB


@pytest.mark.parametrize("listed", [True, False])
def test_children_of_children_are_listed_as_psutil_lists_them(listed, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PROC", module.PROC if listed else tmp_path)
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as child:
        grandchild = int(child.stdout.readline())
        found = {int(process) for process in module._children("self")}
        assert found == {each.pid for each in psutil.Process().children(recursive=True)} >= {child.pid, grandchild}
        os.kill(grandchild, signal.SIGTERM)
        child.wait()


def test_the_meter_adds_them_to_its_own_peak(child):
    meter = ProcessMeter(Baseline(10 * MB, 0))
    block = bytearray(30 * MB)
    peak = meter.mark()
    del block
    meter.restart()
    meter.mark()
    assert meter.total_bytes >= peak + 10 * MB + 60 * MB


def test_what_a_forked_child_shares_counts_once():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    alone, found = map(int, done.stdout.split())
    assert alone == 0 and 20 * MB < found < 45 * MB, "the 60 MB of its parent are not its own"
