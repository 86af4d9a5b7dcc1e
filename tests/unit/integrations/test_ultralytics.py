"""ultralytics in a memory budget."""

import subprocess
import sys

import pytest

pytest.importorskip("ultralytics", exc_type=ImportError)

CHECKPOINT = """
import resource
import snugfit.integrations.ultralytics
from snugfit.memory import read_status
limit = read_status().data + 20_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import polars
print(polars.read_csv(b"epoch,loss\\n1,2.5\\n", infer_schema_length=None).to_dict(as_series=False))
"""


def test_what_checkpoints_read_results_with_is_started_before_memory_is_limited():
    """Threads of polars that are refused memory try again without end."""
    done = subprocess.run(
        [sys.executable, "-c", CHECKPOINT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=True
    )
    assert done.stdout == b"{'epoch': [1], 'loss': [2.5]}\n"
