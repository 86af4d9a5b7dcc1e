"""Without its library, a module says in one line how to install it."""

import builtins
import importlib
import sys

import pytest

from snugfit import integrations
from snugfit.errors import SnugfitError, UsageError
from snugfit.integrations._budget import LoopBudget

LIBRARIES = {
    "lightning": "lightning",
    "huggingface": "transformers",
    "accelerate": "accelerate",
    "ultralytics": "ultralytics",
}


@pytest.mark.parametrize("module", integrations.__all__)
def test_a_missing_library_is_one_clear_error(module, monkeypatch):
    library, real = LIBRARIES[module], builtins.__import__

    def missing(name, *others, **keywords):
        if name.partition(".")[0] == library:
            raise ModuleNotFoundError(f"No module named '{library}'")
        return real(name, *others, **keywords)

    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"snugfit.integrations.{module}", raising=False)
    monkeypatch.setattr(importlib.import_module("snugfit.integrations._budget"), "import_module", missing)
    expected = rf'this module needs {library}, which is missing: pip install "snugfit\[{module}\]"'
    with pytest.raises(UsageError, match=expected) as error:
        importlib.import_module(f"snugfit.integrations.{module}")
    assert isinstance(error.value, SnugfitError) and "\n" not in str(error.value)


@pytest.mark.parametrize("memory", ["much", -1, ""])
def test_a_budget_that_is_none_is_refused(memory):
    with pytest.raises(UsageError, match="--memory must be"):
        LoopBudget(memory)


def test_there_is_no_record_before_a_plan():
    with pytest.raises(UsageError, match="nothing has been planned"):
        _ = LoopBudget("1GB").record
