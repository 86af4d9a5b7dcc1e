"""Sentences of a plan about the modules of ``blockwise``."""

from snugfit._core.budget import Budget
from snugfit._core.explanation import explanation_of
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Cost, Phase, Plan
from snugfit._core.workload import Workload

UNIT_OPTIONS = [
    ({"saturation_stop": True}, "--saturation-stop"),
    ({"exit_tolerance": 0.01}, "--exit-tolerance"),
    ({"block_units": 3}, "--block-units"),
    ({"residency": "all"}, "--residency all"),
    ({"loss_aim": "memory"}, "--aim memory"),
]


def sentences(modules, *phases, **settings):
    """What a plan says about blockwise after the choice and its gradients."""
    cost = Cost(10**6, 1.0, 1.0, phases=tuple(Phase("block", 10**6, 1.0, 10, units) for units in phases))
    choice = Candidate("blockwise", True, {"modules": modules, **settings}, cost)
    workload = Workload("net", "images", (3, 4, 4), 2, 10, 5, 5)
    hardware = Hardware("cpu", "cpu", 1, 10**9, "Linux", "2", True)
    return list(explanation_of(Plan(workload, Budget(), hardware, (choice,), 0))[2:])


def test_one_module_is_backpropagation():
    assert sentences(((0, 7, ""),), ("a..h",)) == [
        "All 8 units form one module with the network's own loss, which is backpropagation."
    ]
    assert sentences(((0, 7, "0 (1 2)"),), ("a..h",))[1] == (
        "Some units run again in the backward pass, which saves memory and costs time."
    )


def test_a_module_per_unit():
    assert sentences(((0, 0, ""), (1, 1, "")), ("a", "b"), ()) == [
        "Each of its 2 units is a module that learns by a local loss; no gradient crosses between units."
    ]


def test_modules_in_between_are_named_with_their_units():
    modules = ((0, 2, "0 (1 2)"), (3, 3, ""), (4, 7, "4 (5 6) 7"))
    assert sentences(modules, ("a..c", "d"), ("e..h",), ()) == [
        "Its 8 units form 3 modules, between which no gradient crosses: "
        "a to c (3 units), d (1 unit), e to h (4 units).",
        "Some units of modules 1, 3 run again in the backward pass, which saves memory and costs time.",
    ]


def test_the_table_names_loss_and_modules():
    def terms(*modules):
        return Candidate("blockwise", True, {"modules": modules, "local_loss": "aan"}).terms

    assert terms((0, 2, ""), (3, 3, "")) == ("aan", "2 modules")
    assert terms((0, 3, "")) == ("1 module",)
    assert terms((0, 0, ""), (1, 1, "")) == ("aan",)


def test_the_number_of_modules_has_a_reason():
    """One sentence for each part of the continuum from backpropagation to a module per unit."""

    def last(*modules, **settings):
        found = sentences(modules, *[("a",)] * len(modules), module_units="auto", **settings)
        return [each for each in found if "other settings" not in each][-1]

    units = ((0, 0, ""), (1, 1, ""), (2, 2, ""))
    assert last((0, 2, "")) == "Smaller budgets take more modules, each with a local loss."
    fewer = "Fewer modules, which come closer to backpropagation, do not fit"
    fewest = fewer + ", or only at a batch below 16."
    assert last((0, 1, ""), (2, 2, "")) == last(*units) == fewest
    assert last(*units, wanted_batch=10) == fewer + ", or only at a batch below 10."
    assert last(*units, wanted_batch=1) == fewer + "."
    kept = " keeps one unit per module; otherwise modules are as few as the budget allows."
    for settings, option in UNIT_OPTIONS:
        assert last(*units, **settings) == option + kept
    assert last(*units, exit_tolerance=0.0) == fewest
