"""Trials, in a process of their own: ``python -m benchmarks.fuzz.trials CORPUS MODULE``, whose ``READERS`` it takes.

Standard input holds lines of ``[READER, SEED]`` or ``[READER, SEED, KEPT]`` as JSON.

For each it prints ``begin READER SEED`` and then ``good``, or ``bad`` and what was wrong, as a line of JSON each.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.fuzz.damage import damage
from snugfit.errors import SnugfitError

GROWTH = 1 << 30
"""Bytes that a process may grow by over all its trials."""
_LONGEST_MESSAGE = 3000


def prepare(corpus: Path, reader: str, seed: int, kept: str | None, root: Path) -> None:
    """Make the tree of a trial: the good files, then those of a kept failure over them, or damage by the seed."""
    shutil.copytree(corpus / reader / "good", root)
    if kept is not None:
        for path in sorted((corpus / reader / kept).rglob("*")):
            target = root / path.relative_to(corpus / reader / kept)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                target.unlink(missing_ok=True)
                shutil.copy(path, target)
    elif seed >= 0:
        damage(root, random.Random(f"{reader} {seed}"))


def run(read: Callable[[Path], object], corpus: Path, reader: str, seed: int, kept: str | None) -> str:
    """What is wrong with the outcome of a trial; empty where nothing is."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        root = Path(folder, "tree")
        prepare(corpus, reader, seed, kept, root)
        try:
            read(root)
        except SnugfitError as error:
            return _message_fault(error, folder)
        except BaseException:
            return traceback.format_exc()
    return ""


def _message_fault(error: SnugfitError, folder: str) -> str:
    text = str(error)
    if text.count("\n") > 1 or len(text) > _LONGEST_MESSAGE or not text.strip():
        return f"{type(error).__name__} is no message of one or two lines: {text!r:.600}"
    return ""


def main(corpus: Path, module: str) -> None:
    """Run the trials that standard input asks for."""
    faulthandler.enable()
    readers = importlib.import_module(module).READERS
    status = Path("/proc/self/status").read_text(encoding="ascii")
    data = 1024 * int(status.partition("VmData:")[2].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (data + GROWTH, resource.RLIM_INFINITY))
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a reader prints is no answer
    for line in sys.stdin:
        reader, seed, *kept = json.loads(line)
        print(json.dumps(["begin", reader, seed, *kept]), file=out, flush=True)
        fault = run(readers[reader], corpus, reader, seed, *kept or [None])
        print(json.dumps(["bad", fault] if fault else ["good"]), file=out, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
