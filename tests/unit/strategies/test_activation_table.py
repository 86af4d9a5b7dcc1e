"""``profile --activation-memory``: the analytic figures and the measured one, of whatever trains."""

import psutil
import pytest
import torch
from torch import nn

import snugfit
from snugfit._core.option_groups import DataOptions, MachineOptions, ModelOptions, TrainingOptions
from snugfit._core.request import Request
from snugfit._engine.builder import assemble
from snugfit.errors import ModelError, UsageError
from snugfit.memory import Baseline, MemoryLimit
from snugfit.strategies.sidenet import activation_table as activations
from snugfit.strategies.sidenet.activation_table import activation_table, prepare_network

NO_LIMIT = MemoryLimit(None, Baseline(0, 0), torch.device("cpu"))


def assembly(model="resnet18", size=32, module=None):
    request = Request(
        ModelOptions(model, image_size=size),
        DataOptions("digits", max_train=32, max_val=8),
        training=TrainingOptions(batch_size=4, optimizer="adamw"),
        machine=MachineOptions(threads=1),
    )
    return assemble(request, module=module)


def table_of(trained):
    made = assembly()
    return activation_table(made.chain, made.workload, trained, NO_LIMIT)


@pytest.mark.parametrize("trained", ["sidenet", "head", "bias+head", "full"])
def test_a_step_takes_weights_state_and_at_least_what_is_kept(trained):
    table = table_of(trained)
    assert table["trained"] == trained and table["measured"]["batch"] == table["batch"] == 4
    assert table["total_bytes"] == 4 * table["peak_bytes"] + table["parameter_bytes"]
    activations = table["measured"]["tensor_peak_bytes"] - sum(table["resident"].values())
    trained_bytes = table["resident"]["optimizer"] / 2  # of AdamW: gradients and sums of them take no more
    assert 4 * table["cumulative_bytes"] < activations < 3 * 4 * table["peak_bytes"] + 2 * trained_bytes


def test_what_trains_and_in_which_mode():
    chain = assembly().chain
    prepared = prepare_network(chain, "sidenet")
    assert {name.split(".")[0] for name in prepared.names} == {"side", "fc"}
    norms = [(name, each) for name, each in prepared.module.named_modules() if isinstance(each, nn.BatchNorm2d)]
    assert all(layer.training == name.startswith("side.") for name, layer in norms)
    frozen = {name for name, parameter in prepared.module.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in prepared.module.named_parameters()} - prepared.names
    biases = prepare_network(chain, "bias+head").names
    assert {"layer1.0.bn1.bias", "fc.weight"} <= biases and "layer1.0.bn1.weight" not in biases


def test_a_side_network_is_the_default_where_there_can_be_one():
    assert prepare_network(assembly().chain, None).trained == "sidenet"
    plain = assembly("own", 8, nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))).chain
    prepared = prepare_network(plain, None)
    assert prepared.trained == "full" and prepared.names == {"0.weight", "0.bias", "3.weight", "3.bias"}
    with pytest.raises(ModelError):
        prepare_network(plain, "sidenet")


def test_nothing_runs_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", type("Few", (), {"available": 1000}))
    monkeypatch.setattr(activations, "step_peak", lambda *_: pytest.fail("ran"))
    assert table_of("head")["measured"]["tensor_peak_bytes"] is None


def test_a_refused_allocation_leaves_it_unmeasured_and_other_errors_do_not(monkeypatch):
    def refuse(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(activations, "step_peak", refuse)
    assert table_of("head")["measured"]["tensor_peak_bytes"] is None
    monkeypatch.setattr(activations, "step_peak", lambda *_: torch.empty(-1))
    with pytest.raises(RuntimeError, match="negative dimension"):
        table_of("head")


def test_a_profile_has_it_when_asked():
    request = assembly("smallconv", 8).request
    data = snugfit.profile_request(request, activation_memory=True, trained="head")
    memory = data["activation_memory"]
    assert memory["trained"] == "head" and memory["blocks"]
    assert all(unit["seconds"] is None and unit["macs"] > 0 for unit in data["units"]), "nothing was timed for it"
    with pytest.raises(UsageError, match="add activation_memory=True"):
        snugfit.profile_request(request, trained="head")
    found = snugfit.profile_request(request)
    assert "activation_memory" not in found and all(unit["seconds"] is not None for unit in found["units"])
