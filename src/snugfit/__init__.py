"""Train CNNs inside a memory budget that is predicted, enforced and verified.

>>> import snugfit
>>> snugfit.prepare_process()  # the budget counts from here: before model and data exist
>>> budget, small = snugfit.Budget(memory="100MB"), {"image_size": 8, "max_train": 64, "epochs": 1}
>>> plan = snugfit.plan("smallconv", "digits", budget, strategy="backprop", **small)
>>> print(plan)
smallconv on digits, budget 100.0 MB of memory
...
>>> record = plan.run(subscribers=(), out="runs/smallconv")
>>> record.enforced, record.measured["peak_bytes"] <= 100_000_000
(True, True)
>>> type(record.model)  # a plain module
<class 'torch.fx.graph_module...'>

The names in the ``__all__`` of this package (``snugfit._api`` imports them), and of each package in ``PUBLIC``, are
public. Packages with a leading underscore are private, and so are the modules inside a public package.
"""

from __future__ import annotations

import os

from snugfit._version import __version__ as __version__

os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")  # read once, while torch is loaded; see snugfit.memory.heap
# Read when CUDA starts: segments that grow leave fewer gaps, and cuBLAS takes 8 MiB of workspace instead of 32.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")

TYPE_CHECKING = False  # as in typing, whose import takes long; nothing would catch a Ctrl-C in the meantime
if TYPE_CHECKING:
    from typing import Any

    from snugfit._api import *  # noqa: F403

PUBLIC = (
    *("detection", "errors", "integrations", "lean", "local", "memory", "profiling", "selection", "strategies"),
    *("surgery", "tiling"),
)
"""The public packages, next to this one."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line's parent process runs without torch."""
    from importlib import import_module
    from types import ModuleType

    if name in PUBLIC:
        return import_module(f"snugfit.{name}")
    if name == "__all__" or not name.startswith("_"):
        api = import_module("snugfit._api")
        here = (key for key, each in vars(api).items() if key[0] != "_" and not isinstance(each, ModuleType))
        public = sorted({*here, *api.LATE} - {"Any", "LATE", "TYPE_CHECKING"})
        if name in ("__all__", *public):
            return public if name == "__all__" else getattr(api, name)
    raise AttributeError(f"module 'snugfit' has no attribute '{name}'")


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__"))
    return [*own, "PUBLIC", *PUBLIC, *__getattr__("__all__")]
