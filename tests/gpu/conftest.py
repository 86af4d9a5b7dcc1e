"""The device of these tests: a GPU in those marked ``gpu``, and the processor where a body is worth trying there.

``SNUGFIT_TEST_DEVICE`` names another device for those marked ``gpu``, such as ``cuda:1``, or ``cpu`` to try them.
"""

import os

import pytest
import torch


def gpu() -> torch.device:
    """The device of tests marked ``gpu``; skips without one."""
    named = os.environ.get("SNUGFIT_TEST_DEVICE")
    if named is None and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return torch.device(named or "cuda:0")


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """The processor, and a GPU if there is one."""
    return torch.device("cpu") if request.param == "processor" else gpu()


@pytest.fixture(autouse=True)
def full_precision():
    """Convolutions and matrix products in float32, not in TF32, and by the same algorithms in every run."""
    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matrices.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    matrices.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = False, False, True
    yield
    matrices.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before
