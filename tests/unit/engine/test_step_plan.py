"""Plans of other libraries' loops: trials that change nothing, equal micro-batches, and budgets that hold."""

import copy
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._core.profile import ProbeLine, ProbePoint, Profile
from snugfit._engine.kept_values import values_kept
from snugfit._engine.step_plan import LibraryStep, StepPlanner, _with_kernels_of_all
from snugfit.errors import UsageError
from snugfit.integrations._recomputation import ForwardRecomputation, NoRecomputation
from snugfit.memory import Baseline, MemoryLimit
from snugfit.strategies.memory_estimates import with_safety

CPU = torch.device("cpu")


def small():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(), nn.Flatten(), nn.Linear(256, 5))


def step_of(model, optimizer, recomputation=None, scale=1.0):
    images, targets = torch.randn(4, 1, 8, 8) * scale, torch.randint(5, (4,))

    def passes(count):
        F.cross_entropy(model(images[:count]), targets[:count]).backward()

    return LibraryStep(model, [optimizer], passes, recomputation or NoRecomputation(), images.nbytes)


@pytest.mark.parametrize("scale", [1.0, float("inf")])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_trials_change_nothing(kind, scale):
    model = small()
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1)
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    step = step_of(model, optimizer, scale=scale)
    drawn = torch.get_rng_state()
    with step.unchanged():
        step.trial("")(4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1
    assert all(parameter.grad is None for parameter in model.parameters())
    step.passes(4)
    assert any(parameter.grad.abs().sum() != 0 for parameter in model.parameters()), "no hook is left"


class Collecting(nn.Module):
    """Changes in a pass what layers hold: a list, a count, a buffer that is assigned, a metric, and a frozen weight."""

    def __init__(self):
        super().__init__()
        self.net, self.key = small(), small().requires_grad_(False).to(memory_format=torch.channels_last)
        self.outputs, self.names, self.count, self.total = [], {}, 0, torch.zeros(3)
        self.register_buffer("center", torch.zeros(5))

    def forward(self, x):
        out = self.net(x)
        with torch.no_grad():
            for key, own in zip(self.key.parameters(), self.net.parameters(), strict=True):
                key.mul_(0.9).add_(own, alpha=0.1)
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        self.outputs.append(out.detach())
        self.names["last"] = self.feature = out
        self.total += 1
        self.count += 1
        return out


def test_trials_change_nothing_that_layers_hold():
    model = Collecting()
    before, outputs, total = copy.deepcopy(model.state_dict()), model.outputs, model.total
    step = step_of(model, torch.optim.SGD(model.net.parameters(), lr=0.1))
    with step.unchanged():
        step.trial("")(4)
        assert model.count == len(outputs) == 2 and not torch.equal(model.center, before["center"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.outputs is outputs and model.total is total and not total.any()
    assert (model.outputs, model.names, model.count) == ([], {}, 0) and not hasattr(model, "feature")


class OwnRate(torch.optim.SGD):
    """Decays weights by a rate of its own, and has an attribute."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.decay = 0.5

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each.mul_(self.decay)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_optimizer_with_a_rate_of_its_own_changes_no_weight(layout):
    model = small().to(memory_format=layout)
    optimizer = OwnRate(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(model.state_dict())
    step = step_of(model, optimizer)
    with step.unchanged():
        step.trial("")(4)
        assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_values_come_back_to_any_layout_and_type():
    tensors = [torch.randn(3, 4, 5, 6), torch.randn(8, 6).bfloat16().t(), torch.randn(4, 6)[:, ::2], torch.tensor(2.0)]
    tensors.append(torch.empty(0, 3))
    before = [each.clone() for each in tensors]
    with pytest.raises(RuntimeError, match="failed"), values_kept(tensors):
        for each in tensors:
            each.fill_(7)
        raise RuntimeError("failed")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, before, strict=True))


def test_all_schedules_need_what_kernels_of_a_new_size_took_the_first():
    first, second = (ProbeLine(name, 0, 0, 0, 0, 0, shape_bytes=most) for name, most in (("", 5.0), ("all", 0.0)))
    found = _with_kernels_of_all({"": first, "all": second})
    assert [each.shape_bytes for each in found.values()] == [5.0, 5.0]


def test_trials_draw_no_random_numbers_of_python_and_numpy():
    model = small()
    step = step_of(model, torch.optim.SGD(model.parameters()))
    state = random.getstate()
    random.seed(1)
    np.random.seed(1)
    with step.unchanged():
        random.random()
        np.random.random()
    found = (random.random(), np.random.random())
    random.seed(1)
    np.random.seed(1)
    assert found == (random.random(), np.random.random())
    random.setstate(state)


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = small()
    with pytest.raises(UsageError, match="cannot plan LBFGS, whose step needs a closure"):
        step_of(model, torch.optim.LBFGS(model.parameters()))


def test_a_trial_takes_the_memory_of_state_and_gradients():
    """The optimizer's state exists while the next passes run; both are gone when the trial is."""
    model = small()
    seen = []

    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            seen.append((len(self.state), sum(p.grad is not None for p in model.parameters())))
            return super().step(closure)

    step = step_of(model, Watched(model.parameters()))
    with step.unchanged():
        trial = step.trial("")
        trial(2)
        trial(2)
    count = len(list(model.parameters()))
    assert seen == [(0, count), (count, count)]


def test_recomputation_gives_the_same_gradients_and_is_undone():
    model = small().double().train()
    plain = copy.deepcopy(model)
    images = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    recomputation = ForwardRecomputation(model, images)
    assert recomputation.schedules
    for schedule in recomputation.schedules:
        for network in (model, plain):
            network.zero_grad()
        recomputation.use(schedule)
        torch.manual_seed(3)
        model(images).square().sum().backward()
        torch.manual_seed(3)
        plain(images).square().sum().backward()
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=1e-10)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)
    recomputation.use("")
    assert "forward" not in vars(model)


def test_dropouts_follow_the_mode_of_the_network():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, images):
            return F.dropout(self.last(F.relu(self.first(images))), 0.5, self.training)

    model, images = Dropping(), torch.randn(2, 1, 8, 8)
    recomputation = ForwardRecomputation(model, images)
    for schedule in recomputation.schedules:
        recomputation.use(schedule)
        assert (model.train()(images) == 0).any()
        assert not (model.eval()(images) == 0).any()


