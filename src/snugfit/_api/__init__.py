"""The public functions of snugfit; ``snugfit._engine`` runs them."""

from snugfit._api.planning import RunnablePlan, plan, plan_request, profile_request
from snugfit._api.report import draw_report
from snugfit._api.trained_models import evaluate, export, load, predict
from snugfit._api.training import TrainedRecord, resume
from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.plan import Candidate, Plan
from snugfit._core.record import Record
from snugfit._core.request import Request
from snugfit._data import Splits, from_dataset, load_boxed
from snugfit._engine.loading import Architecture
from snugfit._engine.process import prepare_process
from snugfit._report.console import ConsoleProgress
from snugfit._storage.run_folder import Verification, verify
from snugfit._training.events import (
    CacheProgress,
    EpochDone,
    Event,
    ExitMeasured,
    Notice,
    PhaseDone,
    PhaseStarted,
    ProbeMeasured,
    RunDone,
    RunStarted,
    StepDone,
    TensorsSelected,
)
from snugfit._training.stopping import StopFlag

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
