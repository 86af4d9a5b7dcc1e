"""Train CNNs inside a memory budget that is predicted, enforced and verified.

>>> import snugfit
>>> snugfit.prepare_process()  # the budget counts from here: before model and data exist
>>> budget, small = snugfit.Budget(memory="100MB"), {"image_size": 8, "max_train": 64, "epochs": 1}
>>> plan = snugfit.plan("smallconv", "digits", budget, strategy="backprop", **small)
>>> print(plan)
smallconv on digits, budget 100.0 MB of memory
...
>>> record = plan.run(subscribers=(), out="runs/smallconv")
>>> record.enforced, record.measured["peak_bytes"] <= 100_000_000
(True, True)
>>> type(record.model)  # a plain module
<class 'torch.fx.graph_module...'>

The names in the ``__all__`` of this package, and of each package in ``PUBLIC``, are public. Packages with a leading
underscore are private, and so are the modules inside a public package.
"""

from __future__ import annotations

import os

from snugfit._version import __version__ as __version__

os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")  # read once, while torch is loaded; see snugfit.memory.trim

TYPE_CHECKING = False  # as in typing, whose import takes long; nothing would catch a Ctrl-C in the meantime
if TYPE_CHECKING:
    from typing import Any

    from snugfit._api import (
        Architecture,
        Budget,
        CacheProgress,
        Candidate,
        Chain,
        ConsoleProgress,
        EpochDone,
        Event,
        ExitMeasured,
        Notice,
        PhaseDone,
        PhaseStarted,
        Plan,
        ProbeMeasured,
        Record,
        Request,
        RunDone,
        RunnablePlan,
        RunStarted,
        Splits,
        StepDone,
        StopFlag,
        TensorsSelected,
        TrainedRecord,
        Verification,
        draw_report,
        evaluate,
        export,
        from_dataset,
        load,
        load_boxed,
        plan,
        plan_request,
        predict,
        prepare_process,
        profile_request,
        resume,
        verify,
    )


__all__ = [
    "Architecture",
    "Budget",
    "CacheProgress",
    "Candidate",
    "Chain",
    "ConsoleProgress",
    "EpochDone",
    "Event",
    "ExitMeasured",
    "Notice",
    "PhaseDone",
    "PhaseStarted",
    "Plan",
    "ProbeMeasured",
    "Record",
    "Request",
    "RunDone",
    "RunStarted",
    "RunnablePlan",
    "Splits",
    "StepDone",
    "StopFlag",
    "TensorsSelected",
    "TrainedRecord",
    "Verification",
    "draw_report",
    "evaluate",
    "export",
    "from_dataset",
    "load",
    "load_boxed",
    "plan",
    "plan_request",
    "predict",
    "prepare_process",
    "profile_request",
    "resume",
    "verify",
]


PUBLIC = ("detection", "errors", "lean", "local", "memory", "profiling", "selection", "strategies", "surgery", "tiling")
"""The public packages, next to this one."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line's parent process runs without torch."""
    from importlib import import_module

    if name in PUBLIC:
        return import_module(f"snugfit.{name}")
    if name in __all__:
        return getattr(import_module("snugfit._api"), name)
    raise AttributeError(f"module 'snugfit' has no attribute '{name}'")
