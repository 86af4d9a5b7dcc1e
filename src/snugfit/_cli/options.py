"""The flags: the typed groups of ``_core.request`` plus what every command takes."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Group, Parameter

from snugfit._cli.output import print_json
from snugfit._core import known
from snugfit._core.option_groups import (
    BudgetOptions,
    DataOptions,
    MachineOptions,
    ModelOptions,
    Trained,
    TrainingOptions,
)
from snugfit._core.options import Common, Count, Text
from snugfit._core.paths import expanded, require_weights
from snugfit._core.record import TRIAL_STEPS
from snugfit._core.request import Request, StrategyOptions
from snugfit._storage.outputs import require_places
from snugfit._version import SCHEMA
from snugfit.errors import UsageError


def _panel(title: str, order: int) -> Parameter:
    return Parameter(name="*", group=Group(title, sort_key=order))


@Parameter(name="*")
@dataclass(frozen=True)
class RequestFlags:
    """All options of one run as flags; the fields are those of ``_core.request.Request``."""

    model: Annotated[ModelOptions, _panel("Model", 1)] = field(default_factory=ModelOptions)
    data: Annotated[DataOptions, _panel("Data", 2)] = field(default_factory=DataOptions)
    budget: Annotated[BudgetOptions, _panel("Budget", 3)] = field(default_factory=BudgetOptions)
    training: Annotated[TrainingOptions, _panel("Training", 4)] = field(default_factory=TrainingOptions)
    strategy: Annotated[StrategyOptions, _panel("Strategy", 5)] = field(default_factory=StrategyOptions)
    machine: Annotated[MachineOptions, _panel("Machine", 6)] = field(default_factory=MachineOptions)

    def request(self) -> Request:
        """The request that they make.

        Raises:
            UsageError: there is no model, data set or local loss of a given name.
        """
        request = Request(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        known.check_names(request)
        return request

    def changed(self) -> list[str]:
        """Flags whose values differ from the defaults, like ``["--epochs"]``."""
        names = []
        for group in dataclasses.fields(self):
            given = getattr(self, group.name)
            for option in dataclasses.fields(given):
                if getattr(given, option.name) != option.default:
                    names.append("--" + option.name.replace("_", "-"))
        return names


def require_files(request: Request) -> None:
    """Check before torch is imported that a run's folders can be written, and that there is a file of weights.

    Raises:
        UsageError, CheckpointError: not so.
    """
    require_places(request.machine.out, request.machine.cache_dir)
    if request.model.weights not in (None, known.IMAGENET):
        require_weights(expanded(request.model.weights))


_SHOWN_JSON = ("evaluate", "predict", "report", "export", "verify", "cluster doctor", "cluster plan")
_MANY_FLAGS = ("plan", "train", "profile", "estimate")


@Parameter(name="*", group=Group("Output", sort_key=7))
@dataclass(frozen=True)
class OutputOptions:
    """What every command takes.

    Attributes:
        json: print exactly one JSON object on stdout.
        quiet: show notices and errors only.
        debug: show the traceback of an error.
        config: YAML file with any of these flags, like ``batch_size: 64``; flags given here win.
    """

    json: Annotated[bool, Parameter(negative=""), Common("", "print one JSON object on stdout", _SHOWN_JSON)] = False
    quiet: Annotated[bool, Parameter(negative="")] = False
    debug: Annotated[bool, Parameter(negative="")] = False
    config: Annotated[
        str | None, Common("FILE", "YAML file with any of these flags, like batch_size: 64", _MANY_FLAGS)
    ] = None

    def show(self, found: dict[str, Any], text: str) -> None:
        """Print a result on stdout: as JSON with ``--json``, or else as text."""
        if self.json:
            print_json({"schema": SCHEMA, **found})
        else:
            print(text)


Image = Annotated[str, Text("a container image like registry.org/me/snugfit:1", re.compile(r"\w[\w./:@-]*").fullmatch)]
PAPERS = Group("Figures of the papers", sort_key=8)


@Parameter(name="*", group=Group("Profile", sort_key=6))
@dataclass(frozen=True)
class ProfileOptions:
    """What ``profile`` shows in addition to the units.

    Attributes:
        tensors: add the training time of each tensor on this machine, as ``elastic`` measures it: seconds of its
            gradient and update (t_dw), and of passing the gradient from it to the tensor before (t_dy).
        learning_signal: add the cost of each method's learning signal: multiply-accumulates, additional parameters and
            the peak of its tensors.
        activation_memory: add the temporary, cumulative and peak activation memory of every block by the rule of
            the papers, and the measured peak of a step.
        trained: what is trained in --activation-memory: a side network and the head, the head, all biases and the head,
            or everything; by default `sidenet` if the model can have a side network, else `full`.
        chart: HTML page to write a chart of --activation-memory to.
    """

    tensors: Annotated[bool, Parameter(negative=""), Common("", "add the training time of each tensor")] = False
    learning_signal: Annotated[bool, Parameter(negative="", group=PAPERS)] = False
    activation_memory: Annotated[
        bool, Parameter(negative="", group=PAPERS), Common("", "add the activation memory of each block")
    ] = False
    trained: Annotated[Trained | None, Parameter(group=PAPERS)] = None
    chart: Annotated[str | None, Parameter(group=PAPERS)] = None


@Parameter(name="*", group=Group("Plan", sort_key=6))
@dataclass(frozen=True)
class PlanOptions:
    """What ``plan`` does in addition to planning.

    Attributes:
        compare: run one short trial of each strategy that fits, in its own process and inside the budget, and print
            its predictions and measurements.
        compare_steps: effective batches of each trial; 4 by default.
        sbatch: print a batch script for Slurm, with the memory, cores and time that the chosen strategy needs.
        kubernetes: container image that has snugfit: print a manifest for Kubernetes that trains in it, with the
            memory, cores and time that the chosen strategy needs. Several processes take Kubeflow Trainer.
    """

    compare: Annotated[bool, Parameter(negative=""), Common("", "also try each strategy that fits for a few steps")] = (
        False
    )
    compare_steps: Count | None = None
    sbatch: Annotated[bool, Parameter(negative="")] = False
    kubernetes: Image | None = None

    def require_one_result(self, *, as_json: bool) -> None:
        """Raise UsageError if more than one thing is to be printed on stdout."""
        given = {"--sbatch": self.sbatch, "--kubernetes": self.kubernetes is not None, "--json": as_json}
        flags = [flag for flag, is_given in given.items() if is_given]
        if len(flags) > 1:
            raise UsageError(f"{' and '.join(flags)} both print on stdout; give one of them.")

    def steps(self) -> int:
        """Steps of each trial, 0 without trials; raises UsageError if they are given without trials."""
        if self.compare_steps is not None and not self.compare:
            raise UsageError("--compare-steps is for trials; add --compare.")
        return (self.compare_steps or TRIAL_STEPS) if self.compare else 0


NO_FLAGS = RequestFlags()
PLAN_ALONE = PlanOptions()
SHOW_ALL = OutputOptions()
UNITS_ALONE = ProfileOptions()