def test_a_forward_pass_that_a_library_replaced_is_recomputed_inside_of_that():
    model, images = small().eval(), torch.randn(2, 1, 8, 8)
    of_class = model.forward
    replaced = model.forward = lambda images: 2 * of_class(images)
    assert not ForwardRecomputation(model, images).schedules
    recomputation = ForwardRecomputation(model, images, lambda run: lambda images: 2 * run(images))
    plain = model(images)
    recomputation.use(recomputation.schedules[-1])
    assert model.forward is not replaced and torch.equal(model(images), plain)
    recomputation.use("")
    assert model.forward is replaced


def planned(memory, images=32, side=32, norms=False):
    """The record of a network's steps within a budget, and their page faults; only one with norms may be recomputed."""
    import itertools
    import resource

    import torch
    from torch import nn
    from torch.nn import functional as F

    from snugfit._engine.step_plan import LibraryStep
    from snugfit.integrations._budget import LoopBudget
    from snugfit.integrations._recomputation import recomputation_of

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), *([nn.BatchNorm2d(16)] if norms else []), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    example = torch.randn(images, 3, side, side), torch.randint(10, (images,))

    def passes(count):
        F.cross_entropy(model(example[0][:count]), example[1][:count]).backward()

    budget, recomputation = LoopBudget(memory), []

    def make():
        recomputation.append(recomputation_of(model if norms else None, example[0]))
        return LibraryStep(model, [optimizer], passes, recomputation[0], example[0].nbytes)

    plan = budget.plan(model, make, images)
    recomputation[0].use(plan.recomputation)
    budget.start()
    faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(5):
        for _ in range(plan.micro_batches):
            budget.begin(plan.micro_batch, trains=True)
            passes(plan.micro_batch)
            budget.end()
        optimizer.step()
        model.zero_grad()
        budget.steps += 1
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    budget.close()
    return {
        **vars(budget.record),
        "faults": [after - before for before, after in itertools.pairwise(faults)],
    }


def budgets():
    import snugfit

    snugfit.prepare_process(1)
    return [planned("300MB"), planned("22MB"), planned("45MB", images=2, side=192, norms=True)]


def smallest():
    """The record of the smallest budget that an error names, what was too little, and whether limits are restored."""
    import resource

    import snugfit
    from snugfit.errors import InfeasibleBudgetError

    snugfit.prepare_process(1)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        planned("7MB")
    except InfeasibleBudgetError as error:
        restored = resource.getrlimit(resource.RLIMIT_DATA) == before
        return {"message": str(error), "restored": restored, "record": planned(error.smallest_bytes)}


def copying(memory):
    """The record of a loop that copies the optimizer's state between steps, four times."""
    import copy

    import torch
    from torch import nn

    from snugfit._engine.step_plan import LibraryStep
    from snugfit.integrations._budget import LoopBudget
    from snugfit.integrations._recomputation import NoRecomputation

    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer, rows = torch.optim.AdamW(model.parameters()), torch.randn(8, 1024)

    def passes(count):
        model(rows[:count]).square().mean().backward()

    def between(count, states):
        assert count in (1, 2, 4, 8) and all(each["exp_avg"].is_meta for each in states)
        return 4 * sum(tensor.nbytes for each in states for tensor in each.values())

    budget = LoopBudget(memory)
    budget.plan(model, lambda: LibraryStep(model, [optimizer], passes, NoRecomputation(), rows.nbytes, between), 8)
    budget.start()
    for _ in range(3):
        budget.begin(8)
        passes(8)
        optimizer.step()
        model.zero_grad()
        budget.begin(8)
        copies = [copy.deepcopy(optimizer.state_dict()) for _ in range(4)]
        budget.end()
        del copies
    budget.close()
    return {**vars(budget.record), "kept": budget.loop_plan.kept_bytes}


