"""The strategy ``backprop``, described without torch."""

from snugfit._core.strategy_config import StrategyConfig
from snugfit.strategies.micro_batch import AccumulationOptions


class Config(StrategyConfig):
    """Plain backpropagation."""

    name = "backprop"
    implementation = "snugfit.strategies.backprop.strategy:Backprop"
    options = AccumulationOptions
    order = 10
    exact = True
    expected_loss = 0
    activations = ("int8", "int4")
    rounds_weights = True
