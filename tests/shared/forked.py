"""Code run in copies of one process, so that each need not import torch again."""

from __future__ import annotations

import json
import subprocess
import sys

COPIES = """
import json as _json, os as _os, sys as _sys
for _case in _json.loads(_sys.argv[1]):
    _sys.stdout.flush()
    if not (_child := _os.fork()):
        _failed = 1
        try:
            exec(_case, globals())
            _sys.stdout.flush()
            _failed = 0
        finally:
            if _failed:
                _sys.excepthook(*_sys.exc_info())
            _os._exit(_failed)
    _code = _os.waitstatus_to_exitcode(_os.waitpid(_child, 0)[1])
    print(f"\\n{_json.dumps(_code)}\\0", end="", flush=True)
"""


def run_copies(first: str, *cases: str, timeout: float = 200) -> list[tuple[int, str]]:
    """Run each case in a copy of a process that has run ``first``.

    Returns:
        By case, the exit code, negative for a signal, and what was printed. Errors are printed to standard error.
    """
    command = [sys.executable, "-c", first + COPIES, json.dumps(cases)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True)
    parts = [part.rpartition("\n") for part in done.stdout.split("\0")[:-1]]
    assert len(parts) == len(cases)
    return [(json.loads(code), said) for said, _, code in parts]
