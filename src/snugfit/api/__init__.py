"""The Python face: what the command line does, as functions."""

from snugfit.api.distributed import serve, together, with_others
from snugfit.api.exporting import export
from snugfit.api.inference import evaluate, predict
from snugfit.api.launch_folder import begun, finished, for_launch, world
from snugfit.api.lean_retries import requests_apart, smallest_fitting
from snugfit.api.loading import Architecture, load
from snugfit.api.planning import RunnablePlan, plan, plan_request, profile_request
from snugfit.api.process import prepare_process
from snugfit.api.result import TrainedRecord
from snugfit.api.run_page import draw_report
from snugfit.api.running import resume
from snugfit.core.budget import Budget
from snugfit.core.plan import Candidate, Plan
from snugfit.core.record import Record
from snugfit.core.request import Request
from snugfit.core.verify import Verification, verify
from snugfit.training.stopping import StopFlag

__all__ = [
    "Architecture",
    "Budget",
    "Candidate",
    "Plan",
    "Record",
    "Request",
    "RunnablePlan",
    "StopFlag",
    "TrainedRecord",
    "Verification",
    "begun",
    "draw_report",
    "evaluate",
    "export",
    "finished",
    "for_launch",
    "load",
    "plan",
    "plan_request",
    "predict",
    "prepare_process",
    "profile_request",
    "requests_apart",
    "resume",
    "serve",
    "smallest_fitting",
    "together",
    "verify",
    "with_others",
    "world",
]
