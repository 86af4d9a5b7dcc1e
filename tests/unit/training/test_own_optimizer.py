"""One torch optimizer per parameter: equal to one of all, exact to resume, and refused where it would not be."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from decaying_momentum import DecayingMomentum
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer, RMSprop, SparseAdam

from snugfit._core.workload import OptimizerSettings
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.own_optimizer import OwnOptimizer
from snugfit.errors import CheckpointError, UsageError
from snugfit.memory.tensors import tensor_peak_bytes

SETTINGS = OptimizerSettings("python", lr=1.0, momentum=0.0, weight_decay=0.0)
CPU = torch.device("cpu")
STOCK = [RMSprop, AdamW, partial(AdamW, fused=True), Adagrad, Adafactor, torch.optim.ASGD, torch.optim.NAdam]


def network(device="cpu"):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    return layers.to(memory_format=torch.channels_last).to(device)


def step_gradients(module, step):
    torch.manual_seed(100 + step)
    images = torch.randn(4, 3, 8, 8, device=next(module.parameters()).device)
    nn.functional.cross_entropy(module(images), torch.zeros(4, dtype=torch.long, device=images.device)).backward()


def own(make):
    return OwnOptimizer(make, network("meta").named_parameters(), CPU)


@pytest.mark.parametrize("make", STOCK)
def test_steps_are_those_of_one_optimizer_of_all_to_the_bit(make):
    mine, theirs = network(), network()
    optimizers = ParameterOptimizers(mine.named_parameters(), SETTINGS, own(make))
    optimizers.apply_in_backward()
    stock = make(theirs.parameters())
    peak = stock.param_groups[0]["lr"]
    for step in range(5):
        optimizers.set_lr_factor(1 / (step + 1))
        stock.param_groups[0]["lr"] = peak * (1 / (step + 1))
        step_gradients(mine, step)
        assert all(each.grad is None for each in mine.parameters())
        step_gradients(theirs, step)
        stock.step()
        stock.zero_grad()
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))


@pytest.mark.parametrize("make", [*STOCK, DecayingMomentum])
def test_resumed_steps_are_the_same_to_the_bit(make):
    module, resumed = network(), network()
    first = ParameterOptimizers(module.named_parameters(), SETTINGS, own(make))
    for step in range(3):
        step_gradients(module, step)
        first.step()
    resumed.load_state_dict(module.state_dict())
    second = ParameterOptimizers(resumed.named_parameters(), SETTINGS, own(make))
    second.load_state({name: value.clone().contiguous() for name, value in first.state().items()})
    for step in range(3, 6):
        for each, optimizers in ((module, first), (resumed, second)):
            step_gradients(each, step)
            optimizers.step()
    assert all(map(torch.equal, module.parameters(), resumed.parameters()))
    assert first.state().keys() == second.state().keys()


def test_numbers_of_a_state_are_stored_as_tensors():
    optimizers = ParameterOptimizers(network().named_parameters(), SETTINGS, own(DecayingMomentum))
    module = nn.Module()
    assert optimizers.state() == {}, "as before the first step of any rule"
    module = network()
    optimizers = ParameterOptimizers(module.named_parameters(), SETTINGS, own(DecayingMomentum))
    step_gradients(module, 0)
    optimizers.step()
    state = {name.split("/")[1]: value for name, value in optimizers.state().items() if name.startswith("0.weight/")}
    numbers = {name: (value.item(), value.dtype) for name, value in state.items() if not value.dim()}
    assert numbers == {
        "k:number": (1, torch.int64),
        "decay:number": (1 / 3, torch.float64),
        "odd:number": (True, torch.bool),
    }


@pytest.mark.parametrize(("make", "share"), [(SGD, 0), (RMSprop, 1), (partial(AdamW, fused=True), 2), (Adagrad, 1)])
def test_bytes_of_state_are_those_after_a_step(make, share):
    assert own(make).share == pytest.approx(share, abs=0.06)  # a float32 step for each parameter
    doubles = OwnOptimizer(make, network("meta").double().named_parameters(), CPU)
    assert doubles.share == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize(
    ("make", "copies"),
    [(SGD, 0), (RMSprop, 1), (AdamW, 2), (partial(AdamW, fused=True), 2), (Adagrad, 1), (torch.optim.ASGD, 1)],
)
def test_a_step_on_the_meta_device_takes_what_it_takes_really(make, copies):
    def counted(device):
        layer = nn.Linear(1000, 100, bias=False, device=device)
        rules = OwnOptimizer(make, nn.Linear(1000, 100, bias=False, device="meta").named_parameters(), CPU)
        optimizers = ParameterOptimizers(layer.named_parameters(), SETTINGS, rules)

        def step():
            layer.weight.grad = torch.empty(100, 1000, device=device).zero_()
            optimizers.step()

        peak = tensor_peak_bytes(step, [layer], repeats=2)
        return peak, sum(value.nbytes for value in optimizers.state().values() if value.dim())

    (peak, state), (real, _) = counted("meta"), counted("cpu")
    assert state == copies * 400_000 and peak == pytest.approx(real, abs=1000)


def test_state_of_another_optimizer_is_refused():
    module = network()
    optimizers = ParameterOptimizers(module.named_parameters(), SETTINGS, own(RMSprop))
    step_gradients(module, 0)
    optimizers.step()
    other = ParameterOptimizers(network().named_parameters(), SETTINGS, own(AdamW))
    with pytest.raises(CheckpointError, match=r"'0\.weight/exp_avg' is absent instead of float32"):
        other.load_state(optimizers.state())


class Keeping(Optimizer):
    """Plain steps, and in its state what ``kept`` returns for a parameter, the state and the group."""

    def __init__(self, parameters, kept):
        super().__init__(parameters, {"lr": 0.1, "k": 0})
        self.kept = kept

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
                self.state[parameter] |= self.kept(parameter, self.state[parameter], group)


def averaged_at_times(parameter, state, group):
    """Every sixth step, which the group counts, halves the distance to slow weights."""
    group["k"] += 1
    slow = state.get("slow", parameter.clone())
    if group["k"] % 6 == 0:
        parameter.copy_(slow.add_(parameter - slow, alpha=0.5))
    return {"slow": slow}


def first_in_the_third_step(parameter, state, group):
    steps = state.get("steps", 0) + 1
    return {"steps": steps} if steps < 3 else {"steps": steps, "late": parameter.clone()}


def history(parameter, state, group):
    return {"all": torch.cat([state["all"], parameter[None]]) if "all" in state else parameter[None].clone()}


class WithList(Optimizer):
    """Keeps a list."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [parameter.detach().clone()]


