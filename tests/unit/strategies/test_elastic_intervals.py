"""Runs of ``elastic`` interval by interval: empty and refused selections, drift, and what a record says."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from elastic_samples import elastic_profile, layers, operator, tensor, tensor_profile, whole_steps
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from strategy_samples import workload
from torch import nn

import snugfit
from snugfit._core.profile import TensorProfile
from snugfit._core.record import IntervalRecord
from snugfit._training.events import Notice, RunDone
from snugfit.errors import BudgetExceededError, DivergedError, InfeasibleTimeError
from snugfit.selection.choice import Headroom, choose, needed_bytes
from snugfit.selection.network import Network
from snugfit.selection.timing import StepTimes
from snugfit.strategies.elastic import drift, runner
from snugfit.strategies.elastic.budgets import SelectionCosts
from snugfit.strategies.elastic.drift import drifted, looks_drifted, ratio_without_updates
from snugfit.strategies.elastic.strategy import Elastic
from snugfit.strategies.micro_batch import MicroBatching

OPTIONS = {"epochs": 2, "max_train": 64, "max_val": 20, "image_size": 8, "batch_size": 32, "strategy": "elastic"}
LAST = ("8.weight", "8.bias")


def net(statistics=True):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    module = nn.Sequential(*layers)
    if statistics:
        nn.init.uniform_(module[1].running_mean, 0.1, 0.3)
    return module


def plan(module=None, **options):
    options = {"time_ratio": 0.8, "interval": 1, **OPTIONS, **options}
    return snugfit.plan(net() if module is None else module, "digits", **options)


def notices(events):
    return [event.message for event in events if isinstance(event, Notice)]


def ranks(monkeypatch, *scores):
    """Give every tensor the same importance, one value per selection; the classifier's is 1."""
    made = iter(scores)

    def rank(strategy, chain, trainer, data, run):
        value = next(made)
        return {name: 1.0 if name in LAST else value for name in trainer.parameters}

    monkeypatch.setattr(runner, "rank_tensors", rank)


