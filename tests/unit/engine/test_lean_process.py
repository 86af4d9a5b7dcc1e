"""The process that trains rests little above torch, and loads nothing heavy while it works."""

import subprocess
import sys

import pytest

MIB = 2**20
RESTS_ABOVE_TORCH = 8 * MIB
"""5.7 MiB here; the private memory of torch's kernels differs by some 2 MiB between processors."""
ANON = "int(next(line for line in open('/proc/self/status') if line.startswith('RssAnon')).split()[1]) * 1024"
HEAVY = ("torch._dynamo", "torch._inductor", "torch.onnx", "onnx", "sympy", "kornia", "matplotlib", "sklearn", "scipy")
LOADED = "*[name for name in {} if type(sys.modules.get(name)).__name__ == 'module']"


def output_of(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=250).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_rests_little_above_torch():
    torch = int(output_of(f"import torch; print({ANON})"))
    loaded = LOADED.format((*HEAVY, "rich"))
    ours, *heavy = output_of(f"import snugfit, sys; snugfit.prepare_process(1); print({ANON}, {loaded})").split()
    assert int(ours) - torch < RESTS_ABOVE_TORCH, (int(ours) - torch) / MIB
    assert heavy == []


UNUSED = {
    "backprop": (
        *("local", "selection", "surgery", "tiling", "profiling.tensors"),
        *("_data.decode", "_models.resnet", "_engine.exporting"),
    ),
    "blockwise": ("selection", "surgery", "tiling", "strategies.elastic.strategy", "strategies.backprop.strategy"),
}


@pytest.mark.parametrize("strategy", UNUSED)
def test_a_process_imports_what_its_strategy_model_and_data_need(strategy):
    code = f"""if True:
        import sys, snugfit
        from snugfit._core.request import Request
        from snugfit.memory.process import late_bytes
        snugfit.prepare_process(1)
        assert not any(name.endswith(".strategy") for name in sys.modules if name.startswith("snugfit.strategies"))
        small = dict(image_size=8, max_train=16, max_val=16, batch_size=8, profile_cache="off")
        planned = snugfit.plan_request(Request.of(model="smallconv", strategy={strategy!r}, memory="100MB", **small))
        assert planned.plan.memory.process_bytes == planned.baseline.anon + late_bytes() > planned.baseline.anon
        print(*sys.modules)
    """
    loaded = set(output_of(code).split())
    assert loaded & {*(f"snugfit.{name}" for name in UNUSED[strategy]), "PIL", "rich", "yaml", "psutil"} == set()
    assert f"snugfit.strategies.{strategy}.strategy" in loaded


def test_planning_and_training_load_nothing_heavy(tmp_path):
    code = f"""if True:
        import sys, snugfit
        snugfit.prepare_process(1)
        small = dict(image_size=16, max_train=16, max_val=16, epochs=1, batch_size=8, profile_cache="off")
        models = dict(backprop="resnet20", checkpoint="smallconv", blockwise="smallconv", elastic="smallconv")
        for strategy, model in models.items():
            ratio = 0.9 if strategy == "elastic" else None  # less may be too small in a network of few layers
            budget = snugfit.Budget(memory="400MB", time_ratio=ratio)
            plan = snugfit.plan(model, "digits", budget, strategy=strategy, **small)
            plan.run(subscribers=(), out={str(tmp_path)!r} + "/" + strategy)
        print({LOADED.format(HEAVY)})
    """
    assert output_of(code).split() == []
