"""Units of ``blockwise`` that go on from a checkpoint: the same state, and no second copy of the weights in memory."""

import sys

import pytest


def resume_a_unit():
    import tempfile
    from functools import partial

    import torch
    from torch import nn

    from snugfit._chain import Chain
    from snugfit._core.workload import OptimizerSettings, Workload
    from snugfit._storage.checkpoint import CheckpointStore
    from snugfit.local.assignment import Layout
    from snugfit.memory import make_meter, prepare_process, release_memory
    from snugfit.strategies.blockwise.worker import LocalUnit

    shape, classes = (3, 8, 8), 5
    work = Workload("net", "data", shape, classes, 8, 4, 4, optimizer=OptimizerSettings("sgd", lr=0.05))

    def unit():
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(3, 512, 3, padding=1), nn.ReLU(), nn.Conv2d(512, 512, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes),
        ).to(memory_format=torch.channels_last)  # fmt: skip
        chain = Chain.from_module(network, shape)
        layout = Layout.of(chain, "aan", classes, [len(chain.units)])
        return LocalUnit(layout.modules[0].module, layout.make_loss(0), work)

    resting = prepare_process(1)
    meter = make_meter(resting, torch.device("cpu"))
    images, labels = torch.rand(8, *shape), torch.arange(8) % classes
    first = unit()
    first.step(images, labels)
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(folder)
        store.save({"unit0": first.state()}, {})
        saved = {name: tensor.clone() for name, tensor in first.state().items()}
        first.step(images, labels)
        wanted = {name: tensor.clone() for name, tensor in first.state().items()}
        second = unit()
        release_memory()
        meter.restart()
        before = meter.current_bytes
        second.load_state(partial(store.latest().load, "unit0"))
        grown = meter.mark() - before
    same = all(torch.equal(tensor, saved[name]) for name, tensor in second.state().items())
    second.step(images, labels)
    goes_on = all(torch.equal(tensor, wanted[name]) for name, tensor in second.state().items())
    momentum = sum(tensor.nbytes for name, tensor in saved.items() if name.startswith("optimizer/"))
    return {"grown": grown, "momentum": momentum, "same": same, "goes_on": goes_on}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="private memory is read from /proc")
def test_a_resumed_unit_takes_its_optimizer_state_and_no_second_copy_of_its_weights(fresh_process):
    found = fresh_process(resume_a_unit)["resume_a_unit"]
    assert found["same"] and found["goes_on"]
    assert found["momentum"] > 9_000_000, "as much as the weights"
    assert found["grown"] < 1.5 * found["momentum"], "twice with a copy of the weights"
