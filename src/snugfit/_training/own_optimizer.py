"""Optimizers from Python: a function makes an object of ``torch.optim`` for each parameter, as its only group.

In a prepared process none of them imports what only compilers need (``memory/deferred_imports.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from snugfit._training.finite import first_not_finite
from snugfit.errors import UsageError, reason_of
from snugfit.lean.update_rules import UpdateRule, fit_gradient
from snugfit.memory import is_out_of_memory
from snugfit.memory.tensors import tensor_peak_bytes

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
"""From a group of one parameter, with its name, to an optimizer of that."""
_NUMBER = ":number"
"""Ends the names of a state's numbers, which are stored as tensors without dimensions."""
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
_TRIED_STEPS = 4


class _OwnRule:
    """The steps of one parameter by an optimizer from Python, which is made with the first of them.

    Attributes:
        lr: share of the learning rate that the optimizer was made with.
    """

    def __init__(
        self, make: MakeOptimizer, name: str, parameter: nn.Parameter, devices: Mapping[str, torch.device]
    ) -> None:
        self.lr = 1.0
        self._make, self._name, self._parameter, self._devices = make, name, parameter, devices
        self._optimizer: Optimizer | None = None

    def step(self, parameter: Tensor) -> None:
        """Apply the gradient of the parameter of any shape."""
        fit_gradient(parameter)
        optimizer = self._made()
        for group in optimizer.param_groups:
            group["lr"] = self._peak * self.lr
        optimizer.step()

    def _made(self) -> Optimizer:
        if self._optimizer is None:
            self._optimizer = self._make([(self._name, self._parameter)])
            _require_usable(self._optimizer, self._name, self._parameter)
            self._peak = self._optimizer.param_groups[0]["lr"]
        return self._optimizer

    @property
    def settings(self) -> dict[str, str]:
        """Those of its parameter group, as text; without the learning rate, which every step sets."""
        group = self._made().param_groups[0]
        return {key: repr(value) for key, value in group.items() if key not in ("params", "lr")}

    @property
    def state(self) -> dict[str, Tensor]:
        """The live tensors of the state, of any shapes, and its numbers as tensors without dimensions."""
        kept = {} if self._optimizer is None else self._optimizer.state.get(self._parameter, {})
        return dict(self._stored(key, value) for key, value in kept.items())

    @state.setter
    def state(self, values: Mapping[str, Tensor]) -> None:
        if values:
            self._made().state[self._parameter] = {
                key.removesuffix(_NUMBER): value.item()
                if key.endswith(_NUMBER)
                else value.to(self._devices.get(key, value.device))
                for key, value in values.items()
            }

    def _stored(self, key: str, value: object) -> tuple[str, Tensor]:
        if not isinstance(key, str) or "/" in key:
            raise UsageError(
                f"optimizer= keeps {key!r} of the parameter '{self._name}'; name it by a text without a slash."
            )
        if isinstance(value, Tensor):
            return key, value
        if type(value) not in _DTYPES:
            raise UsageError(
                f"optimizer= keeps '{key}', a {type(value).__name__}, of the parameter '{self._name}'; checkpoints "
                "hold tensors and numbers of an optimizer's state."
            )
        return key + _NUMBER, torch.tensor(value, dtype=_DTYPES[type(value)])


class _Counted:
    """Stands on the meta device for an optimizer that cannot step there; makes as much state and temporaries."""

    def __init__(self, found: Mapping[str, Tensor], temporaries: int) -> None:
        self.lr, self._found, self._temporaries = 1.0, found, temporaries
        self.state: dict[str, Tensor] = {}

    def step(self, parameter: Tensor) -> None:
        """Make the state of a parameter of any shape."""
        self.state = self.state or {key: torch.empty_like(value) for key, value in self._found.items()}
        torch.empty(self._temporaries, dtype=torch.uint8, device="meta")