@pytest.mark.usefixtures("steady_times", "measured_once")
class TestRuns:
    @pytest.mark.parametrize("value", [0.0, -1.0])
    def test_an_empty_first_selection_is_an_error_with_advice(self, tmp_path, monkeypatch, value):
        ranks(monkeypatch, value)
        with pytest.raises(InfeasibleTimeError, match="lowers the loss") as caught:
            plan().run((), out=tmp_path / "run")
        assert "--lr" in str(caught.value) and "--scheme head" in str(caught.value)

    def test_updates_that_vanish_select_nothing(self, tmp_path):
        module = net()
        nn.init.ones_(module[1].bias)
        with pytest.raises(InfeasibleTimeError, match="--lr"):
            plan(module, lr=1e-30).run((), out=tmp_path / "run")

    def test_a_later_empty_selection_keeps_the_last_one_and_says_so(self, tmp_path, monkeypatch):
        ranks(monkeypatch, 1.0, -1.0)
        events = []
        record = plan().run((events.append,), out=tmp_path / "run")
        assert len(record.intervals) == 2 and record.intervals[0].tensors == record.intervals[1].tensors
        assert set(record.intervals[0].tensors) > set(LAST)
        assert any("keeping the selection" in text for text in notices(events))

    def test_an_importance_that_is_not_a_number_is_divergence(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch, pytest.raises(DivergedError, match="--lr"):
            ranks(patch, float("nan"))
            plan().run((), out=tmp_path / "run")
        with pytest.raises(DivergedError, match="epoch 1"):
            plan(lr=1e30).run((), out=tmp_path / "another")

    def test_refused_selections_become_smaller(self, tmp_path, monkeypatch):
        tried = []

        def fits(fit):
            tried.append(fit.trainer.selected)
            return len(tried) > 3

        monkeypatch.setattr(runner._ElasticRun, "_dry_run_fits", fits)
        events = []
        found = plan(memory="200MB", epochs=1, time_ratio=1.0, importance="weight")
        record = found.run((events.append,), out=tmp_path / "run")
        assert len(tried) == len(set(tried)) == 4, "far below the budget, too, every refusal counts"
        assert record.intervals[0].tensors == tried[-1] and len(tried[-1]) < len(tried[0])
        assert sum("taking a smaller one" in text for text in notices(events)) == 3

    def test_a_kept_selection_that_is_refused_ends_the_run(self, tmp_path, monkeypatch):
        """Instead of trying the same one for ever."""
        ranks(monkeypatch, 1.0, -1.0)
        answers = iter([True, *[False] * 50])
        monkeypatch.setattr(runner._ElasticRun, "_dry_run_fits", lambda fit: next(answers))
        with pytest.raises(BudgetExceededError, match="--memory"):
            plan(memory="200MB").run((), out=tmp_path / "run")
        assert len(list(answers)) == 49

    @pytest.mark.parametrize("scheme", ["elastic", "head"])
    def test_a_refusal_without_a_budget_is_an_error(self, tmp_path, monkeypatch, scheme):
        monkeypatch.setattr(runner._ElasticRun, "_dry_run_fits", lambda fit: False)
        with pytest.raises(BudgetExceededError, match=f"--scheme {scheme}"):
            plan(scheme=scheme, time_ratio=0.8 if scheme == "elastic" else None).run((), out=tmp_path / "run")

    def test_drift_selects_anew_among_all_tensors(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            runner, "looks_drifted", lambda interval: interval.first_epoch == 0 and interval.epochs == 1
        )
        monkeypatch.setattr(runner, "drifted", lambda *_: True)
        found = plan(interval=3, epochs=4, time_ratio=0.5)
        events = []
        record = found.run((events.append,), out=tmp_path / "run")
        assert [(i.first_epoch, i.epochs, i.profiled) for i in record.intervals] == [(0, 1, False), (1, 3, True)]
        assert len(record.intervals[0].tensors) < len(record.tensors)
        assert set(record.intervals[1].importance) == set(record.tensors) == {n for n, _ in net().named_parameters()}
        assert any("measured again" in text for text in notices(events))
        assert [phase.epochs for phase in record.phases] == [1, 3]

    def test_steps_that_keep_drifting_are_not_measured_again_at_once(self, tmp_path, monkeypatch):
        """What was just measured would come out the same: each epoch would cost a profile."""
        monkeypatch.setattr(runner, "looks_drifted", lambda interval: interval.epochs > 0)
        monkeypatch.setattr(runner, "drifted", lambda *_: True)
        record = plan(interval=2, epochs=6).run((), out=tmp_path / "run")
        assert [(i.epochs, i.profiled) for i in record.intervals] == [(1, False), (2, True), (1, False), (2, True)]

    def test_drift_without_memory_to_measure_goes_on(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            runner, "looks_drifted", lambda interval: interval.first_epoch == 0 and interval.epochs == 1
        )
        monkeypatch.setattr(runner, "drifted", lambda *_: True)
        found, events = plan(interval=3, epochs=2), []
        monkeypatch.setattr(drift.ElasticProbes, "tensors", lambda *_, **__: NoRoom)
        record = found.run((events.append,), out=tmp_path / "run")
        assert [interval.profiled for interval in record.intervals] == [False, False]
        assert any("no memory to measure" in text for text in notices(events))

    def test_measured_seconds_are_those_of_the_interval(self, tmp_path, monkeypatch):
        """Also where the selection stays what it was."""
        seen = []
        found = plan(time_ratio=1.0, importance="weight")
        monkeypatch.setattr(runner.np, "median", lambda values: float(seen.append(len(values)) or 0.125))
        record = found.run((), out=tmp_path / "run")
        assert record.intervals[0].tensors == record.intervals[1].tensors
        assert seen == [2, 2] and record.intervals[1].measured_seconds == 0.125

    def test_fresh_norms_are_told_of(self, tmp_path):
        for statistics, told in ((False, True), (True, False)):
            events = []
            plan(net(statistics), epochs=1).run((events.append,), out=tmp_path / str(statistics))
            assert any("so give --weights" in text for text in notices(events)) == told

    def test_what_the_user_froze_neither_trains_nor_is_ranked(self, tmp_path):
        module = net()
        module[0].weight.requires_grad_(False)
        record = plan(module, time_ratio=1.0, importance="weight").run((), out=tmp_path / "run")
        assert "0.weight" not in record.tensors and "0.bias" in record.tensors
        assert set(record.intervals[0].importance) == set(record.tensors)
        weights, fresh = load_file(tmp_path / "run" / "model.safetensors"), net().state_dict()
        assert torch.equal(weights["0.weight"], fresh["0.weight"])
        assert not torch.equal(weights["0.bias"], fresh["0.bias"])

    def test_a_frozen_tensor_takes_no_part_in_the_trial_step(self, tmp_path, monkeypatch):
        """Others' importance is told where it stays."""
        from snugfit.strategies.elastic import runner

        stepped = []
        make = runner.trial_updates

        def noted(*arguments):
            update = make(*arguments)

            def step(name, parameter):
                before = parameter.detach().clone()
                update(name, parameter)
                stepped.extend([name] if not torch.equal(before, parameter) else [])

            return step

        monkeypatch.setattr(runner, "trial_updates", noted)
        module = net()
        module[4].requires_grad_(False)
        plan(module, epochs=1, time_ratio=1.0).run((), out=tmp_path / "run")
        assert set(stepped) == {"0.weight", "0.bias", "1.weight", "1.bias", *LAST}

    @pytest.mark.parametrize(
        "options",
        [{"importance": "gradient"}, {"precision": "bfloat16"}, {"max_train": 3, "batch_size": 3}],
        ids=str,
    )
    def test_settings_run_through(self, tmp_path, options):
        events = []
        record = plan(**options).run((events.append,), out=tmp_path / "run")
        assert all(set(LAST) < set(interval.tensors) for interval in record.intervals)
        (told,) = (event.record for event in events if isinstance(event, RunDone))
        assert told.intervals == record.intervals and told.tensors == record.tensors, "also in the last event"


class NoRoom:
    """A probe that is refused memory."""

    @staticmethod
    def measure_operators(limit):
        return None


def interval(predicted, measured):
    return IntervalRecord(0, (), predicted, 1.0, 0, 0, 0, 0, measured_seconds=measured)


@pytest.mark.parametrize(
    ("predicted", "measured", "found"),
    [(0.2, 0.2, False), (0.2, 0.24, False), (0.2, 0.26, True), (0.2, 0.14, True), (0.2, 0.0, False),
     (0.01, 0.04, False), (0.01, 0.06, True)],
)  # fmt: skip
def test_a_quarter_of_a_step_that_is_long_enough_is_suspicious(predicted, measured, found):
    assert looks_drifted(interval(predicted, measured)) is found


class FakeRun:
    """All of a run that judging drift looks at."""

    workload, device = workload(), torch.device("cpu")
    limit = SimpleNamespace(allow_kernels=nullcontext)

    def __init__(self):
        self.ticks = 0

    def tick(self):
        self.ticks += 1


@pytest.mark.parametrize("busy", [1.0, 1.3, 4.0, "now and then"])
@pytest.mark.parametrize(("slower", "found"), [(0.7, True), (0.9, False), (1.0, False), (1.2, False), (1.5, True)])
def test_a_busy_machine_does_not_look_like_a_wrong_model(monkeypatch, busy, slower, found):
    """It lengthens steps of both kinds; drift is a selection that takes longer beside the classifier alone."""
    profile = elastic_profile(tensor_profile(whole_steps(head=5e-3, full=12e-3, stock=14e-3)))
    costs = SelectionCosts(profile, FakeRun.workload, MicroBatching(8))
    everything = np.ones(len(costs.memory.names), dtype=bool)
    predicted, rng = ratio_without_updates(costs.times, everything), np.random.default_rng(0)
    assert 1.5 < predicted < 4
    steps = SimpleNamespace(selected=costs.memory.selected(everything), dry_step=lambda inputs, labels, only=None: only)

    def timed(step, device):
        only = step()
        load = rng.choice([1.0, 1.0, 1.1, 3.0, 7.0]) if busy == "now and then" else busy * rng.uniform(1, 1.05)
        return None, load * (5e-3 if only else 5e-3 * predicted * slower)

    monkeypatch.setattr(drift, "timed", timed)
    run = FakeRun()
    assert drifted(steps, costs, run, (3, 8, 8)) is found
    assert 1 <= run.ticks <= drift.STEP_PAIRS


def test_the_ratio_of_dry_steps_leaves_updates_out():
    network = Network(tensor_profile(whole_steps(head=5e-3, full=12e-3, stock=14e-3)), 8)
    times, updates = StepTimes(network), sum(part.update_seconds for part in network.tensors)
    head = sum(part.update_seconds for part, on in zip(network.tensors, network.head, strict=True) if on)
    assert updates > head > 0
    assert ratio_without_updates(times, times.everything) == pytest.approx((12e-3 - updates) / (5e-3 - head))
    assert ratio_without_updates(times, network.head) == 1


def test_a_profile_made_anew_scales_whole_steps_as_its_operators():
    old = tensor_profile(whole_steps(head=5e-3, full=12e-3, stock=14e-3))
    new = tensor_profile(seconds=2e-3)
    steps = drift._scaled_steps(old, new)
    network = [Network(profile, 8) for profile in (old, new)]
    everything = np.ones(len(network[0].names), dtype=bool)
    full, head = (
        [each.forward_seconds() + each.backward_seconds(each.head if least else everything) for each in network]
        for least in (False, True)
    )
    assert 1.8 < full[1] / full[0] < 2
    assert (steps.batch, steps.full) == (8, pytest.approx(12e-3 * full[1] / full[0]))
    assert steps.stock == pytest.approx(14e-3 * full[1] / full[0])
    assert steps.head == pytest.approx(5e-3 * head[1] / head[0])
    assert drift._scaled_steps(tensor_profile(), new) is None


def test_a_profile_at_another_batch_scales_whole_steps_all_the_same():
    """Half the samples in half the time is no change."""
    old = tensor_profile(whole_steps(), seconds=1e-3)
    half = tensor_profile(seconds=0.5e-3, batch=4)
    updates = sum(part.update_seconds for part in old.tensors)
    assert drift._scaled_steps(old, half).full == pytest.approx(12e-3, rel=2 * updates / 12e-3 + 0.01)


@given(st.integers(1, 6), st.floats(1e-6, 1.0), st.integers(1, 64))
def test_at_a_ratio_of_one_everything_trains(count, seconds, batch):
    network = Network(tensor_profile(convolutions=count, seconds=seconds), batch)
    assert choose(StepTimes(network), network, np.ones(len(network.names)), Headroom(1.0)).all()


def test_a_selection_within_memory_is_found_where_maps_that_pass_by_take_most_of_it():
    """They take a hundred times what is kept for tensors; what a selection may take is the little above them."""
    network = Network(tensor_profile(convolutions=5, parameters=100, map_bytes=100_000), 1)
    everything = np.ones(len(network.names), dtype=bool)
    least, most = (needed_bytes(network, mask, Headroom(1.0)) for mask in (network.head, everything))
    for share in (0.1, 0.3, 0.5, 0.9):
        headroom = Headroom(1.0, least + int(share * (most - least)))
        mask = choose(StepTimes(network), network, everything.astype(float), headroom)
        assert needed_bytes(network, mask, headroom) <= headroom.bytes and (mask & ~network.head).any(), share


def norms_network():
    kinds = ["Conv2d", "BatchNorm2d", "LayerNorm", "layer_norm", "LeanBatchNorm2d", "Linear"]
    operators = [
        operator(i, kind, f"{i}", (tensor(f"{i}.weight"), tensor(f"{i}.bias"))) for i, kind in enumerate(kinds)
    ]
    return Network(TensorProfile(8, tuple(operators)), 8)


@pytest.mark.parametrize(
    ("scheme", "weights", "biases"),
    [("head", "5", "5"), ("bn+bias", "12345", "012345"), ("full", "012345", "012345")],
)
def test_what_the_baselines_train(scheme, weights, biases):
    network = norms_network()
    wanted = {f"{i}.weight" for i in weights} | {f"{i}.bias" for i in biases}
    assert set(network.selected(Elastic(scheme=scheme).fixed(network))) == wanted


def test_a_linear_layer_before_the_classifier_trains_its_bias_alone():
    operators = (*layers(1)[:2], operator(2, "Linear", "fc", (tensor("fc.weight"), tensor("fc.bias"))))
    operators += (operator(3, "Linear", "out", (tensor("out.weight"), tensor("out.bias"))),)
    network = Network(TensorProfile(8, operators), 8)
    found = network.selected(Elastic(scheme="bn+bias").fixed(network))
    assert found == ("conv0.bias", "fc.bias", "out.weight", "out.bias")


def test_fixed_selections_are_those_of_the_scheme():
    costs = Elastic(scheme="head", micro_batch=8).costs(workload(batch_size=8), elastic_profile())
    assert costs.memory.selected(Elastic(scheme="head").fixed(costs.memory)) == ("head.weight", "head.bias")
