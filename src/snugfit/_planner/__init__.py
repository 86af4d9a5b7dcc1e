"""Search over strategies: measure their probes, collect proposals, rank those that fit."""

from snugfit._planner.calibration import PastRun as PastRun
from snugfit._planner.calibration import corrected as corrected
from snugfit._planner.calibration import past_run as past_run
from snugfit._planner.infeasible import infeasible_error as infeasible_error
from snugfit._planner.inputs import PlanningInput as PlanningInput
from snugfit._planner.inputs import StrategySelection as StrategySelection
from snugfit._planner.search import MeasurementContext as MeasurementContext
from snugfit._planner.search import search as search