class WithoutRate(WithList):
    """Has no learning rate."""

    def __init__(self, parameters):
        Optimizer.__init__(self, parameters, {})


OTHER = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (WithList, r"keeps 'history', a list, of the parameter '0\.weight'"),
        (WithoutRate, r"WithoutRate has no learning rate 'lr' for the parameter '0\.weight'"),
        (lambda group: SGD([OTHER]), r"has 1 parameter, which is not '0\.weight'"),
        (lambda group: SGD([*group, ("other", OTHER)]), r"has 2 parameters"),
        (lambda group: SGD([]), r"failed for the parameter '0\.weight': ValueError"),
        (SparseAdam, r"failed for the parameter '0\.weight': RuntimeError: SparseAdam does not support dense"),
        (torch.optim.LBFGS, "LBFGS needs a closure"),
        (torch.optim.Muon, r"failed for the parameter '0\.weight': ValueError"),
        (partial(DecayingMomentum, where="group"), r"does not continue .* '0\.weight'"),
        (partial(DecayingMomentum, where="attribute"), r"does not continue .* '0\.weight'"),
        (partial(Keeping, kept=averaged_at_times), r"changes 'k' of the parameter group of '0\.weight'"),
        (partial(Keeping, kept=first_in_the_third_step), r"makes or enlarges 'late' of .* after its first step"),
        (partial(Keeping, kept=history), r"makes or enlarges 'all' of .* after its first step"),
        (partial(Keeping, kept=lambda *_: {"best": float("inf")}), r"keeps NaN or infinity as 'best' of .*'0\.weight'"),
        (partial(Keeping, kept=lambda parameter, *_: {"a/b": parameter.clone()}), r"keeps 'a/b' of .* without a slash"),
        (partial(Keeping, kept=lambda parameter, *_: {3: parameter.clone()}), r"keeps 3 of .*'0\.weight'"),
        ("sgd", "optimizer= is 'sgd'; pass a function"),
    ],
)
def test_what_cannot_be_used_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        own(make)


def test_frozen_parameters_have_no_optimizer():
    layer = nn.Linear(2, 2, device="meta")
    layer.bias.requires_grad_(False)
    names = []
    OwnOptimizer(lambda group: names.append(group[0][0]) or SGD(group), layer.named_parameters(), CPU)
    assert set(names) == {"weight"}


def test_none_imports_what_only_compilers_need():
    script = """if True:
        import sys, torch
        from snugfit.memory.process import late_bytes, prepare_process
        prepare_process(1)
        known = len(sys.modules)
        from torch.optim import Adafactor, AdamW, NAdam, RMSprop
        for kind in (Adafactor, AdamW, NAdam, RMSprop):
            parameter = torch.nn.Parameter(torch.ones(3, 3))
            parameter.grad = torch.ones(3, 3)
            kind([("weight", parameter)]).step()
        print(late_bytes(), len(sys.modules) - known)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]


def test_out_of_memory_is_not_the_users_mistake():
    def fails(group):
        raise MemoryError

    with pytest.raises(MemoryError):
        own(fails)