class OwnOptimizer:
    """Makes the update rule of each parameter by a function from Python, which is tried for all of them first.

    Attributes:
        share: bytes of state per byte of the parameters, after a step.

    Args:
        make: the function.
        named: the parameters, on the meta device; those without gradients are left out.
        device: where they will be trained.

    Raises:
        UsageError: the optimizer cannot be used, or its steps do not continue from the state that a checkpoint holds.
    """

    def __init__(self, make: MakeOptimizer, named: Iterable[tuple[str, nn.Parameter]], device: torch.device) -> None:
        if not callable(make):
            raise UsageError(f"optimizer= is {make!r}; pass a function of a parameter group.")
        self._make, self._device = make, device
        self._devices: dict[str, dict[str, torch.device]] = {}
        self._measured: dict[str, tuple[dict[str, Tensor], int]] = {}
        state = weights = 0
        for name, parameter in named:
            if parameter.requires_grad:
                state, weights = state + self._try(name, parameter), weights + parameter.nbytes
        self.share = state / max(weights, 1)

    def __call__(self, name: str, parameter: nn.Parameter) -> UpdateRule:
        """The rule of a parameter of any shape."""
        if parameter.is_meta and name in self._measured:
            return _Counted(*self._measured[name])
        return _OwnRule(self._make, name, parameter, self._devices.get(name, {}))

    def _try(self, name: str, parameter: nn.Parameter) -> int:
        """The bytes of the state of a parameter of any shape, whose steps can be resumed from it."""
        try:
            self._require_resumable(name, parameter)
            return sum(each.nbytes for each in self._state_of(name, parameter).values())
        except Exception as error:
            if isinstance(error, UsageError) or is_out_of_memory(error):
                raise
            raise UsageError(f"optimizer= failed for the parameter '{name}': {reason_of(error)}.") from error

    def _require_resumable(self, name: str, parameter: nn.Parameter) -> None:
        """Compare steps of a tiny parameter, of as many dimensions (...), with those from its restored state.

        A setting that a step changes may matter later than in these steps, as a counter does.
        """
        tiny = _sample(parameter, self._device, most=2)
        rule = self(name, tiny)
        _step(rule, tiny)
        saved = {key: value.clone() for key, value in rule.state.items()}
        self._devices[name] = {key: value.device for key, value in saved.items()}
        copy = nn.Parameter(tiny.detach().clone())
        resumed = _OwnRule(self._make, name, copy, self._devices[name])
        resumed.state = saved
        settings = resumed.settings
        for _ in range(_TRIED_STEPS):
            _step(rule, tiny)
            _step(resumed, copy)
        if not torch.allclose(tiny, copy, rtol=0, atol=0, equal_nan=True):
            raise UsageError(
                f"optimizer= does not continue with the same steps from its saved state, of the parameter '{name}': it "
                "keeps something outside of Optimizer.state, or draws random numbers. A resumed run would differ."
            )
        if changed := [key for key, value in resumed.settings.items() if value != settings.get(key)]:
            raise UsageError(
                f"optimizer= changes '{changed[0]}' of the parameter group of '{name}' in its steps; keep it in "
                "Optimizer.state, because checkpoints hold nothing else. A resumed run would differ."
            )
        _require_steady(name, saved, rule.state)

    def _state_of(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter of any shape after a step, on the meta device or, if it cannot step there, really.

        In the latter case it is kept for later passes on the meta device, with the bytes of a step's temporaries.
        """
        try:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"))
            rule = self(name, empty)
            _step(rule, empty)
            return rule.state
        except Exception as error:
            if is_out_of_memory(error):
                raise
        real = _sample(parameter, self._device)
        rule = self(name, real)
        _step(rule, real)
        held = [real, *rule.state.values()]
        temporaries = tensor_peak_bytes(lambda: _step(rule, real), held) - sum(each.nbytes for each in (*held, real))
        state = {key: torch.empty_like(value, device="meta") for key, value in rule.state.items()}
        self._measured[name] = state, temporaries
        return state


def _require_steady(name: str, first: Mapping[str, Tensor], last: Mapping[str, Tensor]) -> None:
    """Refuse a state, of any shapes, that grows after the first step, which plans measure, or that is not finite."""
    for key, value in last.items():
        if value.dim() and (key not in first or first[key].shape != value.shape):
            raise UsageError(
                f"optimizer= makes or enlarges '{key}' of the parameter '{name}' after its first step; make all of its "
                "state in that, because the memory of one step is planned."
            )
    if found := first_not_finite(last, ()):
        raise UsageError(
            f"optimizer= keeps NaN or infinity as '{found.removesuffix(_NUMBER)}' of the parameter '{name}'; use a "
            "finite number, because checkpoints hold no others."
        )


def _sample(like: nn.Parameter, device: torch.device, most: int | None = None) -> nn.Parameter:
    """A parameter (...) of the shape of ``like``, or up to ``most`` in each dimension, with values from -1 to 1."""
    shape = like.shape if most is None else torch.Size(min(size, most) for size in like.shape)
    return nn.Parameter(torch.linspace(-1, 1, shape.numel(), dtype=like.dtype, device=device).reshape(shape))


def _step(rule: UpdateRule, parameter: nn.Parameter) -> None:
    """A step of a parameter of any shape, by a gradient that is equal to it; it takes no more than one in training."""
    parameter.grad = parameter.detach().clone()
    rule.step(parameter)
    parameter.grad = None


def _require_usable(optimizer: Optimizer, name: str, parameter: nn.Parameter) -> None:
    """Refuse what is no optimizer of a parameter of any shape alone, without a closure and with a learning rate."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer= returned {kind} for the parameter '{name}'; return a torch.optim.Optimizer of it, as "
            "functools.partial(torch.optim.RMSprop, lr=0.001) does."
        )
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if len(held) != 1 or held[0] is not parameter:
        which = f"1 parameter, which is not '{name}'" if len(held) == 1 else f"{len(held)} parameters"
        raise UsageError(f"the {kind} of optimizer= has {which}; make it of the group that the function gets.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(f"{kind} needs a closure, and each gradient is applied once; use another optimizer=.")
    if not isinstance(optimizer.param_groups[0].get("lr"), (int, float, Tensor)):
        raise UsageError(f"{kind} has no learning rate 'lr' for the parameter '{name}', which the schedule multiplies.")
