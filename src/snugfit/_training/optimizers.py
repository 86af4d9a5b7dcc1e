"""One update rule per parameter, so that each gradient is applied and freed as soon as it is complete.

The scalar state of schedule-free AdamW is the same for all parameters that step together, so one rule per parameter is
equivalent to one per unit.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from snugfit._core.workload import OptimizerSettings
from snugfit._storage.tensor_file import Deferred
from snugfit._training.ema import AveragedRule
from snugfit._training.gradient_places import place_small_gradients
from snugfit.errors import CheckpointError, ModelError
from snugfit.lean import LeanConv2d
from snugfit.lean.optimizer_state import RoundingRule
from snugfit.lean.update_rules import FusedAdamW, FusedSGD, PartialRule, UpdateRule, fit
from snugfit.memory.device import uses_devices


class _AveragingRule(UpdateRule, Protocol):
    """The steps of one parameter whose weights are evaluated as an average.

    Attributes:
        averaged: whether the averaged weights are in place, rather than the trained ones.
    """

    @property
    def averaged(self) -> bool: ...

    def switch(self, *, to_average: bool) -> None:
        """Put the averaged or the trained weights in place."""

    def average(self) -> Tensor:
        """The averaged weights, of the parameter's shape (...), while the trained ones are in place."""


def lr_factor(settings: OptimizerSettings, step: int, steps: int, epochs: int) -> float:
    """Fraction of the peak learning rate in a step, from 0, of ``epochs`` with ``steps`` steps each.

    It rises linearly per step in the warm-up, which has whole steps, and leaves one. Then it is 1, half a cosine from 1
    to 0, or in steps 1, 0.1 and 0.01 (He et al., CVPR 2016, section 4.2: at half and at three quarters).
    """
    if settings.schedule == "one-cycle":
        return _one_cycle(step, steps * epochs)
    warm_up = min(round(settings.warmup_epochs * steps), epochs * steps - 1)
    if step < warm_up:
        return (step + 1) / warm_up
    if settings.schedule == "constant":
        return 1.0
    done = min((step - warm_up) / max(epochs * steps - warm_up, 1), 1.0)
    if settings.schedule == "step":
        return 0.01 if done >= 0.75 else 0.1 if done >= 0.5 else 1.0
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _one_cycle(step: int, total: int) -> float:
    """Half a cosine from 1/25 up to 1 in 30 % of the steps, then one down to 4e-6, as torch's ``OneCycleLR``.

    Momentum does not change, unlike there. Smith and Topin, Super-Convergence (2018).
    """
    first, last = 1 / 25, 1 / 25 / 1e4
    peak = max(0.3 * total - 1, 0.0)
    if step < peak:
        return first + (1 - first) * 0.5 * (1 - math.cos(math.pi * step / peak))
    share = min((step - peak) / max(total - 1 - peak, 1.0), 1.0)
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * share))


MakeRule = Callable[[str, nn.Parameter], UpdateRule]
"""Makes the rule of a parameter by its name, in place of those that settings name."""


def _rule(name: str, parameter: nn.Parameter, settings: OptimizerSettings, make: MakeRule | None = None) -> UpdateRule:
    if settings.averages:
        from snugfit._training.schedule_free import ScheduleFree

        return ScheduleFree(parameter, settings.lr, settings.weight_decay)
    rule = make(name, parameter) if make is not None else _plain_rule(name, parameter, settings)
    return rule if settings.ema is None else AveragedRule(rule, parameter, settings.ema)


def _plain_rule(name: str, parameter: nn.Parameter, settings: OptimizerSettings) -> UpdateRule:
    rule: FusedSGD | FusedAdamW
    if settings.name == "sgd":
        rule = FusedSGD(settings.lr, settings.momentum, settings.weight_decay)
    else:
        rule = FusedAdamW(settings.lr, settings.weight_decay)
    if parameter.dtype != torch.bfloat16 and (settings.state == "float32" or not rule.names):
        return rule
    return RoundingRule(rule, settings.state, seed=zlib.crc32(name.encode()))


def _expected_state(
    name: str,
    parameter: nn.Parameter,
    settings: OptimizerSettings,
    found: Mapping[str, Tensor],
    make: MakeRule | None,
) -> Mapping[str, Tensor]:
    """Tensors of the types and shapes that a parameter's state has after a step; others may come later from Python."""
    if settings.averages:
        return {key: parameter if value.dim() else value for key, value in found.items()}
    empty = nn.Parameter(torch.empty_like(parameter, device="meta"))
    empty.grad = empty.detach()
    rule = _rule(name, empty, settings, make)
    rule.step(empty)
    if make is None:
        return rule.state
    return {**found, **{key: value for key, value in rule.state.items() if value.dim()}}


