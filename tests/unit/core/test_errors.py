"""The tree of errors, as its docstring draws it, and the exit codes."""

import re

import pytest

from snugfit import errors
from snugfit.errors import InfeasibleBudgetError, SnugfitError, UnknownNameError

TREE = {
    "SnugfitError": ("Exception", 1),
    "UsageError": ("SnugfitError", 2),
    "UnknownNameError": ("UsageError", 2),
    "InfeasibleBudgetError": ("SnugfitError", 3),
    "InfeasibleTimeError": ("SnugfitError", 3),
    "UnusableInputError": ("SnugfitError", 4),
    "DataError": ("UnusableInputError", 4),
    "ModelError": ("UnusableInputError", 4),
    "CheckpointError": ("UnusableInputError", 4),
    "BudgetExceededError": ("SnugfitError", 5),
    "OutOfStorageError": ("SnugfitError", 6),
    "DivergedError": ("SnugfitError", 7),
    "WorkerLostError": ("SnugfitError", 8),
    "InterruptedRunError": ("SnugfitError", 130),
}


@pytest.mark.parametrize("name", sorted(TREE))
def test_parent_and_exit_code(name):
    parent, code = TREE[name]
    kind = getattr(errors, name)
    assert kind.exit_code == code
    assert parent in [base.__name__ for base in kind.__bases__]


def test_no_error_is_missing_from_the_tree_or_from_the_drawing():
    defined = {n for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, SnugfitError)}
    assert defined == set(TREE) == set(re.findall(r"\w+Error", errors.__doc__))
    drawn = dict(re.findall(r"(\w+Error) +(\d+) ", errors.__doc__))
    assert {name: int(code) for name, code in drawn.items()} == {
        name: code for name, (parent, code) in TREE.items() if parent in ("Exception", "SnugfitError")
    }


def test_usage_errors_are_value_errors():
    assert issubclass(errors.UsageError, ValueError)


@pytest.mark.parametrize(
    ("name", "nearest"), [("chekpoint", "checkpoint"), ("blockwize", "blockwise"), ("back-prop", "backprop")]
)
def test_an_unknown_name_offers_the_nearest(name, nearest):
    error = UnknownNameError("strategy", name, ["blockwise", "backprop", "checkpoint"])
    assert f"unknown strategy '{name}'" in str(error) and f"Did you mean '{nearest}'?" in str(error)
    assert error.known == ["backprop", "blockwise", "checkpoint"] and error.kind == "strategy"


def test_a_name_like_no_other_gets_the_list_only():
    text = str(UnknownNameError("model", "zzzzzz", ["vgg16", "resnet18"]))
    assert "Did you mean" not in text and "Known: resnet18, vgg16." in text


def test_a_message_that_quotes_much_loses_its_middle():
    said = str(errors.UsageError(f"'{'x' * 9000}' is no host. Correct it."))
    assert len(said) < 2001 and said.startswith("'xxx") and said.endswith("is no host. Correct it.")
    assert str(errors.UsageError("short.")) == "short."


def test_an_infeasible_budget_says_what_is_lacking():
    error = InfeasibleBudgetError(
        "It does not fit.", closest="blockwise", lacking_bytes=5_000_000, smallest_bytes=45_000_000
    )
    assert (error.closest, error.lacking_bytes, error.smallest_bytes) == ("blockwise", 5_000_000, 45_000_000)
    assert "lacks 5.0 MB" in str(error) and "would do: 45.0 MB" in str(error)
