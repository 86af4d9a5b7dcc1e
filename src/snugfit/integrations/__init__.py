"""Memory budgets for the training loops of other libraries: Lightning, transformers and accelerate.

Each module imports its own library, which snugfit does not install; its names are public.
"""

__all__: list[str] = []
