"""What the tests of several packages share."""

import inspect
import json
import os
import subprocess
import sys
import textwrap

import pytest

SERVER = """
import json, os, sys, traceback, torch, snugfit._api
for line in sys.stdin:
    job = json.loads(line)
    if not (child := os.fork()):
        said = os.open(job["said"], os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1), os.dup2(said, 2)
        os.chdir(job["folder"])
        os.environ.clear(), os.environ.update(job["environment"])
        code = 1
        try:
            exec(job["code"], {"__name__": "__main__"})
            sys.stdout.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Copies of this process have imported torch, which takes seconds, and done nothing else."""


@pytest.fixture(scope="session")
def copies():
    """A process that runs each job, a line of JSON, in a copy of itself, and answers with its exit code."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server


@pytest.fixture(scope="session")
def fresh_process(copies, tmp_path_factory):
    """Run functions in one process of their own, so that limits and allocator settings stay out of the tests' process.

    They take no argument, import what they need, and return JSON-able data; the answer is a dict by their names.
    ``helpers`` are functions that they call; ``folder`` is where they run.
    """

    def run(*functions, helpers=(), folder=None):
        sources = "\n\n".join(textwrap.dedent(inspect.getsource(function)) for function in (*helpers, *functions))
        calls = ", ".join(f"'{function.__name__}': {function.__name__}()" for function in functions)
        code = f"{sources}\nimport json as _json\nprint('RESULT' + _json.dumps({{{calls}}}))\n"
        said = tmp_path_factory.mktemp("process") / "said.txt"
        job = {"code": code, "said": str(said), "folder": str(folder or "."), "environment": dict(os.environ)}
        print(json.dumps(job), file=copies.stdin, flush=True)
        assert copies.stdout.readline() == "0\n", said.read_text()[-3000:]
        return json.loads(said.read_text().rpartition("RESULT")[2].splitlines()[0])

    return run
