"""The process that trains rests little above torch, and loads nothing heavy while it works."""

import subprocess
import sys

import pytest

MIB = 2**20
RESTS_ABOVE_TORCH = 20 * MIB
ANON = "int(next(line for line in open('/proc/self/status') if line.startswith('RssAnon')).split()[1]) * 1024"
HEAVY = ("torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "kornia", "matplotlib", "sklearn", "scipy")


def output_of(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=250).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_rests_little_above_torch():
    torch = int(output_of(f"import torch; print({ANON})"))
    ours = int(output_of(f"import snugfit; snugfit.prepare_process(1); print({ANON})"))
    assert ours - torch < RESTS_ABOVE_TORCH, (ours - torch) / MIB


def test_planning_and_training_load_nothing_heavy(tmp_path):
    code = f"""if True:
        import sys, snugfit
        snugfit.prepare_process(1)
        small = dict(image_size=16, max_train=16, max_val=16, epochs=1, batch_size=8, profile_cache="off")
        for strategy in ("backprop", "checkpoint", "blockwise", "elastic"):
            plan = snugfit.plan("resnet20", "digits", snugfit.Budget(memory="400MB"), strategy=strategy, **small)
            plan.run(subscribers=(), out={str(tmp_path)!r} + "/" + strategy)
        print(*[name for name in {HEAVY} if type(sys.modules.get(name)).__name__ == "module"])
    """
    assert output_of(code).split() == []
