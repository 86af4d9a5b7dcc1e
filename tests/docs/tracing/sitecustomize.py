"""Python imports this at its start where the folder is in PYTHONPATH: records call stacks of snugfit's functions.

For each stage of :data:`STAGES`, and for the first optimizer step of training, the files on the call stack are written
to ``FIRST_STEP_TRACE`` as a line of JSON, by whichever process gets there.
"""

import json
import os
import sys
import threading
from pathlib import Path

STAGES = {
    "_cli/child_process.py": "_forward_signals",
    "_engine/builder.py": "assemble",
    "profiling/measuring.py": "measure_probes",
    "_training/loop.py": "_step_within_budget",
}
"""The child gets its job; data and network are assembled; probes are measured; a training step begins."""
SOURCE = os.environ.get("FIRST_STEP_SOURCE", "?")
"""Folder of snugfit's files."""
UPDATE = ("_training/optimizers.py", "_apply")
_seen: set[str] = set()


def _file(frame) -> str:
    return frame.f_code.co_filename.removeprefix(SOURCE) if frame.f_code.co_filename.startswith(SOURCE) else ""


def _stack(frame) -> list[str]:
    files: list[str] = []
    while frame is not None:
        if _file(frame):
            files.insert(0, _file(frame))
        frame = frame.f_back
    return list(dict.fromkeys(files))


def _watch(frame, event, argument) -> None:
    if event != "call":
        return
    name = frame.f_code.co_name
    stage = _file(frame) if STAGES.get(_file(frame)) == name else ""
    if (_file(frame), name) == UPDATE and "_training/loop.py" in _seen:
        stage = "step"
    if stage and stage not in _seen:
        _seen.add(stage)
        with Path(os.environ["FIRST_STEP_TRACE"]).open("a") as file:
            file.write(json.dumps([stage, _stack(frame)]) + "\n")
    if "step" in _seen:
        sys.setprofile(None)


if "FIRST_STEP_TRACE" in os.environ:
    sys.setprofile(_watch)
    threading.setprofile(_watch)
