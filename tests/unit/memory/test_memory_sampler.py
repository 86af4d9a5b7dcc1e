"""The thread that samples memory, where none can be allocated."""

import subprocess
import sys

import pytest

WITHOUT_MEMORY = """
import resource
from snugfit.memory.meter import MemorySampler
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (1, hard))
samplers = [MemorySampler() for _ in range(40)]
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
print(all(sampler.take().anon >= 0 for sampler in samplers))
"""


def test_a_limit_that_leaves_nothing_for_the_sampler_neither_fails_nor_hangs():
    found = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, check=False)
    assert found.stdout == "True\n", found.stderr


WHERE_ALLOCATIONS_FAIL = """
import time
from _testcapi import remove_mem_hooks, set_nomemory
from snugfit.memory.meter import MemorySampler
sampler = MemorySampler()
time.sleep(0.1)
set_nomemory(0)
time.sleep(0.1)
remove_mem_hooks()
before = sampler.take().anon
time.sleep(0.1)
print(before > 0, sampler.take().anon > 0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_sampling_goes_on_after_allocations_failed():
    """Every allocation of Python fails for 0.1 s, also those of the wait between two samples."""
    pytest.importorskip("_testcapi")
    found = subprocess.run([sys.executable, "-c", WHERE_ALLOCATIONS_FAIL], capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("True True\n", "")
