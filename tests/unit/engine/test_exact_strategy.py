"""``--strategy exact``: the best of the strategies with exact gradients."""

import pytest

import snugfit
from snugfit._core.known import check_foreign_options, check_strategies
from snugfit._core.option_groups import BudgetOptions
from snugfit._core.registry import config_of, considered
from snugfit._core.request import Request, StrategyOptions
from snugfit._engine.builder import make_strategies
from snugfit.errors import UsageError

LIMITED = BudgetOptions(memory="100MB")


def test_only_strategies_with_exact_gradients_are_considered():
    request = Request(strategy=StrategyOptions("exact"), budget=LIMITED)
    selection = make_strategies(request)
    names = [each.name for each in (*selection.strategies, *selection.standby)]
    assert names == ["backprop", "checkpoint", "tiled"] == [each.name for each in considered(request)]
    assert [each.name for each in selection.standby] == ["tiled"]
    assert not any(config_of(name).exact for name in selection.left_out)
    assert set(selection.left_out.values()) == {"its gradients are not exact"}


def test_options_of_strategies_that_are_not_exact_are_refused():
    check_foreign_options(Request(strategy=StrategyOptions("exact", batch_norm="exact")))
    with pytest.raises(UsageError, match="--local-loss aan is an option of blockwise, not of exact"):
        check_foreign_options(Request(strategy=StrategyOptions("exact", local_loss="aan")))
    with pytest.raises(UsageError, match="--time-ratio is for elastic, whose gradients are not exact"):
        check_strategies(Request(strategy=StrategyOptions("exact"), budget=BudgetOptions(time_ratio=0.5)))


def test_the_plan_names_the_strategy_to_run():
    planned = snugfit.plan(
        "smallconv", "digits", memory="100MB", strategy="exact", epochs=1, max_train=32, max_val=16, batch_size=8
    )
    choice = planned.plan.choice
    assert choice is not None and choice.exact and choice.strategy in ("backprop", "checkpoint")
    assert f"--strategy {choice.strategy}" in " ".join(planned.plan.command or ())
