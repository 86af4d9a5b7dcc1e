"""The strategies, one folder each, and the names that an own strategy needs.

Strategies share a protocol and never import each other. Importing this package does not import torch, so a
``config.py`` may import from it. Names that need torch are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.late_names import late_names
from snugfit._core.option_groups import BaseRequest
from snugfit._core.options import Checked, Choice, Count, Positive, Range, Share, Text
from snugfit._core.plan import Cost, Phase, Shortfall
from snugfit._core.profile import Profile, UnitStats
from snugfit._core.record import Record
from snugfit._core.strategy_config import StrategyConfig
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit.strategies.micro_batch import AccumulationOptions

if TYPE_CHECKING:
    from snugfit._chain import Chain
    from snugfit._storage.tensor_file import save_model
    from snugfit._training.dry_run import dry_run_phase
    from snugfit._training.finalize import evaluate_model, make_record
    from snugfit._training.loop import train_phase
    from snugfit._training.network import Forward, NetworkTrainer
    from snugfit._training.run import Run
    from snugfit._training.strategy import Strategy, TrainingData
    from snugfit.profiling import Probe
    from snugfit.strategies.full_network import FullNetwork, MakeTrainer, by_own_loss, fit_network
    from snugfit.strategies.memory_estimates import step_headroom, with_safety

_WITH_TORCH = {
    "snugfit._chain": ("Chain",),
    "snugfit._storage.tensor_file": ("save_model",),
    "snugfit._training.dry_run": ("dry_run_phase",),
    "snugfit._training.finalize": ("evaluate_model", "make_record"),
    "snugfit._training.loop": ("train_phase",),
    "snugfit._training.network": ("Forward", "NetworkTrainer"),
    "snugfit._training.run": ("Run",),
    "snugfit._training.strategy": ("Strategy", "TrainingData"),
    "snugfit.profiling": ("Probe",),
    "snugfit.strategies.full_network": ("FullNetwork", "MakeTrainer", "by_own_loss", "fit_network"),
    "snugfit.strategies.memory_estimates": ("step_headroom", "with_safety"),
}
"""Names that need torch, by module."""

__all__ = [
    "AccumulationOptions",
    "BaseRequest",
    "Budget",
    "Chain",
    "Checked",
    "Choice",
    "Cost",
    "Count",
    "Forward",
    "FullNetwork",
    "Hardware",
    "MakeTrainer",
    "NetworkTrainer",
    "OptimizerSettings",
    "Phase",
    "Positive",
    "Probe",
    "Profile",
    "Range",
    "Record",
    "Run",
    "Share",
    "Shortfall",
    "Strategy",
    "StrategyConfig",
    "Text",
    "TrainingData",
    "UnitStats",
    "Workload",
    "by_own_loss",
    "dry_run_phase",
    "evaluate_model",
    "fit_network",
    "make_record",
    "save_model",
    "step_headroom",
    "train_phase",
    "with_safety",
]

__getattr__ = late_names(__name__, _WITH_TORCH)