def smallest_of_copies():
    """What is too little, and the record of the smallest budget that an error names; steps alone take 20 MB."""
    import snugfit
    from snugfit.errors import InfeasibleBudgetError

    snugfit.prepare_process(1)
    message, least = "", 0
    try:
        copying("40MB")
    except InfeasibleBudgetError as error:  # it keeps the first network
        message, least = str(error), error.smallest_bytes
    return {"message": message, "record": copying(least)}


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_what_a_loop_copies_between_steps_is_planned(fresh_process):
    found = fresh_process(smallest_of_copies, helpers=(copying,))["smallest_of_copies"]
    assert "does not fit memory=40.0 MB" in found["message"]
    record = found["record"]
    assert record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"]
    assert record["predicted_bytes"] - record["kept"] < 1.1 * record["measured_bytes"], "four copies of 8.4 MB"


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_measured_is_at_most_predicted_which_is_at_most_the_budget(fresh_process):
    whole, parts, recomputed = fresh_process(budgets, helpers=(planned,))["budgets"]
    for record in (whole, parts, recomputed):
        assert record["enforced"] and record["steps"] == 5
        assert 0 < record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"], record
    assert whole["faults"][-1] < 0.7 * whole["faults"][1], "freed memory is kept within a step"
    assert whole["micro_batches"] == 1 and not whole["recomputation"]
    assert parts["micro_batches"] > 1 and parts["micro_batches"] * parts["micro_batch"] == 32
    assert recomputed["recomputation"], "batch norms need both images, which do not fit without recomputation"


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_the_smallest_budget_of_the_error_is_enough(fresh_process):
    found = fresh_process(smallest, helpers=(planned,))["smallest"]
    assert "does not fit memory=7.0 MB" in found["message"] and "Smallest budget that would do" in found["message"]
    record = found["record"]
    assert found["restored"] and record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"]


def test_recomputation_is_not_chosen_where_it_saves_no_micro_batch():
    """Whatever the seconds: here it was measured as twice as fast."""
    model = small()
    planner = StepPlanner(
        step_of(model, torch.optim.SGD(model.parameters())), 8, MemoryLimit(60_000_000, Baseline(0, 0), CPU), None
    )

    def fitting(plain, recomputed):
        lines = {"(0) 1": line_of(recomputed, 0.5), "": line_of(plain, 1.0)}
        return sorted(planner._fitting(Profile((), lines)))

    assert [found[1:] for found in fitting(10_000_000, 9_000_000)] == [(2, "")]
    assert [found[1:] for found in fitting(10_000_000, 5_000_000)] == [(1, "(0) 1"), (2, "")]
    assert [found[1:] for found in fitting(100_000_000, 10_000_000)] == [(2, "(0) 1")]


def line_of(sample_bytes, seconds):
    return ProbeLine("", 0.0, float(sample_bytes), 0.0, 0.0, seconds)


@pytest.mark.parametrize("plain", [48_000_000, 51_000_000, 56_000_000])
def test_recomputation_is_measured_wherever_the_plain_step_does_not_fit(plain):
    """Not only where it exceeds the budget without the safety that a prediction adds."""
    model = small()
    planner = StepPlanner(
        step_of(model, torch.optim.SGD(model.parameters())), 8, MemoryLimit(60_000_000, Baseline(0, 0), CPU), None
    )
    line = ProbeLine("", plain, 0.0, 0.0, 0.0, 1.0, (ProbePoint(8, plain, 1.0),), shape_bytes=1e6)
    fits = planner._fits(Profile((), {"": line}), line, 8)
    assert planner._may_help({"": line}, 60_000_000) == (not fits)
    assert fits == (plain == 48_000_000)


@pytest.mark.parametrize(("second", "most"), [(90_000_000, 66_000_000), (48_000_000, 58_000_000)])
def test_the_smallest_budget_holds_what_measuring_a_single_size_leaves(second, most):
    """What the process left, here 8 MB, counts for each of two new sizes, unless a second size can be measured, too."""
    model = small()
    planner = StepPlanner(
        step_of(model, torch.optim.SGD(model.parameters())), 8, MemoryLimit(200_000_000, Baseline(0, 0), CPU), None
    )
    points = (ProbePoint(2, 40_000_000, 1.0), ProbePoint(8, second, 1.0))
    line = ProbeLine("", 40_000_000, 0.0, 0.0, 0.0, 1.0, points, smallest_batch=2, shape_bytes=1e6)
    wide, before = Profile((), {"": line}, base_bytes=10_000_000), Profile((), start_bytes=2_000_000)
    assert planner._least(wide, line, before) == pytest.approx(with_safety(0, most), abs=2)
    assert planner._least(wide, line, before) > planner._predicted(wide, line, 2)
