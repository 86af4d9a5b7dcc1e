"""Train CNNs inside a memory budget that is predicted, enforced and verified.

>>> import snugfit
>>> plan = snugfit.plan("vgg16", "digits", snugfit.Budget(memory="100MB"), epochs=1)  # doctest: +SKIP
>>> print(plan)  # doctest: +SKIP
>>> record = plan.run()  # doctest: +SKIP
>>> record.model  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.api import (
        Architecture,
        Budget,
        Candidate,
        Plan,
        Record,
        Request,
        RunnablePlan,
        TrainedRecord,
        draw_report,
        evaluate,
        export,
        load,
        plan,
        plan_request,
        predict,
        prepare_process,
        profile_request,
        resume,
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
    "TrainedRecord",
    "draw_report",
    "evaluate",
    "export",
    "load",
    "plan",
    "plan_request",
    "predict",
    "prepare_process",
    "profile_request",
    "resume",
]


def __getattr__(name: str) -> Any:
    """Import the Python face when it is first used: the command line's parent process does without torch."""
    if name in __all__:
        return getattr(import_module("snugfit.api"), name)
    raise AttributeError(f"module 'snugfit' has no attribute '{name}'")
