"""Imports that only some requests need: their code is private memory, of the process at rest."""

from __future__ import annotations

from snugfit import _data as datasets
from snugfit import _models as models
from snugfit._core.options import data_sets_in
from snugfit._core.registry import import_strategies
from snugfit._core.request import Request
from snugfit._engine.tasks import rules_of
from snugfit.memory.process import library_import


def import_for(request: Request) -> None:
    """Import what strategies, network and data of a request need and others do not.

    Call it before its budget counts: what is imported later takes from the budget.
    """
    with library_import():
        import_strategies(request)
        models.import_builder(request.model.model)
        if rules_of(request.data.task).crops:
            for name in (request.data.name, *data_sets_in(request.strategy).values()):
                datasets.import_reader(name)
