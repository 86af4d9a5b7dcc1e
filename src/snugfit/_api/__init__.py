"""The public functions and classes: what this module imports, or names in ``LATE``, is found in ``snugfit``."""

from typing import TYPE_CHECKING, Any

from snugfit._api.planning import RunnablePlan as RunnablePlan
from snugfit._api.planning import plan as plan
from snugfit._api.planning import plan_request as plan_request
from snugfit._api.planning import profile_request as profile_request
from snugfit._api.trained_models import draw_report as draw_report
from snugfit._api.trained_models import evaluate as evaluate
from snugfit._api.trained_models import export as export
from snugfit._api.trained_models import load as load
from snugfit._api.trained_models import predict as predict
from snugfit._api.training import TrainedRecord as TrainedRecord
from snugfit._api.training import resume as resume
from snugfit._chain import Chain as Chain
from snugfit._core.budget import Budget as Budget
from snugfit._core.plan import Candidate as Candidate
from snugfit._core.plan import Plan as Plan
from snugfit._core.record import Record as Record
from snugfit._core.request import Request as Request
from snugfit._data import Splits as Splits
from snugfit._engine.loading import Architecture as Architecture
from snugfit._engine.process import prepare_process as prepare_process
from snugfit._storage.run_folder import Verification as Verification
from snugfit._storage.run_folder import verify as verify
from snugfit._training.events import CacheProgress as CacheProgress
from snugfit._training.events import EpochDone as EpochDone
from snugfit._training.events import Event as Event
from snugfit._training.events import ExitMeasured as ExitMeasured
from snugfit._training.events import Notice as Notice
from snugfit._training.events import PhaseDone as PhaseDone
from snugfit._training.events import PhaseStarted as PhaseStarted
from snugfit._training.events import ProbeMeasured as ProbeMeasured
from snugfit._training.events import RunDone as RunDone
from snugfit._training.events import RunStarted as RunStarted
from snugfit._training.events import StepDone as StepDone
from snugfit._training.events import TensorsSelected as TensorsSelected
from snugfit._training.stopping import StopFlag as StopFlag

if TYPE_CHECKING:
    from snugfit._api.estimates import Estimate as Estimate
    from snugfit._api.estimates import estimate as estimate
    from snugfit._api.loop import FitRecord as FitRecord
    from snugfit._api.loop import FitStep as FitStep
    from snugfit._api.loop import fit as fit
    from snugfit._data.boxed import load_boxed as load_boxed
    from snugfit._data.user import from_dataset as from_dataset
    from snugfit._report.console import ConsoleProgress as ConsoleProgress

LATE = {
    "ConsoleProgress": "snugfit._report.console",
    "Estimate": "snugfit._api.estimates",
    "FitRecord": "snugfit._api.loop",
    "FitStep": "snugfit._api.loop",
    "estimate": "snugfit._api.estimates",
    "fit": "snugfit._api.loop",
    "from_dataset": "snugfit._data.user",
    "load_boxed": "snugfit._data.boxed",
}
"""Modules of names that not every process needs, and whose imports (rich, PIL) take memory."""


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib import import_module

    from snugfit.memory.process import library_import

    with library_import():
        return getattr(import_module(LATE[name]), name)
