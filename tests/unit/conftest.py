"""What the tests of several packages share."""

import inspect
import json
import subprocess
import sys
import textwrap

import pytest


@pytest.fixture(scope="session")
def fresh_process():
    """Run functions in one process of their own, so that limits and allocator settings stay out of the tests' process.

    They take no argument, import what they need, and return JSON-able data; the answer is a dict by their names.
    ``helpers`` are functions that they call; ``folder`` is where they run.
    """

    def run(*functions, helpers=(), folder=None, timeout=120):
        sources = "\n\n".join(textwrap.dedent(inspect.getsource(function)) for function in (*helpers, *functions))
        calls = ", ".join(f"'{function.__name__}': {function.__name__}()" for function in functions)
        code = f"{sources}\nimport json as _json\nprint('RESULT' + _json.dumps({{{calls}}}))\n"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.rpartition("RESULT")[2])

    return run
