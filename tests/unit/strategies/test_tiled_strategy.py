"""What ``tiled`` measures, proposes and refuses."""

from dataclasses import replace

import pytest
import torch
from strategy_samples import line, profile
from torch import nn

from snugfit._chain import Chain
from snugfit._core.hardware import Hardware
from snugfit._core.workload import Workload
from snugfit.errors import UnknownNameError, UsageError
from snugfit.strategies.micro_batch import line_name, probe_of_line
from snugfit.strategies.tiled.candidates import chosen_plan, find_plans, parse_grid, probe_name, settings_of_probe
from snugfit.strategies.tiled.strategy import Tiled


def chain(size=16):
    with torch.device("meta"):
        layers = [
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1),
        ]
        head = [nn.ReLU(), nn.Flatten(), nn.Linear(6 * (size // 2) ** 2, 3)]
        return Chain.from_module(nn.Sequential(*layers, *head), (1, size, size), "small")


def workload(**changes):
    return Workload("small", "digits", (1, 16, 16), 3, 64, 16, 0, **changes)


HARDWARE = Hardware("cpu", "a processor", 1, 10**9, "Linux", "2.13", True)


@pytest.mark.parametrize("text", ["2", "0x2", "2x", "axb", "2x2x2", ""])
def test_tiles_that_are_none(text):
    with pytest.raises(UsageError, match="--tiles must be auto, or tiles down and across"):
        Tiled(tiles=text)


def test_tiles_in_words():
    assert parse_grid("2x3") == (2, 3) and parse_grid("auto") is None


def test_replicas_take_processes():
    with pytest.raises(UsageError, match="--replicas"):
        Tiled(replicas=2, processes=1)


def test_the_rest_is_at_a_place():
    with pytest.raises(UnknownNameError, match="--rest 'everywhere'"):
        Tiled(rest="everywhere", processes=2)


def test_what_it_cannot_serve():
    reasons = Tiled(tiles="9x1").validate(workload(), chain(), HARDWARE)
    assert any("cannot be cut into 9x1 tiles" in reason for reason in reasons)


def test_groups_that_are_none_of_the_network():
    with pytest.raises(UsageError, match="grouping profile"):
        Tiled(forward_groups="0-2 | 3-6").validate(workload(), chain(), HARDWARE)


@pytest.mark.parametrize(("processes", "rest"), [(1, "gateway"), (4, "gateway"), (4, "replicated")])
def test_settings_lead_back_to_the_plan_that_was_measured(processes, rest):
    strategy = Tiled(processes=processes, rest=rest)
    plans = find_plans(chain(), strategy)
    assert (
        plans
        and {plan.rest for plan in plans.values()} == {rest}
        and all(key == probe_name(plan) for key, plan in plans.items())
    )
    for key, plan in plans.items():
        assert chosen_plan(Tiled(**settings_of_probe(key), processes=processes)) == plan


def test_where_norms_use_the_batch_whole_maps_may_lie_in_scratch_files_after_all_that_keep_them_in_memory():
    plans = list(find_plans(chain(), Tiled(processes=1)).values())
    mapped = [plan.scratch > 0 for plan in plans]
    assert mapped == sorted(mapped) and set(mapped) == {False, True}
    assert {plan.scratch > 0 for plan in find_plans(chain(), Tiled(processes=1, scratch="off")).values()} == {False}
    assert {plan.scratch > 0 for plan in find_plans(chain(), Tiled(processes=1, scratch="on")).values()} == {True}
    (one,) = find_plans(chain(), Tiled(processes=1, scratch="on", tiles="2x2", forward_groups="one")).values()
    assert (one.grid, one.forward, one.scratch) == ((2, 2), "0-6", 2 * 4 * 4 * 16 * 16)


def test_networks_without_norms_keep_whole_maps_in_memory_unless_told():
    with torch.device("meta"):
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(784, 3)]
        plain = Chain.from_module(nn.Sequential(*layers), (1, 16, 16), "plain")
    assert {plan.scratch for plan in find_plans(plain, Tiled(processes=1)).values()} == {0}
    assert all(plan.scratch for plan in find_plans(plain, Tiled(processes=1, scratch="on")).values())


def test_scratch_is_storage_in_the_estimate():
    strategy = Tiled(processes=1, scratch="on", tiles="2x2", micro_batch=4)
    ((key, plan),) = find_plans(chain(), strategy).items()
    filled = replace(strategy, **settings_of_probe(key))
    cost = filled.estimate(workload(), profile(lines={key: line(0, 1)}), HARDWARE)
    assert cost.storage_bytes == cost.phases[0].storage_bytes == 4 * plan.scratch
    without = replace(filled, scratch="off", scratch_bytes=0)
    key = probe_name(chosen_plan(without))
    assert without.estimate(workload(), profile(lines={key: line(0, 1)}), HARDWARE).storage_bytes == 0


def test_an_accelerator_keeps_whole_maps_in_its_memory():
    gpu = replace(HARDWARE, device="cuda:0")
    assert any(
        "--scratch on" in reason for reason in Tiled(processes=1, scratch="on").validate(workload(), chain(), gpu)
    )
    assert not Tiled(processes=1).validate(workload(), chain(), gpu)
    probes = Tiled(processes=1, accumulate=False).probes(workload(), chain(), gpu)
    scratch = [settings_of_probe(probe.name)["scratch"] for probe in probes]
    assert set(scratch) == {"off"}


def test_scratch_that_cannot_be():
    with pytest.raises(UsageError, match="on one device"):
        Tiled(processes=2, scratch="on")
    with pytest.raises(UnknownNameError, match="--scratch"):
        Tiled(processes=1, scratch="yes")


def test_several_processes_have_a_tile_each():
    plan = next(iter(find_plans(chain(), Tiled(processes=4)).values()))
    assert plan.grid == (2, 2) and not plan.recompute
    assert {plan.recompute for plan in find_plans(chain(), Tiled(processes=4)).values()} == {False, True}
    assert next(iter(find_plans(chain(), Tiled(processes=4, replicas=2)).values())).cells == 4


def test_held_gradients_are_measured_only_where_a_step_without_them_fits():
    """Where nothing fits even one sample, every plan's lower bound is computed once: that of tiles takes seconds."""
    probes = {probe.name: probe for probe in Tiled(processes=1).probes(workload(), chain(), HARDWARE)}
    plain, held = next((name, other) for name in probes for other in probes if other == line_name(name, hold=True))
    for fits, needed in ((None, False), (line(0, 1), True)):
        assert probes[held].needed({plain: fits}, 1e9) == needed
    others = [probe for name, probe in probes.items() if name not in (plain, held)]
    assert all(
        probe.needed({plain: None, held: None}, 1e9) for probe in others if probe.name == probe_of_line(probe.name)
    )
