"""Runs the examples of modules' docstrings in this process and folder; prints ``{module: [failed, attempted]}``.

Usage: run_doctests.py MODULE ... Where the API is among them, ``runs/first`` and ``photos/`` are made before, which its
examples use, and ``runs/stopped``, which was stopped after a step.
"""

import contextlib
import doctest
import json
import sys
from importlib import import_module
from pathlib import Path

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SMALL = {"memory": "100MB", "strategy": "backprop", "epochs": 1, "batch_size": 16, "image_size": 8}


def main(modules):
    results = {name: run(name) for name in modules if not uses_runs(name)}
    later = [name for name in modules if uses_runs(name)]
    if later:
        make_runs()
    print(json.dumps(results | {name: run(name) for name in later}))


def uses_runs(name):
    on_the_ground_floor = ("snugfit._core.record", "snugfit._storage.run_folder")
    return name in ("snugfit", *on_the_ground_floor) or name.startswith(
        ("snugfit._api", "snugfit._engine", "snugfit._training")
    )


def run(name):
    found = doctest.testmod(import_module(name), optionflags=OPTIONS)
    if found.failed:  # what was expected and what came stands on stdout
        print(f"{name}: {found.failed} of {found.attempted} failed")
    return [found.failed, found.attempted]


def make_runs():
    import snugfit

    snugfit.prepare_process(1)
    plan = snugfit.plan("smallconv", "digits", max_train=32, max_val=16, **SMALL)
    plan.run((), out="runs/first")
    stop = snugfit.StopFlag()

    def stopping(event):
        if isinstance(event, snugfit.StepDone):
            stop.request()

    with contextlib.suppress(snugfit.errors.InterruptedRunError):
        plan.run([stopping], out="runs/stopped", stop=stop)
    write_photos(Path("photos"))


def write_photos(folder):
    import numpy as np
    from PIL import Image

    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(256, size=(20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
