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
"""

from __future__ import annotations

import os

os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")  # read once, while torch is loaded; see snugfit.memory.trim

TYPE_CHECKING = False  # as in typing, which takes long to import: a Ctrl-C in the meantime is nobody's to catch
if TYPE_CHECKING:
    from typing import Any

    from snugfit._api import (
        Architecture,
        Budget,
        Candidate,
        Plan,
        Record,
        Request,
        RunnablePlan,
        Splits,
        StopFlag,
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

__version__ = "0.1.0"
__all__ = [
    "Architecture",
    "Budget",
    "Candidate",
    "Plan",
    "Record",
    "Request",
    "RunnablePlan",
    "Splits",
    "StopFlag",
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


def __getattr__(name: str) -> Any:
    """Import the Python face when it is first used: the command line's parent process does without torch."""
    from importlib import import_module

    if name in __all__:
        return getattr(import_module("snugfit._api"), name)
    raise AttributeError(f"module 'snugfit' has no attribute '{name}'")
