"""Description of a strategy and its options for the rest of snugfit, defined in its ``config.py`` without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from snugfit._core.budget import Aim
from snugfit._core.option_groups import FROM_PYTHON, BaseRequest, TrainingOptions
from snugfit._core.options import Checked
from snugfit._core.record import Record
from snugfit._core.workload import Activations, OptimizerName, OptimizerSettings
from snugfit.errors import UsageError

Declared = tuple[Any, Any]
"""Type and default of an option."""


@dataclass(frozen=True)
class NoOptions(Checked):
    """Options of a strategy that has none."""


class StrategyConfig:
    """Describes a strategy to the planner, the command line and the loader.

    Attributes:
        name: name of the strategy.
        implementation: the strategy's dataclass, like ``package.module:Class``.
        options: dataclass of its options. Their help texts are the docstring's. Options that the dataclass of the
            strategy has as fields are passed to it.
        schemes: the values of its option ``scheme``, which other strategies may have, too; empty if it has none.
        order: place among the strategies, in tables and in help; ties are broken by name.
        exact: whether its gradients equal those of plain backpropagation.
        expected_loss: expected loss of accuracy, as an ordinal number; 0 is none.
        accuracy: sentence of a plan's explanation about the accuracy to expect, for strategies that are not exact.
        rounds_state: whether its optimizer state is large enough to be stored in 8 bits where nothing else fits.
        rounds_weights: whether it can keep trained weights in bfloat16 (``--weight-dtype``).
        scales_loss: whether it can scale its loss for gradients in float16 (``--precision float16``).
        whole_loss: whether it trains all layers together by the network's own loss, with the options of such training
            (``--class-weights``, ``--loss``, ``--clip-norm``, ``--ema``, ``--patience``, ``--mixup``, ``--cutmix``,
            and an optimizer from Python).
        normalises_batches: whether its batch norms can normalise by all images of a step (``--batch-norm exact``).
        only_named: whether ``auto`` never considers it; it is a baseline.
        keeps_time_ratio: whether it supports a time ratio; ``auto`` considers it only with one, or to fine-tune.
        fine_tunes: whether ``auto`` prefers it, if the aim is accuracy, to fine-tune pre-trained weights on few images.
        needs_weights: whether ``auto`` considers it only with pre-trained weights.
        last_resort: reason why other strategies come first if :meth:`is_last_resort` is true.
        activations: values of --activations that it supports, besides exact.
        trains_fresh: whether its predictions hold in a process that has measured nothing.
        no_averaging: why it does not train with an optimizer that averages weights; empty if it does.
        default_optimizer: its optimizer if the request names the strategy but no optimizer; None is the common default.
        optimizers: its optimizer defaults, if they differ from the common ones.
        rebuild: function that rebuilds a trained network, like ``package.module:function``; None where training leaves
            the structure as it is. It takes the full network as a chain on the meta device, the dictionary that
            :meth:`structure` returned, the number of classes, and the saved state dict; it returns a module.
        worker: function of the other processes of a launch, for a strategy that trains over several. It takes chain,
            workload, the ``plan`` of the gateway's message, the channel to it, the device, and a function to call
            after every command.
    """

    name: ClassVar[str]
    implementation: ClassVar[str]
    options: ClassVar[type[Any]] = NoOptions
    schemes: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int] = 100
    exact: ClassVar[bool] = False
    expected_loss: ClassVar[int] = 2
    accuracy: ClassVar[str] = (
        "Its gradients are not those of the network's own loss, so accuracy may differ from backpropagation's."
    )
    rounds_state: ClassVar[bool] = False
    rounds_weights: ClassVar[bool] = False
    scales_loss: ClassVar[bool] = False
    whole_loss: ClassVar[bool] = False
    normalises_batches: ClassVar[bool] = False
    only_named: ClassVar[bool] = False
    keeps_time_ratio: ClassVar[bool] = False
    fine_tunes: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    last_resort: ClassVar[str] = ""
    activations: ClassVar[tuple[Activations, ...]] = ()
    no_averaging: ClassVar[str] = ""
    trains_fresh: ClassVar[bool] = False
    default_optimizer: ClassVar[OptimizerName | None] = None
    optimizers: ClassVar[Mapping[str, OptimizerSettings]] = {}
    rebuild: ClassVar[str | None] = None
    worker: ClassVar[str] = ""

    def modules(self, request: BaseRequest) -> tuple[str, ...]:
        """Modules that it imports for some requests only, besides that of its class; dotted names."""
        return ()

    def check(self, request: BaseRequest) -> None:
        """Check a request that names this strategy.

        Raises:
            UsageError: options contradict each other, or the scheme is one of other strategies.
        """
        if request.budget.time_ratio is not None and not self.keeps_time_ratio:
            raise UsageError(f"--strategy {self.name} cannot keep a time ratio; leave out --time-ratio.")
        if (flag := self._unsupported(request)) is not None:
            kind = flag.rpartition(" ")[2]
            only = {"paged": "checkpoint", "int8": "backprop", "int4": "backprop", "exact": "backprop"}
            others = only.get(kind, "backprop or checkpoint")
            raise UsageError(f"--strategy {self.name} does not support {flag}; use {others}, or leave it out.")
        if (reason := self._against_averaging(request)) is not None:
            raise UsageError(f"--strategy {self.name} {reason}; use sgd or adamw.")
        if (reason := self.contradiction(request)) is not None:
            raise UsageError(f"--strategy {self.name}: {reason}.")
        if request.budget.devices > 1 and not self.worker:
            raise UsageError(
                f"--strategy {self.name} trains in one process, and not over --devices {request.budget.devices}; leave "
                "one of them out."
            )
        if (scheme := self._foreign_scheme(request)) is not None:
            raise UsageError(f"{self.name} has no scheme {scheme}; --scheme is {', '.join(self.schemes)} there.")

    def _unsupported(self, request: BaseRequest) -> str | None:
        """A flag, with its value, by which steps keep or compute something else, and only in other strategies."""
        training = request.training
        if getattr(request.strategy, "batch_norm", "micro") == "exact" and not self.normalises_batches:
            return "--batch-norm exact"
        if training.activations not in ("exact", *self.activations):
            return f"--activations {training.activations}"
        if training.weight_dtype == "bfloat16" and not self.rounds_weights:
            return f"--weight-dtype {training.weight_dtype}"
        if training.precision == "float16" and not self.scales_loss:
            return f"--precision {training.precision}"
        return None if self.whole_loss else _whole_loss_flag(training)

    def _against_averaging(self, request: BaseRequest) -> str | None:
        """Why it does not train with the requested optimizer if that averages weights."""
        if request.training.optimizer != "schedulefree" or not self.no_averaging:
            return None
        return f"does not support --optimizer schedulefree, {self.no_averaging}"

    def contradiction(self, request: BaseRequest) -> str | None:
        """Why its own options contradict others of the request; None if they do not."""
        return None

    def _foreign_scheme(self, request: BaseRequest) -> str | None:
        """The requested scheme if it is one of other strategies."""
        scheme: str | None = getattr(request.strategy, "scheme", None)
        return scheme if self.schemes and scheme not in (None, *self.schemes) else None

    def check_names(self, request: BaseRequest) -> None:
        """Check names in options, for any requested strategy.

        Raises:
            UsageError: a name is unknown.
        """

    def why_not(self, request: BaseRequest) -> str | None:
        """Why ``auto`` does not consider it for a request; None if it does."""
        if self.only_named:
            return f"baseline; select it with --strategy {self.name}"
        flag, averaging = self._unsupported(request), self._against_averaging(request)
        if flag or averaging:
            return averaging or f"does not support {flag}"
        if not self.keeps_time_ratio and request.budget.time_ratio is not None:
            return "cannot keep a time ratio"
        fine_tunes = self.fine_tunes and request.model.weights is not None
        if self.keeps_time_ratio and request.budget.time_ratio is None and not fine_tunes:
            return "requires a --time-ratio, like 0.5" + (", or pre-trained --weights" if self.fine_tunes else "")
        if self.needs_weights and request.model.weights is None:
            return "requires pre-trained --weights, because it does not train them"
        scheme = self._foreign_scheme(request)
        return self.contradiction(request) if scheme is None else f"has no --scheme {scheme}"

    def accuracy_with(self, settings: Mapping[str, Any]) -> str:
        """What training with these settings of a choice means for accuracy: a sentence of the plan."""
        return self.accuracy

    def is_last_resort(self, request: BaseRequest) -> bool:
        """Whether ``auto`` considers it only if the other strategies are insufficient."""
        return False

    def settings(self, request: BaseRequest) -> dict[str, Any]:
        """Fields of the strategy's dataclass that a request decides, in addition to the options of the same names."""
        return {}

    def changes_with(self, settings: Mapping[str, Any], aim: Aim) -> bool:
        """Whether a candidate with these settings may have other settings if this is the aim."""
        return False

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Terms about a candidate's settings in a plan's table, in addition to its batch sizes."""
        return ()

    def explanation(self, settings: Mapping[str, Any], parts: Sequence[str]) -> Iterable[str]:
        """Sentences of a plan's explanation about the chosen candidate.

        Args:
            settings: those of the candidate.
            parts: names of what it trains one after another, as the units of its phases.
        """
        return ()

    def structure(self, record: Record) -> dict[str, Any]:
        """Data in ``architecture.json`` from which :attr:`rebuild` rebuilds the trained network; JSON-able."""
        return {}


def _whole_loss_flag(training: TrainingOptions) -> str | None:
    """The first flag, with its value, that needs :attr:`StrategyConfig.whole_loss`."""
    if training.optimizer == FROM_PYTHON:
        return f"--optimizer {FROM_PYTHON}"
    defaults = TrainingOptions()
    for name in ("class_weights", "loss", "clip_norm", "ema", "patience", "mixup", "cutmix"):
        value = getattr(training, name)
        if value != getattr(defaults, name):
            return f"--{name.replace('_', '-')} {f'{value:g}' if isinstance(value, float) else value}"
    return None


def present(terms: Mapping[str, bool]) -> tuple[str, ...]:
    """The terms that are true."""
    return tuple(term for term, holds in terms.items() if holds)


def declared_options(kind: type[Any]) -> dict[str, Declared]:
    """The options that a dataclass declares, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {option.name: (hints[option.name], option.default) for option in fields(kind)}


def merged_options(kinds: Iterable[type[Any]]) -> dict[str, Declared]:
    """The options of several dataclasses, by name; choices of options of the same name are merged.

    Raises TypeError if two declare an option of one name differently, or one has the name of a common option.
    """
    common = {option.name for group in vars(BaseRequest()).values() for option in fields(group)}
    found: dict[str, Declared] = {}
    for kind in kinds:
        for name, declared in declared_options(kind).items():
            if name in common:
                raise TypeError(f"the option {name} is one that every run has")
            found[name] = _merged(name, declared, found.get(name))
    return found


def _merged(name: str, declared: Declared, before: Declared | None) -> Declared:
    if before is None or before == declared:
        return declared
    names = [*dict.fromkeys([*_choices(before[0]), *_choices(declared[0])])]
    if not names or before[1] is not None or declared[1] is not None:
        raise TypeError(f"the option {name} is declared differently by two strategies")
    return Literal[tuple(names)] | None, None


def _choices(hint: Any) -> Iterator[str]:
    """Names of an optional choice, such as ``Literal["a", "b"] | None``."""
    for part in get_args(hint):
        if get_origin(part) is Literal:
            yield from get_args(part)