def _check_state(name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other shapes, (...), than the expected ones, and scalars that are no numbers.

    Fused kernels would read beyond a smaller tensor.
    """
    for key in sorted({*found, *expected}):
        is_, should_be = (_kind(each.get(key)) for each in (found, expected))
        if is_ != should_be:
            raise CheckpointError(
                f"optimizer state '{name}/{key}' is {is_} instead of {should_be}. Resume the same model with the same "
                "--optimizer and --optimizer-state."
            )
        if not found[key].dim() and not found[key].isfinite():
            number = found[key].item()
            raise CheckpointError(f"optimizer state '{name}/{key}' is {number}: it is damaged. Start the run again.")


def _kind(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")


def _require_dense(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters with gaps or overlaps in memory, which fused kernels would step wrongly."""
    for name, parameter in parameters.items():
        dense = torch.empty_like(parameter, device="meta")  # keeps the layout if there are none
        layouts = zip(parameter.shape, parameter.stride(), dense.stride(), strict=True)
        if any(own != filled for size, own, filled in layouts if size > 1) and parameter.numel() > 1:
            raise ModelError(
                f"the parameter '{name}' is a view with gaps or overlaps in memory; make it of x.contiguous() instead."
            )


class ParameterOptimizers:
    """SGD, AdamW, schedule-free AdamW or the rules of ``make`` over named parameters, one parameter at a time.

    Either call :meth:`apply_in_backward` once, after which every backward pass updates the parameters and leaves no
    gradients behind (one backward per step), or let gradients accumulate, after :meth:`hold`, and call :meth:`step`.
    Weight decay applies to all parameters, as in torch. Parameters that do not require gradients are left out.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        make: MakeRule | None = None,
    ) -> None:
        self.settings, self._make = settings, make
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        _require_dense(self.parameters)
        self._rules = {name: _rule(name, p, settings, make) for name, p in self.parameters.items()}
        self._handles, self._places = list[RemovableHandle](), list[RemovableHandle]()
        self._lr_scales: Mapping[str, float] = {}
        self._in_parts = set[str]()
        self._left_alone: Container[str] | None = ()

    def apply_in_backward(self) -> list[RemovableHandle]:
        """Step and free each gradient as soon as backward has accumulated it; returns the hooks' handles.

        The hooks refer to this object weakly: autograd keeps them out of the garbage collector's sight, so that a
        strong reference would keep the parameters in memory for good.
        """
        if not self._handles:
            own = weakref.ref(self)
            for name, parameter in self.parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: _apply_through(own, name))
                self._handles.append(hook)
        return self._handles

    def pause(self) -> None:
        """Let backward passes leave their gradients, until :meth:`resume`."""
        self._left_alone = None

    def resume(self, without: Container[str] = ()) -> None:
        """Let backward passes apply gradients again, but for those of some parameters, for :meth:`step`."""
        self._left_alone = without

    def hold(self) -> None:
        """Prepare gradients that accumulate over several backward passes; it must come before the first of them."""
        if not self._places:
            self._places = place_small_gradients(self.parameters.values())

    def apply_in_parts(self, layers: Iterable[nn.Module]) -> None:
        """Let :meth:`apply_in_backward` take large gradients of convolutions among these layers in parts.

        Each layer must run once in a step, and its weight must be used nowhere else: a part is final. Without hooks,
        and on a GPU, where no gradient is computed in parts, nothing changes.
        """
        if uses_devices():  # what is counted on the meta device is then the whole gradient, too
            return
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for layer in (each for each in layers if isinstance(each, LeanConv2d)):
            name = names.get(id(layer._parameters.get("weight")))
            if name is not None and isinstance(self._rules[name], PartialRule):
                layer.update = _ThroughRule(weakref.ref(self), name)
                self._in_parts.add(name)

    def detach_hooks(self) -> None:
        """Undo :meth:`apply_in_backward` and :meth:`hold`."""
        for handle in (*self._handles, *self._places):
            handle.remove()
        self._handles, self._places = [], []

    def step(self) -> None:
        """Apply and free every gradient, one parameter after the other."""
        for name in self.parameters:
            self._apply(name)

    def make_state(self, names: Container[str]) -> None:
        """On the meta device, make the state that a first step leaves of these parameters; others have none then."""
        for rule in self._rules.values():
            if rule.state:
                rule.state = {}
        self.train()
        for name, parameter in self.parameters.items():
            if name in names:
                _make_gradient(parameter)
                self._apply(name)

    def make_gradients(self, names: Container[str]) -> None:
        """On the meta device, make the gradients of these parameters, as an earlier micro-batch leaves them."""
        for name, parameter in self.parameters.items():
            if name in names:
                _make_gradient(parameter)

    def watch_gradients(self) -> set[str]:
        """Names of parameters whose gradients have arrived, which grow from now on; those updated in parts are in it.

        It must come after :meth:`apply_in_backward`.
        """
        arrived = set(self._in_parts if self._handles else ())
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.add(name))
        return arrived

    def divide_gradients(self, by: Tensor) -> None:
        """Divide every gradient that is held by a scalar."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(by)

    def clip_gradients(self, norm: float) -> None:
        """Scale all gradients that are held such that their norm together is at most ``norm``; no copies are made."""
        nn.utils.clip_grad_norm_(self.parameters.values(), norm, foreach=False)

    def zero_grad(self) -> None:
        """Free all gradients without applying them."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def set_lr_factor(self, factor: float) -> None:
        """Set the learning rate to ``settings.lr * factor``, times a parameter's own scale if it has one."""
        for name, rule in self._rules.items():
            rule.lr = self.settings.lr * self._lr_scales.get(name, 1.0) * factor

    def scale_lr(self, scales: Mapping[str, float]) -> None:
        """Set learning rates of single parameters: multiples of ``settings.lr``, by name."""
        self._lr_scales = dict(scales)
        self.set_lr_factor(1.0)

    def train(self) -> None:
        """Put the trained weights in place; required before a step after :meth:`average`."""
        for rule in self._averaging().values():
            rule.switch(to_average=False)

    def average(self) -> None:
        """Put the averaged weights in place if the optimizer averages; otherwise do nothing."""
        for rule in self._averaging().values():
            rule.switch(to_average=True)

    def averaged(self) -> dict[str, Deferred]:
        """The averaged weights by parameter name, computed when saved; empty if those in place are saved."""
        trained = {name: rule for name, rule in self._averaging().items() if not rule.averaged}
        return {name: Deferred(self.parameters[name].detach(), rule.average) for name, rule in trained.items()}

    def _averaging(self) -> Mapping[str, _AveragingRule]:
        averages = self.settings.averages or self.settings.ema is not None
        return cast("Mapping[str, _AveragingRule]", self._rules) if averages else {}

    def state(self) -> dict[str, Tensor]:
        """The live tensors of optimizer state, of any shape, by flat names (``features.0.weight/momentum_buffer``)."""
        return {f"{name}/{key}": value for name, rule in self._rules.items() for key, value in rule.state.items()}

    def change_state(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Replace the tensors of the state, of any shape, by ``change(name, tensor)``, parameter by parameter."""
        for name, rule in self._rules.items():
            rule.state = {key: change(name, value) for key, value in rule.state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state from :meth:`state`: the tensors themselves if their layout fits, else copies.

        Raises:
            CheckpointError: a name, shape or type is not that of these parameters' state, or a scalar is not finite.
        """
        restored: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        for flat_name, value in state.items():
            name, _, key = flat_name.rpartition("/")
            if name not in restored:
                raise CheckpointError(f"optimizer state '{flat_name}' belongs to no parameter. Resume the same model.")
            restored[name][key] = value
        for name, values in restored.items():
            parameter = self.parameters[name]
            if values:
                _check_state(name, values, _expected_state(name, parameter, self.settings, values, self._make))
            for key, value in values.items():
                shaped = value.shape == parameter.shape
                values[key] = fit(value, parameter) if shaped else value.to(parameter.device)
        for name, rule in self._rules.items():
            rule.state = restored[name]

    def release(self) -> None:
        """Drop hooks, gradients and all optimizer state; the object cannot be used afterwards."""
        self.detach_hooks()
        self.zero_grad()
        self._rules.clear()
        self.parameters.clear()

    def _apply(self, name: str) -> None:
        parameter = self.parameters[name]
        if parameter.grad is not None:
            self._rules[name].step(parameter)
            parameter.grad = None


def _make_gradient(parameter: nn.Parameter) -> None:
    dtype = parameter.grad_dtype or parameter.dtype  # that of use_float_gradients
    parameter.grad = torch.empty_like(parameter, dtype=dtype, requires_grad=False)


class _ThroughRule:
    """Updates a weight by parts of its gradient, and refers to its optimizers weakly, as hooks do."""

    def __init__(self, reference: weakref.ref[ParameterOptimizers], name: str) -> None:
        self._reference, self._name = reference, name

    def serves(self, weight: Tensor) -> bool:
        """Whether the optimizers step this very parameter, of any shape, in the backward pass."""
        optimizers = self._reference()
        return optimizers is not None and bool(optimizers._handles) and optimizers.parameters[self._name] is weight

    def __call__(self, parts: Iterable[tuple[int, Tensor]]) -> None:
        """Apply parts (N,), each with the number of its first value in memory order."""
        optimizers = self._reference()
        assert optimizers is not None
        rule, parameter = cast("PartialRule", optimizers._rules[self._name]), optimizers.parameters[self._name]
        rule.begin(parameter)
        for first, gradient in parts:
            rule.step_part(parameter, gradient, first)
            del gradient  # before the next part is made


def _apply_through(reference: weakref.ref[ParameterOptimizers], name: str) -> None:
    optimizers = reference()
    if optimizers is not None and optimizers._left_alone is not None and name not in optimizers._left_alone:
        optimizers._apply(name)
