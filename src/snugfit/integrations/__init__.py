"""Memory budgets for the training loops of other libraries: Lightning, transformers, accelerate and ultralytics.

Each module imports its own library, which snugfit does not install; the names in its ``__all__`` are public.
"""

__all__ = ["accelerate", "huggingface", "lightning", "ultralytics"]
